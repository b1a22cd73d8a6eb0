"""Lion (Chen et al., arXiv 2302.06675, Algorithm 2), and the sign of one average, which
MARS-Lion takes (arXiv 2411.10438, Algorithm 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.component import Average, Buffer, Numbers, Preconditioner, Tensors
from marsopt.rules.numerics import at, complement
from marsopt.rules.options import number


@dataclass(frozen=True, kw_only=True, eq=False)
class Lion(Preconditioner):
    """With c the gradient:

        x <- (1 - lr weight_decay) x - lr sign(beta1 m + (1 - beta1) c)
        m <- beta2 m + (1 - beta2) c

    Source: Chen et al., arXiv 2302.06675, Algorithm 2.

    Args:
        betas: weights of m in the update and in its own average.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> algorithm = marsopt.Algorithm(preconditioner=marsopt.Lion(weight_decay=0.1))
        >>> rule, params = marsopt.Rule(matrix=algorithm), {"w": torch.ones(3)}
        >>> params, _ = rule.step(params, params, rule.init(params), lr=0.1)
        >>> params["w"]
        tensor([0.8900, 0.8900, 0.8900])
    """

    betas: tuple[Number, Number] = number((0.9, 0.99), checks.betas)

    keeps = {"m": Buffer("exp_avg")}

    def beta1(self, n: Numbers) -> Number:
        beta2: Number = n.betas[1]  # the paper's name of the decay rate of m
        return beta2

    def scalars(self, t: Tensor, n: Numbers) -> tuple[Number, ...]:
        decay = 1 - n.lr * n.weight_decay
        first, second = ((beta, t, n.log_time) for beta in n.betas)
        weights = at(*first), complement(*first), at(*second), complement(*second)
        return n.lr, decay, *weights

    def update(
        self, x: Tensor, c: Tensor, buffers: Tensors, s: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        lr, decay, beta1, weight1, beta2, weight2 = s
        m = buffers["m"]
        step = lr * torch.sign(beta1 * m + weight1 * c)
        x = self.decay_of(x, step, decay) * x - step
        return x, {"m": beta2 * m + weight2 * c}


@dataclass(frozen=True, kw_only=True, eq=False)
class SignAverage(Average):
    """With c MARS's corrected gradient, and no second beta:

        m <- mu m + (1 - mu) c
        x <- (1 - lr weight_decay) x - lr sign(m)

    Source: MARS-Lion, arXiv 2411.10438, Algorithm 3.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> algorithm = marsopt.Algorithm(
        ...     preconditioner=marsopt.SignAverage(momentum=0.9),
        ...     correction=marsopt.Approximate(),
        ... )
        >>> rule, params = marsopt.Rule(matrix=algorithm), {"w": torch.ones(3)}
        >>> params, _ = rule.step(params, params, rule.init(params), lr=0.1)
        >>> params["w"]
        tensor([0.9000, 0.9000, 0.9000])
    """

    def update(
        self, x: Tensor, c: Tensor, buffers: Tensors, s: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        lr, decay, mu, weight = s
        m = mu * buffers["m"] + weight * c
        step = lr * torch.sign(m)
        return self.decay_of(x, step, decay) * x - step, {"m": m}
