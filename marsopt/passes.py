"""The passes of one step of the class over its chunks of stacks, compiled or eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from marsopt import commit
from marsopt.collectives import LOCAL, Collectives
from marsopt.compiling import compiled_where_possible, once
from marsopt.layout import Layout
from marsopt.step import Scales, Stack, Verdict, measure, orthogonalize, scale


class Part(NamedTuple):
    """One chunk's stacks in this step, and which leaves live (None: all)."""

    family: int
    stacks: list[Stack]
    live: list[Tensor] | None


class Passes:
    """Two graphs move an elementwise rule: norms with everything that is decided from
    them, and the update. A matrix rule has a third, after Newton-Schulz. Where there
    are several chunks, or other ranks have to be asked, norms, decision and scalars are
    graphs of their own; every family of chunks has its own, so that none recompiles.

    Ranges named "marsopt: ..." show the passes in a profiler's trace.
    """

    def __init__(
        self, collectives: Collectives, compile: bool, wanted: bool | None
    ) -> None:
        self._collectives, self._compile, self._wanted = collectives, compile, wanted
        self._say = once()
        self._functions: dict[tuple[Callable, int], Callable] = {}

    def own(self, function: Callable, family: int = 0) -> Callable:
        """``function`` as this family of chunks calls it."""
        if not self._compile:
            return function
        if (function, family) not in self._functions:
            self._functions[function, family] = compiled_where_possible(
                function, required=self._wanted is True, say=self._say
            )
        return self._functions[function, family]

    def step(
        self, layout: Layout, max_norm: Tensor | None, skipped: Tensor
    ) -> tuple[Tensor, Verdict]:
        """Move everything in ``layout``. Returns the complete sums (N, 4) too."""
        with record_function("marsopt: gather"):
            stacks, live = layout.stacks()
            parts = _deal(layout, stacks, live)
        with record_function("marsopt: norms"):
            sums, scales, verdict = self._decide(parts, layout, max_norm, skipped)
        with record_function("marsopt: update"):
            matrices: list[Tensor | None] = []
            for part, s in zip(parts, scales, strict=True):
                matrices += self.own(commit.move_, part.family)(part.stacks, s)
        if any(stack.rule.matrix_only for stack in stacks):
            with record_function("marsopt: newton-schulz"):
                factors = orthogonalize(
                    stacks, matrices, layout.leaves, self._collectives
                )
            with record_function("marsopt: update"):
                self._settle(parts, scales, factors)
        with record_function("marsopt: scatter"):
            layout.scatter()
        return sums, verdict

    def _decide(
        self,
        parts: Sequence[Part],
        layout: Layout,
        max_norm: Tensor | None,
        skipped: Tensor,
    ) -> tuple[Tensor, list[list[Scales]], Verdict]:
        if self._collectives is LOCAL and len(parts) == 1:
            assess = self.own(commit.assess_)
            _, stacks, live = parts[0]
            sums, scales, verdict = assess(stacks, live, max_norm, skipped)
            return sums, [scales], verdict
        partial = torch.cat(
            [self.own(measure, part.family)(part.stacks, part.live) for part in parts]
        )
        with record_function("marsopt: exchange"):
            sums = self._collectives.sum(partial, layout.params)
        verdict = self.own(commit.decide_)(sums, max_norm, skipped)
        rows = sums.split([sum(s.num_leaves for s in p.stacks) for p in parts])
        scales = [
            self.own(scale, part.family)(part.stacks, own, verdict)
            for part, own in zip(parts, rows, strict=True)
        ]
        return sums, scales, verdict

    def _settle(
        self,
        parts: Sequence[Part],
        scales: Sequence[list[Scales]],
        factors: Sequence[Tensor | None],
    ) -> None:
        rest = iter(factors)
        for part, s in zip(parts, scales, strict=True):
            every = zip(part.stacks, s, islice(rest, len(s)), strict=True)
            matrices = [three for three in every if three[2] is not None]
            if matrices:
                self.own(commit.settle_, part.family)(matrices)


def _deal(
    layout: Layout, stacks: Sequence[Stack], live: Sequence[Tensor] | None
) -> list[Part]:
    """``stacks`` as ``layout`` deals out their lanes."""
    found, start = [], 0
    for chunk in layout.chunks:
        here = slice(start, start := start + len(chunk.lanes))
        mine = None if live is None else list(live[here])
        found.append(Part(chunk.family, list(stacks[here]), mine))
    return found
