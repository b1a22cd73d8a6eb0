"""Lion (Chen et al., arXiv 2302.06675, Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt import checks
from marsopt.checks import Number
from marsopt.rule import LeafRule
from marsopt.trees import Tree


class LionState(NamedTuple):
    """Steps taken and skipped (0-D), momentum."""

    t: Tensor
    skipped: Tensor
    m: Tree


@dataclass(frozen=True, kw_only=True, eq=False)
class Lion(LeafRule):
    """With g the gradient:

        x <- (1 - lr weight_decay) x - lr sign(beta1 m + (1 - beta1) g)
        m <- beta2 m + (1 - beta2) g

    Args:
        betas: weights of m in the update and in its own average.
    """

    betas: tuple[Number, Number] = (0.9, 0.99)

    State = LionState

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.betas("betas", self.betas)

    @property
    def buffers(self) -> tuple[str, ...]:
        return ("m",)

    def scalars(self, t: Tensor, lr: Number, gamma: Number) -> tuple[Number, ...]:
        return lr, 1 - lr * self.weight_decay

    def update(self, x, c, buffers, s):
        (beta1, beta2), (rate, decay), (m,) = self.betas, s, buffers
        x = decay * x - rate * torch.sign(beta1 * m + (1 - beta1) * c)
        return x, (beta2 * m + (1 - beta2) * c,)
