"""MARS-Shampoo (arXiv 2411.10438, Algorithm 4; the authors' optimizers/mars.py,
mars_type "mars-shampoo").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from marsopt.checks import Number
from marsopt.rule import MarsRule
from marsopt.rules.matrix import MatrixRule
from marsopt.trees import Tree


class MarsMatrixState(NamedTuple):
    """Steps taken and skipped (0-D), previous gradient, momentum.

    Without clip, approximate MARS keeps neither but e, the plain average of g. Exact
    MARS keeps no h.
    """

    t: Tensor
    skipped: Tensor
    h: Tree | None = None
    m: Tree | None = None
    e: Tree | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class MarsShampoo(MatrixRule, MarsRule):
    """m <- beta1 m + (1 - beta1) c;  x <- (1 - lr weight_decay) x - lr sqrt(max(1,
    rows/cols)) NS(m).

    The authors orthogonalize m/(1 - beta1); Newton-Schulz normalizes its input, so m
    gives the same factor. Arguments are those of ``MarsRule`` and ``MatrixRule``;
    ``momentum`` is beta1, the authors' betas[0].
    """

    State = MarsMatrixState
    linear: ClassVar[bool] = True

    @property
    def beta1(self) -> Number:
        return self.momentum

    @property
    def buffers(self) -> tuple[str, ...]:
        return ("e",) if self.quasi_hyperbolic else ("m",)

    def update(self, x, c, buffers, s):
        stored, m = self.average(buffers[0], c, s[2])
        return (None if m is stored else m), (stored,)
