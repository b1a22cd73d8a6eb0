"""MARS-Shampoo (arXiv 2411.10438, Algorithm 4; the authors' "mars-shampoo")."""

from __future__ import annotations

from dataclasses import dataclass

from marsopt.mars_rule import MarsMomentum
from marsopt.rules.matrix import MatrixRule


@dataclass(frozen=True, kw_only=True, eq=False)
class MarsShampoo(MatrixRule, MarsMomentum):
    """With c the corrected and clipped gradient and NS Newton-Schulz:

        m <- beta1 m + (1 - beta1) c
        x <- (1 - lr weight_decay) x - lr sqrt(max(1, rows/cols)) NS(m)

    The authors orthogonalize m/(1 - beta1); Newton-Schulz normalizes its input, so m
    gives the same factor. Arguments are those of ``MarsRule`` and ``MatrixRule``;
    ``momentum`` is beta1, the authors' betas[0].
    """

    def update(self, x, c, buffers, s):
        stored, m = self.average(buffers[0], c, s[2])
        return (None if m is stored else m), (stored,)
