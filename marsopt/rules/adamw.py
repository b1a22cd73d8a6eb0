"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), as torch.optim.AdamW computes it; on
MARS's corrected gradient: MARS-AdamW (arXiv 2411.10438, Algorithm 2); with Nesterov's
momentum: NAdamW (Dozat, Incorporating Nesterov Momentum into Adam, ICLR workshop 2016).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.checks import Number, Weight
from marsopt.rules.component import Buffer, Numbers, Preconditioner, Tensors
from marsopt.rules.numerics import at, complement, product, root
from marsopt.rules.options import number


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamW(Preconditioner):
    """With c the gradient, or MARS's c:

        m <- beta1 m + (1 - beta1) c
        v <- beta2 v + (1 - beta2) c^2
        x <- (1 - lr weight_decay) x
             - lr m/(1 - beta1^t) / (sqrt(v/(1 - beta2^t)) + eps)

    v averages c^2, as the paper's algorithm and the authors' code do (their README has
    g^2). With ``nesterov``, in place of m/(1 - beta1^t),

        beta1 m/(1 - beta1^(t+1)) + (1 - beta1) c/(1 - beta1^t)

    which is Dozat's Algorithm 2 with a constant beta1 (optax.nadamw; torch.optim.NAdam
    with decoupled_weight_decay and a momentum_decay so large, 1e6, that its schedule
    stays at beta1; 0 would halve beta1). A number w in the place of ``nesterov`` is the
    weight of c itself (quasi-hyperbolic momentum, arXiv 1810.06801):

        (1 - w) m/(1 - beta1^t) + w c

    With ``log_time``, the product of the decays so far stands for beta^t.

    Source: Loshchilov and Hutter, arXiv 1711.05101; with MARS's c: MARS-AdamW, arXiv
    2411.10438, Algorithm 2; with ``nesterov``: Dozat, Incorporating Nesterov Momentum
    into Adam, ICLR workshop 2016.

    Args:
        betas: decay rates of m and v.
        eps: added to the root of the debiased v; with 0, too, 0 / 0 is 0.
        amsgrad: divide by the root of the largest v so far (debiased after the maximum,
            as torch.optim.AdamW does).
        epsilon_hat: add eps to the root of v *before* debiasing, as the MARS-M and
            Moonlight scripts do (Kingma and Ba, arXiv 1412.6980, end of section 2).
        nesterov: True lets the first moment look ahead by one step (NAdamW); a number
            in [0, 1] is w.
        weight_decay: decoupled: x <- (1 - lr weight_decay) x - ...

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> algorithm = marsopt.Algorithm(preconditioner=marsopt.AdamW(nesterov=True))
        >>> rule, params = marsopt.Rule(matrix=algorithm), {"w": torch.ones(3)}
        >>> params, _ = rule.step(params, params, rule.init(params), lr=0.1)
        >>> params["w"]
        tensor([0.8516, 0.8516, 0.8516])
    """

    betas: tuple[Number, Number] = number((0.9, 0.999), checks.betas)
    eps: Number = number(1e-8, checks.epsilon)
    weight_decay: Number = number(0.01, checks.at_least_zero)
    amsgrad: bool = False
    epsilon_hat: bool = False
    nesterov: Weight = number(False, checks.gradient_weight)

    keeps = {
        "m": Buffer("exp_avg", is_debiased=True),
        "v": Buffer("exp_avg_sq", is_debiased=True, codes="squares"),
        "v_max": Buffer("max_exp_avg_sq", codes=None),
    }

    def beta1(self, n: Numbers) -> Number:
        beta1: Number = n.betas[0]
        return beta1

    @property
    def buffers(self) -> dict[str, Buffer]:
        if not self.amsgrad:
            return {s: b for s, b in self.keeps.items() if s != "v_max"}
        # the largest of values that are rounded stochastically would only grow
        return {**self.keeps, "v": self.keeps["v"]._replace(codes=None)}

    def scalars(self, t: Tensor, n: Numbers) -> tuple[Number, ...]:
        (beta1, beta2), log_time = n.betas, n.log_time
        first, second = (beta1, t, log_time), (beta2, t, log_time)
        root = (1 - product(*second)).sqrt()
        eps = n.eps / root if self.epsilon_hat else n.eps
        rate, decay = n.lr / (1 - product(*first)), 1 - n.lr * n.weight_decay
        weights = at(*first), complement(*first), at(*second), complement(*second)
        common = *weights, 1 / root, eps, decay
        if n.nesterov is False:
            return *common, rate
        if n.nesterov is True:
            ahead = beta1, t + 1, log_time
            rate_m = n.lr * at(*ahead) / (1 - product(*ahead))
            return *common, rate_m, complement(*first) * rate
        w = n.nesterov
        return *common, (1 - w) * rate, w * n.lr

    def update(
        self, x: Tensor, c: Tensor, buffers: Tensors, s: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        beta1, weight1, beta2, weight2, debias, eps, decay, rate_m, *rate_c = s
        m = beta1 * buffers["m"] + weight1 * c
        v = beta2 * buffers["v"] + weight2 * (c * c)
        new = {"m": m, "v": v}
        if self.amsgrad:
            v = new["v_max"] = torch.maximum(buffers["v_max"], v)
        step = rate_m * m + rate_c[0] * c if rate_c else rate_m * m
        # not torch's sqrt: a step divides by this if a gradient's square is lost
        step = step / (root(v) * debias + eps)
        return self.decay_of(x, step, decay) * x - step, new
