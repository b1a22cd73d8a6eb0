"""The class's kernels: the functions of the one step, compiled, with one commit at the
rim: results go into the tensors that hold them, inside the compiled region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from marsopt.functional import step
from marsopt.functional.rows import Rows
from marsopt.functional.step import PureKernels
from marsopt.functional.step_types import (
    Decision,
    RuleGroup,
    Scales,
    Stack,
)
from marsopt.optim.calls import Call
from marsopt.optim.compiling import backend_failed, compiled_where_possible, once
from marsopt.optim.ranges import named_range
from marsopt.optim.writes import Writes

# ---- in place ------------------------------------------------------------------------


def assess(
    groups: Sequence[RuleGroup], live: Tensor | None, max_norm: Tensor | None
) -> tuple[Tensor, Decision]:
    """``step.assess`` in one graph: where one call has all stacks, and no sum over
    ranks lies between.
    """
    return step.assess(groups, live, max_norm, lambda sums: sums)


def update_(
    stacks: Sequence[Stack],
    scales: Sequence[Scales],
    begin: Callable[[], None] | None = None,
) -> list[Tensor | None]:
    """``step.update`` of every stack; return what is to be orthogonalized.

    Args:
        stacks: those of this call.
        scales: theirs.
        begin: called before every write, where this runs eagerly.
    """
    matrices = []
    for old, s in zip(stacks, scales, strict=True):
        new, u = step.update(old, s)
        if begin is not None:
            begin()
        _commit(old, new)
        matrices.append(u)
    return matrices


def _commit(old: Stack, new: Stack) -> None:
    """Write what is new into the tensors that hold it."""
    if new.x is not old.x:
        old.x.copy_(new.x)
    for symbol, buffer in old.buffers.items():
        if new.buffers[symbol] is not buffer:
            buffer.copy_(new.buffers[symbol])


def apply_(
    stacks: Sequence[Stack],
    factors: Sequence[Tensor],
    rows: Sequence[Rows | None],
    scales: Sequence[Scales],
    begin: Callable[[], None] | None = None,
) -> list[None]:
    """``step.apply`` of every stack; ``begin`` as in ``update_``."""
    for old, o, row, s in zip(stacks, factors, rows, scales, strict=True):
        new = step.apply(old, o, row, s)
        if begin is not None:
            begin()
        _commit(old, new)
    return [None] * len(stacks)


# ---- compiled ------------------------------------------------------------------------

# What is decided for each tensor is a few bytes in each of many steps. Inductor fuses
# loops that share data, ten bytes or more; here each loop for itself costs a launch.
NUMBERS = {"aggressive_fusion": True, "score_fusion_memory_threshold": 0}


class InPlaceKernels(PureKernels):
    """Kernels that write into the stacks that they are given.

    Two graphs move an elementwise algorithm: statistics with all that is decided from
    them, and the update. A matrix algorithm has a third, after Newton-Schulz. Where
    there are several calls, or other ranks have to be asked, the decision is a graph of
    its own. Calls of one graph share it and never recompile.

    Ranges named "marsopt: ..." show the parts in a profiler's trace.

    Args:
        calls: which stacks each call of a graph moves.
        writes: told before the first write; its end is the caller's.
        alone: whether no other rank has a say.
        compile: False = eager.
        required: whether a backend that fails raises.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        writes: Writes,
        *,
        alone: bool,
        compile: bool,
        required: bool,
    ) -> None:
        self.calls, self._writes = calls, writes
        self._fused = alone and len(calls) == 1
        self._compile, self._required = compile, required
        self._functions: dict[tuple[Callable, int], Callable] = {}
        self._say = once()

    def _compiled(self, function: Callable, graph: int = 0) -> Callable:
        """Return ``function`` as calls of this graph take it."""
        if not self._compile:
            return function
        if (function, graph) not in self._functions:
            self._functions[function, graph] = compiled_where_possible(
                function,
                required=self._required,
                say=self._say,
                options=NUMBERS if function in (assess, step.decide) else None,
            )
        return self._functions[function, graph]

    def assess(
        self,
        groups: Sequence[RuleGroup],
        live: Tensor | None,
        max_norm: Tensor | None,
        total: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Decision]:
        with named_range("marsopt: norms"):
            if self._fused:
                return self._compiled(assess)(groups, live, max_norm)
            stacks = [stack for group in groups for stack in group.stacks]
            partial = step.statistics(self._each(step.products, stacks), live)
            with named_range("marsopt: exchange"):
                sums = total(partial)
            hypers = [group.hyper for group in groups]
            return sums, self._compiled(step.decide)(hypers, sums, max_norm)

    def _each(
        self, function: Callable, stacks: Sequence[Stack], *columns: Sequence
    ) -> list:
        """Return what ``function`` of lists gives, call by call; ``columns`` and the
        result have one item per stack. A stack whose first of ``columns`` is None has
        no part in it.
        """
        found: list = [None] * len(stacks)
        for call in self.calls:
            mine = [i for i in call.stacks if not columns or columns[0][i] is not None]
            if not mine:
                continue
            lists = [[c[i] for i in mine] for c in (stacks, *columns)]
            parts = self._call(function, call.graph, lists)
            for i, part in zip(mine, parts, strict=True):
                found[i] = part
        return found

    def _call(self, function: Callable, graph: int, lists: Sequence[list]) -> list:
        if function is step.products:
            return self._compiled(function, graph)(*lists)
        if not self._compile:
            return function(*lists, begin=self._writes.begin)
        compiled, before = self._compiled(function, graph), self._writes.unfinished
        self._writes.begin()  # a graph cannot say when
        try:
            return compiled(*lists)
        except Exception as error:
            if backend_failed(error) and not before:
                self._writes.end()  # nothing has run
            raise

    def update(
        self, stacks: Sequence[Stack], scales: Sequence[Scales]
    ) -> tuple[list[Stack], list[Tensor | None]]:
        with named_range("marsopt: update"):
            return list(stacks), self._each(update_, stacks, scales)

    def orthogonalize(self, *args) -> list[Tensor]:
        with named_range("marsopt: newton-schulz"):
            return step.orthogonalize(*args)

    def apply(
        self,
        stacks: Sequence[Stack],
        factors: Sequence[Tensor | None],
        rows: Sequence[Rows | None],
        scales: Sequence[Scales],
    ) -> list[Stack]:
        with named_range("marsopt: update"):
            self._each(apply_, stacks, factors, rows, scales)
        return list(stacks)
