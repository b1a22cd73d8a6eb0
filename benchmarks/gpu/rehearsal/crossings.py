"""What crosses between host and device, and the collectives that are called: noted in
every operation over fake CUDA tensors.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import marsopt
from train.forecast.record import KINDS

aten = torch.ops.aten
COPY, WAIT = "copy", "wait"
# of fake tensors, which have no values: a result, or its shape, depends on one
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
LIBRARY = Path(marsopt.__file__).parent


@dataclass(frozen=True)
class Crossing:
    """Something that crosses between host and device.

    Args:
        kind: "copy" (operands or results lie on both), or "wait" for a value.
        operation: torch's name of it.
        shape: of what is read.
        way: "cpu to cuda" or "cuda to cpu".
        where: the innermost lines of the library that led there, outermost first.
    """

    kind: str
    operation: str
    shape: tuple[int, ...]
    way: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        where = self.where[-1] if self.where else "outside of the library"
        return f"{self.kind}, {self.way}, in {where}"


def _where() -> tuple[str, ...]:
    found = []
    for frame in traceback.extract_stack():
        path = Path(frame.filename)
        if path.is_relative_to(LIBRARY):
            place = path.relative_to(LIBRARY.parent)
            found.append(f"{place}:{frame.lineno} {frame.name}")
    return tuple(found[-2:])


class Watch(TorchDispatchMode):
    """Notes in ``found`` what crosses between host and device within it, the host's
    calls of ``torch.cuda.synchronize`` too; and counts ``collectives`` by kind.

    To be entered within a FakeTensorMode. The host that asks for a value of the device,
    which fake tensors lack, is told 1, and goes on. Where the shape of a result depends
    on values, fake tensors have no result: ``watched`` ends there. Memory is pinned,
    which fake tensors cannot be.

    A 0-D tensor of the CPU that takes part in arithmetic on the device is noted as a
    copy, too: torch reads it on the host, so that a graph would keep what it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Crossing] = []
        self.collectives: Counter[str] = Counter()
        self.num_operations = 0
        self.ended = False  # before its end
        self._pinned = WeakIdKeyDictionary()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, or what is compiled would run eagerly."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        kwargs = kwargs or {}
        if func is aten._pin_memory.default:
            out = torch.empty_like(args[0])
            self._pinned[out.untyped_storage()] = True
            return out
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        self._count(func)
        into = _placed((args, kwargs))
        on_device = any(x.is_cuda for x in into)
        if func is aten._local_scalar_dense.default and on_device:
            self._note(WAIT, func, into[0], "cuda to cpu")
            return _one(args[0].dtype)
        try:
            out = func(*args, **kwargs)
        except NEEDS_VALUES:
            if on_device:
                self._note(WAIT, func, into[0], "cuda to cpu")
                self.ended = True
            raise
        self._look(func, into, _placed(out))
        return out

    def _count(self, func) -> None:
        name = func._schema.name
        communicates = func.namespace in ("c10d", "_c10d_functional")
        if communicates and not name.endswith("wait_tensor"):
            self.collectives[KINDS.get(name, name)] += 1

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._pinned

    def _look(self, func, into: list[Tensor], gives: list[Tensor]) -> None:
        """Note an operation over both devices."""
        every = [*into, *gives]
        if len({x.device.type for x in every}) < 2:
            return
        # what is written is the first operand of a copy in place
        in_place = func is aten.copy_.default
        source = into[1] if in_place else every[0]
        way = "cuda to cpu" if source.is_cuda else "cpu to cuda"
        self._note(COPY, func, source, way)

    def _note(self, kind: str, func: Any, tensor: Tensor | None, way: str) -> None:
        shape = () if tensor is None else tuple(tensor.shape)
        found = Crossing(kind, str(func), shape, way, _where())
        self.found.append(found)

    def __enter__(self):
        self._patch = mock.patch.object(torch.cuda, "synchronize", self._synchronize)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)

    def _synchronize(self, *args) -> None:
        name = "torch.cuda.synchronize"
        self._note(WAIT, name, None, "cuda to cpu")


def _one(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _placed(tree: Any) -> list[Tensor]:
    """Return its tensors, in their order; meta tensors lie nowhere."""
    tensors = (t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))
    return [t for t in tensors if t.device.type in ("cpu", "cuda")]


def watched(act: Callable[[], Any]) -> Watch:
    """Call ``act`` under a watch, to its end if fake tensors can reach it."""
    watch = Watch()
    try:
        with watch:
            act()
    except NEEDS_VALUES:
        if not watch.ended:  # it needs values of the host, which have to be real
            raise
    return watch
