"""MARS-Lion (arXiv 2411.10438, Algorithm 3; the authors' mars_type "mars-lion")."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marsopt.checks import Number
from marsopt.mars_rule import MarsMomentum


@dataclass(frozen=True, kw_only=True, eq=False)
class MarsLion(MarsMomentum):
    """With c the corrected and clipped gradient:

        m <- beta1 m + (1 - beta1) c
        x <- (1 - lr weight_decay) x - lr sign(m)

    With the new m and no second beta. Arguments are those of ``MarsRule``, and
    ``momentum``: beta1, the authors' betas[0].
    """

    def scalars(self, t: Tensor, lr: Number, gamma: Number) -> tuple[Number, ...]:
        return lr, 1 - lr * self.weight_decay, gamma

    def update(self, x, c, buffers, s):
        rate, decay, gamma = s
        stored, m = self.average(buffers[0], c, gamma)
        return decay * x - rate * torch.sign(m), (stored,)
