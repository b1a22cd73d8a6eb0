"""The orthogonal factor of an average: Muon (K. Jordan, 2024), Moonlight (arXiv
2502.16982), and on MARS's corrected gradient MARS-Shampoo (arXiv 2411.10438, Algorithm
4) and MARS-M (arXiv 2510.21800).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from marsopt.rules.newton_schulz import NewtonSchulz
from marsopt.rules.preconditioner import Average

ORIGINAL, MATCH_RMS_ADAMW = "original", "match_rms_adamw"  # torch.optim.Muon's words


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixAverage(Average):
    """An average whose direction is orthogonalized: o = NS(u), and

        x <- (1 - lr weight_decay) x - lr scale(rows, cols) o

    Args:
        nesterov: w = 1 - mu.
        adjust_lr_fn: scale by shape, in torch.optim.Muon's words. "original":
            sqrt(max(1, rows/cols)) (K. Jordan, Muon, 2024); "match_rms_adamw": 0.2
            sqrt(max(rows, cols)), an orthogonal step of AdamW's root mean square
            (Moonlight, arXiv 2502.16982, eq. 4).
        ns: how matrices are orthogonalized.
    """

    nesterov: bool = False
    adjust_lr_fn: str = ORIGINAL
    ns: NewtonSchulz = NewtonSchulz()

    matrix_only: ClassVar[bool] = True
    # whether ``rows`` rescales the factor's rows from a moment of their own
    scales_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adjust_lr_fn not in (ORIGINAL, MATCH_RMS_ADAMW):
            raise ValueError(
                f"got adjust_lr_fn={self.adjust_lr_fn!r}, expected {ORIGINAL!r} or "
                f"{MATCH_RMS_ADAMW!r}: choose one of the two"
            )

    @property
    def averages(self) -> bool:
        return not self.nesterov  # which looks at c itself, too

    def scalars(self, t, lr, w=None):
        return super().scalars(t, lr, 1 - self.momentum if self.nesterov else w)

    def update(self, x, c, buffers, s):
        _, _, *w = s
        m, u = self.average(buffers["m"], c, w)
        return (None if u is m else u), {"m": m}

    def lr_scale(self, shape: torch.Size) -> float:
        """Return what a whole matrix of this shape multiplies the learning rate by."""
        rows, cols = shape
        if self.adjust_lr_fn == ORIGINAL:
            return max(1, rows / max(1, cols)) ** 0.5
        return 0.2 * max(rows, cols) ** 0.5

    def apply(
        self, x: Tensor, o: Tensor, s: tuple[Tensor, ...], shape: torch.Size
    ) -> Tensor:
        """Return the new x, from the factor o of matrices whose whole is ``shape``."""
        rate, decay, *_ = s
        return decay * x - (rate * self.lr_scale(shape)) * o

    def rows(
        self, r: Tensor, squares: Tensor, shape: torch.Size
    ) -> tuple[Tensor, Tensor]:
        """Return the new moment r of rows and their weights (L, ..., rows), before each
        matrix is rescaled to its norm; ``squares`` are sums over whole rows of o.
        """
        raise NotImplementedError(f"{type(self).__name__} scales no rows")


@dataclass(frozen=True, kw_only=True, eq=False)
class Orthogonal(MatrixAverage):
    """With c the gradient, or MARS's c, and NS Newton-Schulz:

        m <- mu m + (1 - mu) c
        o = NS(w c + (1 - w) m)            w = 1 - mu with nesterov, else 0
        x <- (1 - lr weight_decay) x - lr scale(rows, cols) o

    Newton-Schulz normalizes its input: averages and the sums that others write (b <- mu
    b + g, and NS(g + mu b)) have the same factor. Muon is nesterov with the scale
    "original", Moonlight with "match_rms_adamw"; MARS-Shampoo and MARS-M are those
    without nesterov. MARS-M without clip is the authors' MARS-M-efficient.
    """
