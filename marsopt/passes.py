"""The passes of one step of the class over its stacks, compiled or eager."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.profiler import record_function

from marsopt import commit
from marsopt.collectives import LOCAL, Collectives
from marsopt.compiling import own_compile
from marsopt.layout import Layout
from marsopt.step import Scales, Stack, Verdict, measure, orthogonalize


class Passes:
    """Two graphs move an elementwise rule: norms with everything that is decided from
    them, and the update. A matrix rule has a third, after Newton-Schulz; and where
    other ranks have to be asked, the norms and the decision are apart.

    Ranges named "marsopt: ..." show the passes in a profiler's trace.
    """

    def __init__(self, collectives: Collectives, compile: bool) -> None:
        self._collectives = collectives
        functions = (
            measure,
            commit.scale_,
            commit.assess_,
            commit.move_,
            commit.settle_,
        )
        if compile:
            functions = tuple(own_compile(f) for f in functions)
        self.measure, self.scale, self.assess, self.move, self.settle = functions

    def step(
        self, layout: Layout, max_norm: Tensor | None, skipped: Tensor
    ) -> tuple[Tensor, Verdict]:
        """Move everything in ``layout``. Returns the complete sums (N, 4) too."""
        with record_function("marsopt: gather"):
            stacks, live = layout.stacks()
        with record_function("marsopt: norms"):
            sums, scales, verdict = self._decide(
                stacks, live, layout, max_norm, skipped
            )
        with record_function("marsopt: update"):
            matrices = self.move(stacks, scales)
        if any(stack.rule.matrix_only for stack in stacks):
            with record_function("marsopt: newton-schulz"):
                factors = orthogonalize(
                    stacks, matrices, layout.leaves, self._collectives
                )
            parts = zip(stacks, scales, factors, strict=True)
            with record_function("marsopt: update"):
                self.settle([part for part in parts if part[2] is not None])
        with record_function("marsopt: scatter"):
            layout.scatter()
        return sums, verdict

    def _decide(
        self,
        stacks: Sequence[Stack],
        live: Sequence[Tensor] | None,
        layout: Layout,
        max_norm: Tensor | None,
        skipped: Tensor,
    ) -> tuple[Tensor, list[Scales], Verdict]:
        if self._collectives is LOCAL:
            return self.assess(stacks, live, max_norm, skipped)
        partial = self.measure(stacks, live)
        with record_function("marsopt: exchange"):
            sums = self._collectives.sum(partial, layout.params)
        return sums, *self.scale(stacks, sums, max_norm, skipped)
