"""What crosses between host and device, and the collectives that are called: noted in
every operation over fake CUDA tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
# they send a number of the device to the host, which waits for it
READS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default)


@dataclass(frozen=True)
class Crossing:
    """An operation with tensors of host and device.

    Args:
        operation: its name.
        shape: of the first tensor that it takes.
        way: such as "cpu to cuda".
        waits: whether the host waits: for what it reads, or for a copy of memory that
            is not pinned or that was not asked to be asynchronous.
    """

    operation: str
    shape: tuple[int, ...]
    way: str
    waits: bool


def _tensors(tree: object) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Watch(TorchDispatchMode):
    """Notes crossings and collectives; pins memory, which fake tensors cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[Crossing] = []
        self.collectives: Counter[str] = Counter()
        self._pinned = WeakIdKeyDictionary()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, or what is compiled would run eagerly."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._pin_memory.default:
            out = torch.empty_like(args[0])
            self._pinned[out.untyped_storage()] = True
            return out
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collectives[func.name()] += 1
        into = _tensors((args, kwargs))
        if func in READS and any(x.device.type == "cuda" for x in into):
            self._note(func, into[0], "cuda to cpu", waits=True)
        out = func(*args, **kwargs)
        self._look(func, into, _tensors(out), kwargs)
        return out

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._pinned

    def _look(self, func, into: list[Tensor], gives: list[Tensor], kwargs) -> None:
        """Note an operation over both devices. A number of the host, 0-D, that a kernel
        takes as an argument is none.
        """
        source = [x.device.type for x in into if x.ndim or func in COPIES]
        devices = {*source, *(x.device.type for x in gives)}
        if not {"cpu", "cuda"} <= devices or not into:
            return
        first = into[-1] if func is aten.copy_.default else into[0]
        to = "cuda" if first.device.type == "cpu" else "cpu"
        is_free = kwargs.get("non_blocking", False) and self._is_pinned(first)
        self._note(func, first, f"{first.device.type} to {to}", waits=not is_free)

    def _note(self, func, tensor: Tensor, way: str, *, waits: bool) -> None:
        found = Crossing(func.name(), tuple(tensor.shape), way, waits)
        self.crossings.append(found)


COPIES = (aten._to_copy.default, aten.copy_.default)
