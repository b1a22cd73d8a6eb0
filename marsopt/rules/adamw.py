"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), as torch.optim.AdamW computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt import checks
from marsopt.checks import Number
from marsopt.rule import LeafRule
from marsopt.trees import Tree


class AdamWState(NamedTuple):
    """Steps taken and skipped (0-D), first and second moment, with amsgrad the largest
    second moment so far.
    """

    t: Tensor
    skipped: Tensor
    m: Tree
    v: Tree
    v_max: Tree | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamW(LeafRule):
    """With c the gradient:

        m <- beta1 m + (1 - beta1) c
        v <- beta2 v + (1 - beta2) c^2
        x <- (1 - lr weight_decay) x
             - lr m/(1 - beta1^t) / (sqrt(v/(1 - beta2^t)) + eps)

    Args:
        betas: decay rates of m and v.
        eps: added to the root of the debiased v.
        amsgrad: divide by the root of the largest v so far (debiased after the maximum,
            as torch.optim.AdamW does).
        epsilon_hat: add eps to the root of v *before* debiasing, as the MARS-M and
            Moonlight scripts do (Kingma and Ba, arXiv 1412.6980, end of section 2).
        weight_decay: default 0.01, as torch.optim.AdamW.
    """

    betas: tuple[Number, Number] = (0.9, 0.999)
    eps: Number = 1e-8
    weight_decay: Number = 0.01
    amsgrad: bool = False
    epsilon_hat: bool = False

    State = AdamWState

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.betas("betas", self.betas)
        checks.at_least_zero("eps", self.eps)

    @property
    def buffers(self) -> tuple[str, ...]:
        return ("m", "v", "v_max") if self.amsgrad else ("m", "v")

    def scalars(self, t: Tensor, lr: Number, gamma: Number) -> tuple[Number, ...]:
        beta1, beta2 = self.betas
        root = (1 - beta2**t).sqrt()
        eps = self.eps / root if self.epsilon_hat else self.eps
        return lr / (1 - beta1**t), 1 / root, eps, 1 - lr * self.weight_decay

    def update(self, x, c, buffers, s):
        (beta1, beta2), (rate, debias, eps, decay) = self.betas, s
        m, v, *v_max = buffers
        m = beta1 * m + (1 - beta1) * c
        v = beta2 * v + (1 - beta2) * (c * c)
        if self.amsgrad:
            v_max = [torch.maximum(*v_max, v)]
        x = decay * x - rate * m / (torch.sqrt(*v_max or [v]) * debias + eps)
        return x, (m, v, *v_max)
