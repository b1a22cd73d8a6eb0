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
COPIES = (aten._to_copy.default, aten.copy_.default)
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
        self._look(func, into, _tensors(out), args, kwargs)
        return out

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._pinned

    def _look(
        self, func, into: list[Tensor], gives: list[Tensor], args, kwargs
    ) -> None:
        """Note an operation over both devices. A number of the host, 0-D, that a kernel
        takes as an argument is none.
        """
        taken = [x for x in into if x.ndim or func in COPIES]
        if not taken or {x.device.type for x in (*taken, *gives)} != {"cpu", "cuda"}:
            return
        in_place = func is aten.copy_.default
        first = taken[-1] if in_place else taken[0]
        here = next(x for x in (*taken, *gives) if x.device.type == "cpu")
        asked = kwargs.get("non_blocking", in_place and len(args) > 2 and args[2])
        to = "cuda" if first.device.type == "cpu" else "cpu"
        way = f"{first.device.type} to {to}"
        self._note(func, first, way, waits=not (asked and self._is_pinned(here)))

    def _note(self, func, tensor: Tensor, way: str, *, waits: bool) -> None:
        found = Crossing(func.name(), tuple(tensor.shape), way, waits)
        self.crossings.append(found)

    def taken(self) -> tuple[list[Crossing], Counter[str]]:
        """Return crossings and collectives since the last call."""
        found = self.crossings, self.collectives
        self.crossings, self.collectives = [], Counter()
        return found
