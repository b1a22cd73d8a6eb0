"""Muon (K. Jordan, kellerjordan.github.io/posts/muon, 2024), as the MARS authors run it
as a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from marsopt.checks import Number
from marsopt.rules.matrix import MatrixRule
from marsopt.trees import Tree


class MuonState(NamedTuple):
    """Steps taken and skipped (0-D), momentum buffer."""

    t: Tensor
    skipped: Tensor
    b: Tree


@dataclass(frozen=True, kw_only=True, eq=False)
class Muon(MatrixRule):
    """With g the gradient, mu the momentum and NS Newton-Schulz:

        b <- mu b + g
        u = NS(g + mu b)  (nesterov), or NS(b)
        x <- (1 - lr weight_decay) x - lr sqrt(max(1, rows/cols)) u

    Args:
        momentum: mu.
        nesterov: orthogonalize g + mu b (default) instead of b.
        ns: how matrices are orthogonalized.
        weight_decay: default 0.1, as torch.optim.Muon; the MARS authors' baseline has
            0.
    """

    nesterov: bool = True
    weight_decay: Number = 0.1

    State = MuonState

    @property
    def buffers(self) -> tuple[str, ...]:
        return ("b",)

    def update(self, x, c, buffers, s):
        b = self.momentum * buffers[0] + c
        return (c + self.momentum * b if self.nesterov else None), (b,)
