"""Which matrices a tensor is made of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.options import check_fields, structure

Kind = Literal["2d", "batched", "flattened"]

# elements; SOAP takes matrices as large as this by themselves: the temporaries of each
# are freed before the next
LARGE = 2**18


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """How tensors are read as matrices.

    Args:
        kind: "2d": a tensor of exactly two dims is a matrix, any other is none (the
            authors' rule: an embedding is a matrix, a convolution kernel is none).
            "batched": (..., rows, cols) is a batch of matrices, as the weights of
            experts (num_experts, rows, cols) are. "flattened": (rows, ...) is one
            matrix, and all other dims count its columns, as a convolution kernel (out,
            in, *kernel) has out rows of in * prod(kernel) columns.
        splits: the parts of a fused weight, each a matrix: a number of equal parts, as
            the heads of a projection or fused gate and up (2); or the rows of each part
            from the first row on, as fused queries, keys and values (4096, 1024, 1024).
            None = all rows are one matrix.

    Raises:
        ValueError: an unknown ``kind``, or ``splits`` that are no whole numbers from 1.

    Example:
        >>> qkv, shape = marsopt.Matrices(splits=(8, 2, 2)), torch.Size([12, 6])
        >>> qkv.num_in(shape), qkv.shapes_in(shape)
        (3, [(1, torch.Size([8, 6])), (2, torch.Size([2, 6]))])
        >>> experts = marsopt.Matrices(kind="batched")
        >>> experts.num_in(torch.Size([8, 256, 128]))
        8
    """

    kind: Kind = structure("2d", checks.one_of(get_args(Kind)), name="matrices")
    splits: int | tuple[int, ...] | None = structure(None, checks.splits_or_none)

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.splits, list):  # hashable
            object.__setattr__(self, "splits", tuple(self.splits))

    @property
    def expected(self) -> str:
        """Return the shapes that it takes, for an error message."""
        if self.kind == "batched":
            return "matrices (ndim 2 or more)"
        more = " or more" if self.kind == "flattened" else ""
        return f"a matrix (ndim 2{more})"

    def takes(self, shape: torch.Size) -> bool:
        """Return whether a tensor of this shape is made of matrices."""
        return len(shape) == 2 or (self.kind != "2d" and len(shape) > 2)

    def column_dim(self, ndim: int) -> int:
        """Return the first dim of a tensor that counts columns, as all after it do; the
        one before it counts rows, and those before that count matrices.
        """
        return 1 if self.kind == "flattened" else ndim - 1

    def row_shape(self, shape: torch.Size) -> torch.Size:
        """Return the dims of a tensor of this shape that count matrices and their rows,
        (..., rows): those before ``column_dim``.
        """
        return shape[: self.column_dim(len(shape))]

    def check(self, shape: torch.Size, what: str) -> None:
        """Raise ValueError if ``splits`` are not parts of the rows."""
        if not self.takes(shape) or self.splits is None:
            return
        num_rows = self.row_shape(shape)[-1]
        if isinstance(self.splits, int):
            fits, expected = num_rows % self.splits == 0, "a divisor of"
        else:
            fits, expected = sum(self.splits) == num_rows, "sizes that add up to"
        if not fits:
            raise ValueError(
                f"got splits={self.splits} for {what} of shape {tuple(shape)}, "
                f"expected {expected} its {num_rows} rows: give parameters with "
                "other parts a param group of their own"
            )

    def part_rows(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the rows of each matrix in a tensor of this shape; if dims before its
        rows count matrices, of each matrix in one batch (rows, cols).
        """
        if isinstance(self.splits, tuple):
            return self.splits
        num, num_rows = self.splits or 1, self.row_shape(shape)[-1]
        return (num_rows // num,) * num

    def part_shapes(self, shape: torch.Size) -> list[torch.Size]:
        """Return (rows, cols) of each matrix of ``part_rows``."""
        cols = shape[self.column_dim(len(shape)) :].numel()
        return [torch.Size([rows, cols]) for rows in self.part_rows(shape)]

    def runs(self, shape: torch.Size) -> list[tuple[int, int]]:
        """Return ``part_rows`` as runs of parts that follow each other: how many, and
        the rows of each.
        """
        runs = groupby(self.part_rows(shape))
        return [(len(list(run)), rows) for rows, run in runs]

    def is_even(self, shape: torch.Size) -> bool:
        """Return whether all matrices in a tensor of this shape have one shape."""
        return not isinstance(self.splits, tuple) or len(set(self.splits)) == 1

    def shapes_in(self, shape: torch.Size) -> list[tuple[int, torch.Size]]:
        """Return how many matrices a tensor of this shape is made of, and their (rows,
        cols), run by run.
        """
        first = self.column_dim(len(shape))
        num_batches, cols = shape[: first - 1].numel(), shape[first:].numel()
        return [
            (num_batches * num, torch.Size([rows, cols]))
            for num, rows in self.runs(shape)
        ]

    def num_in(self, shape: torch.Size) -> int:
        """Return how many matrices a tensor of this shape is made of; 1 if of none."""
        if not self.takes(shape):
            return 1
        num_batches = self.row_shape(shape)[:-1].numel()
        return max(1, num_batches * len(self.part_rows(shape)))

    def unbound(self, piece: Tensor, shape: torch.Size) -> list[Tensor]:
        """Return whole matrices as batches (num, rows, cols), and a matrix by itself as
        (rows, cols). They are views of a contiguous piece.

        Args:
            piece: of a tensor, with whole matrices; if these have several shapes, with
                whole batches of them.
            shape: of the whole tensor.
        """
        x = piece.flatten(self.column_dim(piece.ndim))
        row_dim, runs = self.column_dim(len(shape)) - 1, self.runs(shape)
        num_rows, last = x.shape[: row_dim + 1].numel(), x.shape[row_dim + 1 :]
        if len(runs) == 1:
            ((_, rows),) = runs
            if row_dim == 0 and num_rows == rows:
                return [x]
            num = num_rows // rows if x.numel() else 0
            return [x.reshape(num, rows, *last)]
        sizes = [num * rows for num, rows in runs]
        return [
            part if num == 1 else part.reshape(num, rows, *last)
            for batch in x.reshape(num_rows // sum(sizes), sum(sizes), *last).unbind()
            for (num, rows), part in zip(runs, batch.split(sizes), strict=True)
        ]
