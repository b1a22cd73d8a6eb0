"""What the CUDA caching allocator would hold, counted over fake tensors: storages that
live, in blocks of 512 bytes, as ``torch.cuda.memory_allocated`` counts them.

Not counted are segments, which the allocator asks of the device (2 MiB for blocks below
1 MiB, else 20 MiB or multiples of 2 MiB: ``memory_reserved``), what a kernel allocates
for itself (cuBLAS keeps 32 MiB), and CUDA's context.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, UntypedStorage
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# kMinBlockSize of c10/cuda/CUDACachingAllocator.h
BLOCK = 512


def block(num_bytes: int) -> int:
    """Return the bytes that the allocator gives for so many."""
    return -(-num_bytes // BLOCK) * BLOCK


def held(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of these tensors' storages, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(block(s.nbytes()) for s in storages.values())


class Allocations(TorchDispatchMode):
    """Bytes that are allocated ``now``, and were at most (``peak``) since ``reset``.

    Enter it within the mode of fake tensors whose storages it counts. (torch's own
    MemTracker hooks modules, which a model compiled as one graph does not allow.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._mode = active_fake_mode()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = self._now = 0  # the second with what was freed since a sweep

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, or what is compiled would run eagerly."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            ours = isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode
            if ours and tensor.device.type == "cuda":
                self._take(tensor.untyped_storage())
        return out

    def _take(self, storage: UntypedStorage) -> None:
        if storage._cdata in self._live:  # weak references keep that number taken
            return
        size = block(storage.nbytes())
        self._live[storage._cdata] = StorageWeakRef(storage), size
        self._now += size
        if self._now > self._most:
            self._most = max(self._most, self.now)

    @property
    def now(self) -> int:
        """Return the bytes that live."""
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        self._now = sum(size for _, size in self._live.values())
        return self._now

    @property
    def peak(self) -> int:
        """Return the most bytes that lived at once."""
        return self._most

    def reset(self) -> None:
        """Begin a new peak."""
        self._most = self.now
