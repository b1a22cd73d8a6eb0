"""Weights of the rows of orthogonal factors, from sums over whole rows and whole
matrices, wherever their pieces lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt.functional.collectives import Collectives, Lines
from marsopt.functional.step_types import Stack
from marsopt.rules.algorithm import Algorithm, working
from marsopt.rules.matrices import MatrixRows


class Rows(NamedTuple):
    """Of one stack of factors."""

    weights: Tensor  # (L, ..., rows) what each row is multiplied by
    r: Tensor  # (L, ..., rows) the moment of rows after this step


def matrix_rows(
    algorithm: Algorithm, leaf: Tensor, shape: torch.Size, collectives: Collectives
) -> MatrixRows | None:
    """Return to which matrices the rows of a leaf's piece belong; None where
    ``algorithm`` does not ask.

    Args:
        algorithm: what moves the leaf.
        leaf: a parameter as its owner holds it, or a stack of such.
        shape: of one whole parameter.
        collectives: who knows which rows lie here.
    """
    if not algorithm.needs_rows(shape):
        return None
    matrices = algorithm.matrices
    num_rows = matrices.shape_in(shape)[0]
    here = collectives.rows(leaf, matrices)
    return MatrixRows(matrices.num_in(shape), num_rows, here)


def row_weights(
    stacks: Sequence[Stack],
    factors: Sequence[Tensor | None],
    leaves: Sequence[Sequence[Tensor]],
    collectives: Collectives,
) -> list[Rows | None]:
    """Return ``Rows`` of the stacks whose preconditioner scales rows, else None.

    Sums over a row are complete where rows are whole; where columns are cut they are
    summed over the axis that cuts them, and norms of matrices over those that cut rows.

    Args:
        stacks: of matrices, as in ``step``.
        factors: of each stack, (L, *shape); None for an elementwise algorithm.
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
    matrices = [stacks[i].algorithm.matrices for i in mine for _ in leaves[i]]

    def summed(parts: list[Tensor], lines: Lines) -> list[Tensor]:
        """Sum every part over the axes that cut ``lines`` of its tensor."""
        flat = [row for part in parts for row in part.unbind()]
        rest = iter(collectives.sum_along(flat, tensors, matrices, lines))
        return [torch.stack([next(rest) for _ in part]) for part in parts]

    squares = summed(
        [
            torch.linalg.vector_norm(
                working(factors[i]), dim=stacks[i].column_dims
            ).square()
            for i in mine
        ],
        "cols",
    )
    moved = [
        stacks[i].algorithm.preconditioner.rows(
            working(stacks[i].buffers["r"]), q, stacks[i].matrix_shape
        )
        for i, q in zip(mine, squares, strict=True)
    ]
    norms = summed(
        [
            torch.stack([_norms(stacks[i], q), _norms(stacks[i], q * w * w)], 1)
            for i, q, (_, w) in zip(mine, squares, moved, strict=True)
        ],
        "rows",
    )
    for i, (r, w), norm in zip(mine, moved, norms, strict=True):
        before, after = norm.unbind(1)
        tiny = torch.finfo(norm.dtype).tiny  # of a zero matrix
        rescale = (before / after.clamp(min=tiny)).sqrt()
        rows = stacks[i].rows
        if rows is None:
            spread = rescale.view(-1, *(1 for _ in w.shape[1:]))  # (L, 1, ...)
        else:
            spread = rows.spread(rescale, w.shape)
        found[i] = Rows(w * spread, r)
    return found


def _norms(stack: Stack, squares: Tensor) -> Tensor:
    """Return the sums over the rows of each matrix, (L, num) or (L, 1)."""
    if stack.rows is None:
        return squares.flatten(1).sum(1, keepdim=True)
    return stack.rows.sum(squares)
