"""NorMuon (Li et al., arXiv 2510.05491, Algorithm 1): Muon with a second moment for
each row of the orthogonal factor; on MARS's corrected gradient: MARS-NorMuon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.orthogonal import MATCH_RMS_ADAMW, MatrixAverage
from marsopt.rules.preconditioner import Dims


@dataclass(frozen=True, kw_only=True, eq=False)
class NorMuon(MatrixAverage):
    """With c the gradient, or MARS's c, and NS Newton-Schulz:

        m <- mu m + (1 - mu) c
        o = NS(w c + (1 - w) m)                w = 1 - mu with nesterov, else 0
        r <- beta2 r + (1 - beta2) mean over columns of o^2
        o' = o / (sqrt(r) + eps), row by row
        x <- (1 - lr weight_decay) x - lr scale(rows, cols) o' ||o||_F / ||o'||_F

    The paper divides by ||o'||_F and multiplies by 0.2 sqrt(rows cols), which is
    scale(rows, cols) ||o||_F where o is exactly orthogonal and the scale is
    "match_rms_adamw", the default here.

    Args:
        beta2: decay rate of r.
        eps: added to the root of r.
    """

    adjust_lr_fn: str = MATCH_RMS_ADAMW
    beta2: Number = 0.95
    eps: Number = 1e-8

    scales_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.decay_rate("beta2", self.beta2)
        checks.at_least_zero("eps", self.eps)

    @property
    def buffers(self) -> dict[str, Dims]:
        return {"m": None, "r": "rows"}

    def rows(self, r, squares, shape):
        r = self.beta2 * r + (1 - self.beta2) * squares / max(1, shape[-1])
        return r, 1 / (r.sqrt() + self.eps)
