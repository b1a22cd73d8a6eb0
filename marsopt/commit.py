"""The one commit at the rim: what the pure step returns goes into the tensors that hold
it, inside the compiled region.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from marsopt.step import Scales, Stack, Verdict, decide, measure, move, scale, settle


def decide_(sums: Tensor, max_norm: Tensor | None, skipped: Tensor) -> Verdict:
    """``step.decide``, which also counts a step that is not finite."""
    verdict = decide(sums, max_norm)
    skipped += verdict.finite.logical_not()
    return verdict


def assess_(
    stacks: Sequence[Stack],
    live: Sequence[Tensor] | None,
    max_norm: Tensor | None,
    skipped: Tensor,
) -> tuple[Tensor, list[Scales], Verdict]:
    """``measure``, ``decide_`` and ``scale`` in one graph: where these are all stacks,
    and no sum over ranks lies between.
    """
    sums = measure(stacks, live)
    verdict = decide_(sums, max_norm, skipped)
    return sums, scale(stacks, sums, verdict), verdict


def move_(stacks: Sequence[Stack], scales: Sequence[Scales]) -> list[Tensor | None]:
    """``step.move`` of every stack, in place."""
    matrices = []
    for old, s in zip(stacks, scales, strict=True):
        new, u = move(old, s)
        old.t.copy_(new.t)
        if new.x is not old.x:
            old.x.copy_(new.x)
        for buffer, fresh in zip(old.buffers, new.buffers, strict=True):
            buffer.copy_(fresh)
        if old.kept is not None:
            old.kept.copy_(new.kept)
        matrices.append(u)
    return matrices


def settle_(parts: Sequence[tuple[Stack, Scales, Tensor]]) -> None:
    """``step.settle`` of every stack of matrices with its factors, in place."""
    for stack, scales, factors in parts:
        stack.x.copy_(settle(stack, scales, factors).x)
