"""An algorithm: a correction of the gradient, then a preconditioner of its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction
from marsopt.rules.matrices import Matrices, MatrixRows
from marsopt.rules.preconditioner import Dims, Preconditioner

ROW = 256  # elements; of shorter rows, as of a convolution, several are one


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32 for half precision, else its own."""
    return torch.promote_types(tensor.dtype, torch.float32)


def working(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in its working dtype."""
    return tensor.to(working_dtype(tensor))


def _row_dims(shape: Sequence[int], first: int) -> tuple[int, ...]:
    """Return the last dims of ``shape``, none before ``first``, that make a row long
    enough to be read at once.
    """
    start, size = len(shape), 1
    while start > first and size < ROW:
        start -= 1
        size *= shape[start]
    return tuple(range(start, len(shape)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Algorithm:
    """What happens to one tensor. Every correction works with every preconditioner.

    Args:
        preconditioner: makes a step from c.
        correction: makes c from the gradient; None: c is the gradient.
        state_dtype: dtype of the state buffers; None = the parameter's own. Not
            narrower than that: moments are averages of small steps, which rounding to
            nearest would lose.
        matrices: which matrices a tensor is made of.
        name: what messages call it.
    """

    preconditioner: Preconditioner
    correction: Correction | None = None
    state_dtype: torch.dtype | None = None
    matrices: Matrices = Matrices()
    name: str = ""

    def __post_init__(self) -> None:
        checks.floating_or_none("state_dtype", self.state_dtype)

    def __str__(self) -> str:
        return self.name or type(self.preconditioner).__name__

    @property
    def matrix_only(self) -> bool:
        """Whether it takes matrices alone."""
        return self.preconditioner.matrix_only

    @property
    def is_quasi_hyperbolic(self) -> bool:
        """Whether the average of g stands for the one of c (see ``Average``)."""
        correction = self.correction
        return (
            correction is not None
            and correction.kind == "approximate"
            and correction.clip is None
            and self.preconditioner.averages
        )

    @property
    def reads_h(self) -> bool:
        """Whether a step computes c = g + k (g - h) from a reference gradient."""
        corrects = self.correction is not None and not self.transports
        return corrects and not self.is_quasi_hyperbolic

    @property
    def transports(self) -> bool:
        """Whether parameters hold the point y ahead of x, which the state keeps."""
        return self.correction is not None and self.correction.transports

    @property
    def keeps_h(self) -> bool:
        """Whether the state keeps the gradient as the next step's h."""
        return self.reads_h and self.correction.kind == "approximate"

    @property
    def makes_matrix(self) -> bool:
        """Whether what is orthogonalized is a tensor of its own, and not m."""
        nesterov = self.matrix_only and self.preconditioner.nesterov
        return nesterov or (self.matrix_only and self.is_quasi_hyperbolic)

    @property
    def buffers(self) -> dict[str, Dims]:
        """What the state keeps, by symbol, and which dims of x it has."""
        h: dict[str, Dims] = {"h": None} if self.keeps_h else {}
        x: dict[str, Dims] = {"x": None} if self.transports else {}
        return {**self.preconditioner.buffers, **h, **x}

    def dtype_of(self, symbol: str, x: Tensor) -> torch.dtype:
        """Return the dtype of a buffer for ``x``."""
        if symbol == "h" and self.correction.h_dtype is not None:
            return self.correction.h_dtype
        if symbol == "x":  # exchanged with the parameter, bit for bit
            return x.dtype
        return self.state_dtype or x.dtype

    def num_missing(self, symbol: str, shape: torch.Size) -> int:
        """Return how many dims, the last ones, a buffer lacks of a tensor's shape."""
        if self.buffers.get(symbol) is None:
            return 0
        return len(shape) - self.matrices.column_dim(len(shape))

    def num_clipped(self, shape: torch.Size) -> int:
        """Return how many parts of a tensor of this shape have a norm of their own."""
        whole = self.correction is None or self.correction.clip is None
        if whole or self.correction.clip_per == "tensor":
            return 1
        return self.matrices.num_in(shape)

    def needs_rows(self, shape: torch.Size) -> bool:
        """Return whether it asks to which matrix of several a row belongs."""
        scales_rows = self.matrix_only and self.preconditioner.scales_rows
        return self.num_clipped(shape) > 1 or (
            scales_rows and self.matrices.num_in(shape) > 1
        )

    def inner_products(
        self, g: Tensor, h: Tensor | None, rows: MatrixRows | None = None
    ) -> Tensor:
        """Return <g,g>, <g,h>, <h,h> of the tensors of a stack (L, *shape), (L, 3), or
        of their matrices, (L * num, 3), from one read of g and h; <g,g> alone, with one
        column, where no h is read.

        Written as sums of products, not as norms: inductor then keeps them in one graph
        with what divides by them. Rows are summed first, then all products of them at
        once: a GPU then reads whole rows in its widest loads, where inductor's own
        split of a long sum need not divide it.
        """
        first = 1 if rows is None else 1 + self.matrices.column_dim(g.ndim - 1)
        g, dims = working(g), _row_dims(g.shape, first)
        pairs = [(g, g)]
        if self.reads_h:
            h = working(h)
            pairs += [(g, h), (h, h)]
        every = [(a * b).sum(dims) if dims else a * b for a, b in pairs]
        sums = torch.stack(every, 1)  # (L, products, *what is left of the shape)
        if rows is None:
            return sums.flatten(2).sum(2) if sums.ndim > 2 else sums
        if sums.ndim > 1 + first:
            sums = sums.flatten(1 + first).sum(-1)
        found = rows.sum(sums.flatten(0, 1)).unflatten(0, sums.shape[:2])
        return found.mT.flatten(0, 1)

    def weights(
        self, gamma: Number, a: Tensor, products: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weights of g and h in c, (N,) each; None where no h is read."""
        if self.reads_h or self.transports:
            beta1 = self.preconditioner.beta1
            return self.correction.weights(beta1, gamma, a, products)
        return a * torch.ones_like(products[:, 0]), None

    def lookahead(self, gamma: Number) -> Number:
        """Return k, by how many displacements y is ahead of x."""
        return self.correction.scale(self.preconditioner.beta1, gamma)

    def scalars(self, t: Tensor, lr: Number, gamma: Number) -> tuple[Number, ...]:
        """Return the preconditioner's numbers for tensors at their steps t (N,)."""
        if self.is_quasi_hyperbolic:
            return self.preconditioner.scalars(t, lr, gamma)
        return self.preconditioner.scalars(t, lr)
