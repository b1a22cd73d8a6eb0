"""Moonlight's Muon (Liu et al., arXiv 2502.16982), the baseline of the MARS-M paper."""

from __future__ import annotations

from dataclasses import dataclass

from marsopt.rules.matrix import RmsScale
from marsopt.rules.muon import Muon


@dataclass(frozen=True, kw_only=True, eq=False)
class Moonlight(RmsScale, Muon):
    """Muon with another scale; arguments are those of ``Muon``:

    x <- (1 - lr weight_decay) x - lr 0.2 sqrt(max(rows, cols)) u
    """
