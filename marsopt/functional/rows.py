"""Weights of the rows of orthogonal factors, from sums over whole rows and whole
matrices, wherever their pieces lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt.functional.collectives import Collectives
from marsopt.rules.algorithm import working


class Rows(NamedTuple):
    """Of one stack of factors."""

    weights: Tensor  # (L, rows) what each row is multiplied by
    r: Tensor  # (L, rows) the moment of rows after this step


def row_weights(
    stacks: Sequence,
    factors: Sequence[Tensor | None],
    leaves: Sequence[Sequence[Tensor]],
    collectives: Collectives,
) -> list[Rows | None]:
    """Return ``Rows`` of the stacks whose preconditioner scales rows, else None.

    Sums over a row are complete where rows are whole; where columns are cut they are
    summed over the axis that cuts them, and norms over the one that cuts rows.

    Args:
        stacks: of matrices, as in ``step``.
        factors: of each stack, (L, rows, cols); None for an elementwise algorithm.
        leaves: stack by stack, the parameters as their owner holds them.
        collectives: who sums.
    """
    found: list[Rows | None] = [None] * len(stacks)
    mine = [
        i
        for i, s in enumerate(stacks)
        if s.algorithm.matrix_only and s.algorithm.preconditioner.scales_rows
    ]
    if not mine:
        return found
    tensors = [p for i in mine for p in leaves[i]]

    def summed(parts: list[Tensor], dim: int) -> list[Tensor]:
        """Sum the rows of every part over the axes that cut ``dim`` of its tensor."""
        flat = [row for part in parts for row in part.unbind()]
        rest = iter(collectives.sum_along(flat, tensors, dim))
        return [torch.stack([next(rest) for _ in part]) for part in parts]

    squares = summed(
        [torch.linalg.vector_norm(working(factors[i]), dim=-1).square() for i in mine],
        dim=1,
    )
    moved = [
        stacks[i].algorithm.preconditioner.rows(
            working(stacks[i].buffers["r"]), q, stacks[i].shape
        )
        for i, q in zip(mine, squares, strict=True)
    ]
    norms = summed(
        [
            torch.stack([q.sum(1), (q * w * w).sum(1)], 1)
            for q, (_, w) in zip(squares, moved, strict=True)
        ],
        dim=0,
    )
    for i, (r, w), norm in zip(mine, moved, norms, strict=True):
        before, after = norm.unbind(1)
        tiny = torch.finfo(norm.dtype).tiny  # of a zero matrix
        rescale = (before / after.clamp(min=tiny)).sqrt()
        found[i] = Rows(w * rescale[:, None], r)
    return found
