"""Which matrices a tensor is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.hyperparameters import check_fields, structure

Kind = Literal["2d", "batched", "flattened"]

# elements from which a CPU takes matrices one by one: each then occupies all cores, and
# fits better into their caches
LARGE = 2**18


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """How tensors are read as matrices.

    Args:
        kind: "2d": a tensor of exactly two dims is a matrix, any other is none (the
            authors' rule: a convolution kernel is no matrix, an embedding is one).
            "batched": (..., rows, cols) is a batch of matrices, as the weights of
            experts (num_experts, rows, cols) are. "flattened": (rows, ...) is one
            matrix, whose columns all other dims count, as a convolution kernel (out,
            in, *kernel) has out rows of in * prod(kernel) columns.
        block_rows: so many consecutive rows are a matrix: the head width of a
            projection (num_heads * head_width, cols), or the rows of each of several
            projections of one shape that were fused. None = all rows.

    Raises:
        ValueError: an unknown ``kind``, or ``block_rows`` below 1.

    Example:
        >>> heads = marsopt.Matrices(block_rows=64)
        >>> heads.num_in(torch.Size([768, 768])), heads.shape_in(torch.Size([768, 768]))
        (12, torch.Size([64, 768]))
        >>> experts = marsopt.Matrices(kind="batched")
        >>> experts.num_in(torch.Size([8, 256, 128]))
        8
    """

    kind: Kind = structure("2d", checks.one_of(get_args(Kind)), name="matrices")
    block_rows: int | None = structure(None, checks.count_or_none)

    def __post_init__(self) -> None:
        check_fields(self)

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
        """Raise ValueError where ``block_rows`` does not divide the rows."""
        if not self.takes(shape) or self.block_rows is None:
            return
        num_rows = self.row_shape(shape)[-1]
        if num_rows % self.block_rows:
            raise ValueError(
                f"got block_rows={self.block_rows} for {what} of shape {tuple(shape)}, "
                f"expected a divisor of its {num_rows} rows: give parameters with "
                "other blocks a param group of their own"
            )

    def shape_in(self, shape: torch.Size) -> torch.Size:
        """Return (rows, cols) of each matrix in a tensor of this shape."""
        first = self.column_dim(len(shape))
        return torch.Size([self.block_rows or shape[first - 1], shape[first:].numel()])

    def num_in(self, shape: torch.Size) -> int:
        """Return how many matrices a tensor of this shape is made of; 1 if of none."""
        if not self.takes(shape):
            return 1
        row_shape = self.row_shape(shape)
        blocks = row_shape[-1] // self.block_rows if self.block_rows else 1
        return max(1, row_shape[:-1].numel() * blocks)

    def unbound(self, tensor: Tensor) -> Tensor:
        """Return whole matrices of a tensor as a batch (num, rows, cols); a tensor that
        is one matrix as (rows, cols). Both are views of a contiguous one.
        """
        is_one = self.column_dim(tensor.ndim) == 1
        if is_one and self.block_rows in (None, tensor.shape[0]):
            return tensor.flatten(1)
        rows, cols = self.shape_in(tensor.shape)
        num = tensor.numel() // (rows * cols) if rows * cols else 0
        return tensor.reshape(num, rows, cols)

    def unbound_rows(self, numbers: Tensor, ndim: int) -> Tensor:
        """Return numbers of all rows of a tensor with so many dims, (..., rows), as
        a batch (num, rows); of a tensor that is one matrix as (rows,).
        """
        is_one = self.column_dim(ndim) == 1
        if is_one and self.block_rows in (None, numbers.shape[0]):
            return numbers
        return numbers.reshape(-1, self.block_rows or max(1, numbers.shape[-1]))


class MatrixRows(NamedTuple):
    """To which matrices the rows of a piece belong, for L pieces of one layout."""

    num: int  # matrices of a whole tensor
    rows: int  # of each matrix
    # of the piece's rows, among all rows of the tensor; None = it has all of them
    row_index: Tensor | None

    def sum(self, values: Tensor) -> Tensor:
        """Return (L, num) sums over the rows of every matrix that lie here, of
        ``values`` (L, ..., rows).
        """
        flat = values.flatten(1)
        if self.row_index is not None:
            all_rows = flat.new_zeros(len(flat), self.num * self.rows)
            flat = all_rows.index_copy(1, self.row_index, flat)
        return flat.reshape(len(flat), self.num, self.rows).sum(-1)

    def spread(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Return what every row has of ``values`` (L, num), in the piece's ``shape``
        (L, ..., rows); in memory of its own, so that all loops over rows are equal.
        """
        if self.row_index is None:
            per_row = values[:, :, None].expand(-1, -1, self.rows)
        else:
            per_row = values[:, self.row_index // self.rows]
        return per_row.reshape(shape).contiguous()
