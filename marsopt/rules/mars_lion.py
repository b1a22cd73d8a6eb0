"""MARS-Lion (arXiv 2411.10438, Algorithm 3; the authors' optimizers/mars.py, mars_type
"mars-lion").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from marsopt import checks
from marsopt.checks import Number
from marsopt.rule import MarsRule
from marsopt.trees import Tree


class MarsLionState(NamedTuple):
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
class MarsLion(MarsRule):
    """m <- beta1 m + (1 - beta1) c;  x <- (1 - lr weight_decay) x - lr sign(m), with
    the new m and no second beta.

    Args:
        momentum: beta1, the decay rate of m; default 0.95, the authors' betas[0].
    """

    momentum: Number = 0.95

    State = MarsLionState
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.decay_rate("momentum", self.momentum)

    @property
    def beta1(self) -> Number:
        return self.momentum

    @property
    def buffers(self) -> tuple[str, ...]:
        return ("e",) if self.quasi_hyperbolic else ("m",)

    def scalars(self, t: Tensor, lr: Number, gamma: Number) -> tuple[Number, ...]:
        return lr, 1 - lr * self.weight_decay, gamma

    def update(self, x, c, buffers, s):
        rate, decay, gamma = s
        stored, m = self.average(buffers[0], c, gamma)
        return decay * x - rate * torch.sign(m), (stored,)
