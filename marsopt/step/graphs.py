"""The runner of graphs: one torch.compile graph a formula, over parts (P, n) of any
size, which writes its results where its operands are. Without a compiler the same
functions run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from marsopt.rules.algorithm import Algorithm
from marsopt.rules.dtypes import scalar_dtype
from marsopt.step.compiling import Graph, announce, declined, graph_of
from marsopt.step.leaf import Leaf, memory_of
from marsopt.step.step import (
    ROW,
    Formula,
    Leaves,
    Operands,
    Result,
    Results,
    masked,
    products,
)

SMALL = 4096  # elements; inductor chooses threads of a CPU by the first size

Say = Callable[[int, str], None]


class Update(NamedTuple):
    """The graph of a formula: everything but its tensors."""

    function: Formula
    algorithm: Algorithm
    names: tuple[str, ...]  # of its operands


def update(kind: Update, tensors: list[Tensor]) -> None:
    """Write the results of a formula into the operands of their names.

    Args:
        kind: says which tensors there are.
        tensors: ok (P,), the table (P, S), and operands (P, n).
    """
    ok, table, *operands = tensors
    by_name = dict(zip(kind.names, operands, strict=True))
    new = masked(kind.function, kind.algorithm, ok, table, by_name)
    for name, value in new.items():
        by_name[name].copy_(value)


def measure(is_long: bool, tensors: list[Tensor]) -> Tensor:
    """Return the inner products of g and, if there is one, h, both (P, n)."""
    return products(tensors[0], tensors[1] if len(tensors) > 1 else None, is_long)


class Call(NamedTuple):
    """A function of tables, and its arguments but for tensors."""

    function: Callable[..., Any]
    spec: pytree.TreeSpec
    statics: tuple[Any, ...]  # the arguments' leaves; TENSOR in the place of a tensor


TENSOR = object()


def call(kind: Call, tensors: list[Tensor]) -> Any:
    """Return the result of a function of tables."""
    rest = iter(tensors)
    leaves = [next(rest) if leaf is TENSOR else leaf for leaf in kind.statics]
    return kind.function(*pytree.tree_unflatten(leaves, kind.spec))


def _as_parts(leaf: Leaf, x: Tensor) -> Tensor:
    """Return an operand as (P, n): gradients that were laid out for kernels are not."""
    return x if x.shape == leaf.x.shape else memory_of(x, leaf.x.shape)


class Graphs:
    """A runner that writes new values into operands.

    Graphs run eagerly under a TorchDispatchMode, so that CommDebugMode and
    FlopCounterMode count every operation, and with TORCH_COMPILE_DISABLE=1. An error of
    the compiler is raised, before anything is written.

    Args:
        device: of the tensors.
        compile: False = eager.
        say: told, with a level of logging, why graphs run eagerly.
    """

    writes = True
    # while a profile asks for it: of each run of a graph, in order, its key and how
    # many elements it went over
    runs: ClassVar[list[tuple[Hashable, int]] | None] = None

    def __init__(self, device: torch.device, *, compile: bool, say: Say) -> None:
        self._device, self._compile, self._say = device, compile, say
        # strong references: the process-wide cache may drop a graph that is in use
        self._graphs: dict[Hashable, Graph] = {}

    def reduce(self, leaves: Leaves, grads: Sequence[Tensor | None]) -> Tensor:
        hs, sums = leaves.operands.get("h"), []
        dtype = scalar_dtype(self._device)
        for n, (leaf, g) in enumerate(zip(leaves.leaves, grads, strict=True)):
            if g is None or not g.numel():
                num = 1 if hs is None else 3
                sums.append(leaf.x.new_zeros(len(leaf.norms), num, dtype=dtype))
                continue
            g = _as_parts(leaf, g)
            tensors = [g] if hs is None else [g, hs[n]]
            sums.append(self._compute(measure, g.shape[1] >= ROW, tensors))
        return torch.cat(sums)

    def map(
        self,
        function: Formula,
        leaves: Leaves,
        operands: Operands,
        ok: Tensor,
        table: Tensor,
    ) -> list[Results | None]:
        kind = Update(function, leaves.algorithm, tuple(operands))
        results: list[Results | None] = []
        pairs = zip(leaves.leaves, leaves.rows, strict=True)
        columns = zip(*operands.values(), strict=True)
        for (leaf, rows), of_leaf in zip(pairs, columns, strict=True):
            tensors = [_as_parts(leaf, x) for x in of_leaf if x is not None]
            if len(tensors) < len(of_leaf):
                results.append(None)
                continue
            if tensors[0].numel():
                self._compute(update, kind, [ok[rows], table[rows], *tensors])
            results.append(dict(zip(kind.names, tensors, strict=True)))
        return results

    def small(self, function: Callable[..., Result], *args: Any) -> Result:
        # a CPU takes no longer eagerly, where a graph takes seconds to compile
        if self._device.type == "cpu" or not self._compile or declined():
            return function(*args)
        leaves, spec = pytree.tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        statics = [TENSOR if isinstance(x, Tensor) else x for x in leaves]
        kind = Call(function, spec, tuple(statics))
        result: Result = self._compute(call, kind, tensors, dynamic=False)
        return result

    def _compute(
        self,
        function: Callable[[Any, list[Tensor]], Any],
        kind: Any,
        tensors: list[Tensor],
        dynamic: bool = True,
    ) -> Any:
        """Return ``function(kind, tensors)``, by a graph."""
        if not self._compile:
            return function(kind, tensors)
        if (off := declined()) is not None:
            self._say(logging.INFO, f"the optimizer step runs eagerly {off}")
            return function(kind, tensors)
        last = tensors[-1]
        forms: list[Hashable] = [self._device.type, *[t.dtype for t in tensors]]
        if dynamic:  # Dynamo makes graphs of their own for sizes of 1
            is_small = self._device.type == "cpu" and last.numel() < SMALL
            forms += [last.shape[0] == 1, last.shape[1] == 1, is_small]
        else:
            forms += [(t.shape, t.stride()) for t in tensors]
        key = function, kind, tuple(forms), dynamic
        if self.runs is not None:
            self.runs.append((key, max(x.numel() for x in tensors)))
        graph = self._graphs.get(key)
        if graph is None:
            announce()
            graph = self._graphs[key] = graph_of(*key)
        return graph(tensors)
