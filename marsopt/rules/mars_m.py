"""MARS-M (arXiv 2510.21800; the authors' MARS_M folder): Moonlight's Muon on the
corrected gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from marsopt.rules.mars_shampoo import MarsShampoo
from marsopt.rules.matrix import RmsScale


@dataclass(frozen=True, kw_only=True, eq=False)
class MarsM(RmsScale, MarsShampoo):
    """With c the corrected and clipped gradient and NS Newton-Schulz:

        m <- mu m + (1 - mu) c
        x <- (1 - lr weight_decay) x - lr 0.2 sqrt(max(rows, cols)) NS(m)

    With ``clip=None`` (approximate) this is the authors' MARS-M-efficient, up to a
    scale that Newton-Schulz removes: one buffer, the plain average e of g, and NS(gamma
    g + (1 - gamma) e). Arguments are those of ``MarsShampoo``.
    """
