"""The passes of one step of the class over its chunks of stacks, compiled or eager."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from marsopt import commit
from marsopt.collectives import LOCAL, Collectives
from marsopt.compiling import own_compile
from marsopt.layout import Layout
from marsopt.step import Scales, Stack, Verdict, measure, orthogonalize, scale

Chunk = tuple[list[Stack], list[Tensor] | None]


class Passes:
    """Two graphs move an elementwise rule: norms with everything that is decided from
    them, and the update. A matrix rule has a third, after Newton-Schulz. Where there
    are several chunks, or other ranks have to be asked, norms, decision and scalars are
    graphs of their own.

    Ranges named "marsopt: ..." show the passes in a profiler's trace.
    """

    def __init__(self, collectives: Collectives, compile: bool) -> None:
        self._collectives = collectives
        functions = (
            commit.assess_,
            measure,
            commit.decide_,
            scale,
            commit.move_,
            commit.settle_,
        )
        if compile:
            functions = tuple(own_compile(f) for f in functions)
        self.assess, self.measure, self.decide, self.scale, self.move, self.settle = (
            functions
        )

    def step(
        self, layout: Layout, max_norm: Tensor | None, skipped: Tensor
    ) -> tuple[Tensor, Verdict]:
        """Move everything in ``layout``. Returns the complete sums (N, 4) too."""
        with record_function("marsopt: gather"):
            stacks, live = layout.stacks()
            chunks = _deal(layout, stacks, live)
        with record_function("marsopt: norms"):
            sums, scales, verdict = self._decide(chunks, layout, max_norm, skipped)
        with record_function("marsopt: update"):
            matrices: list[Tensor | None] = []
            for (part, _), s in zip(chunks, scales, strict=True):
                matrices += self.move(part, s)
        if any(stack.rule.matrix_only for stack in stacks):
            with record_function("marsopt: newton-schulz"):
                factors = iter(
                    orthogonalize(stacks, matrices, layout.leaves, self._collectives)
                )
            with record_function("marsopt: update"):
                for (part, _), s in zip(chunks, scales, strict=True):
                    both = zip(part, s, islice(factors, len(part)), strict=True)
                    parts = [three for three in both if three[2] is not None]
                    if parts:
                        self.settle(parts)
        with record_function("marsopt: scatter"):
            layout.scatter()
        return sums, verdict

    def _decide(
        self,
        chunks: Sequence[Chunk],
        layout: Layout,
        max_norm: Tensor | None,
        skipped: Tensor,
    ) -> tuple[Tensor, list[list[Scales]], Verdict]:
        if self._collectives is LOCAL and len(chunks) == 1:
            sums, scales, verdict = self.assess(*chunks[0], max_norm, skipped)
            return sums, [scales], verdict
        partial = torch.cat([self.measure(*chunk) for chunk in chunks])
        with record_function("marsopt: exchange"):
            sums = self._collectives.sum(partial, layout.params)
        verdict = self.decide(sums, max_norm, skipped)
        parts = sums.split([sum(s.num_leaves for s in part) for part, _ in chunks])
        scales = [
            self.scale(part, own, verdict)
            for (part, _), own in zip(chunks, parts, strict=True)
        ]
        return sums, scales, verdict


def _deal(
    layout: Layout, stacks: Sequence[Stack], live: Sequence[Tensor] | None
) -> list[Chunk]:
    """``stacks`` as ``layout`` deals out their lanes."""
    found, start = [], 0
    for lanes in layout.chunks:
        here = slice(start, start := start + len(lanes))
        found.append((list(stacks[here]), None if live is None else list(live[here])))
    return found
