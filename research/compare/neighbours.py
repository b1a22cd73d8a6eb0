"""What others do with a trajectory, beside transport: wrappers of any optimizer, and
AdamW whose momentum is a mixture: of an average and the gradient, or of two averages,
or of an average whose memory grows and the gradient (ADANA).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from marsopt.rules.decay import StepValue


@dataclass(frozen=True)
class FallingWeight(StepValue):
    """ADANA's weight of the gradient beside the average, g + (1 + t)^(1 - kappa) m as a
    mean: w_t = 1 / (1 + (1 + t)^(1 - kappa)).
    """

    kappa: float = 0.85

    def at(self, t: Tensor) -> Tensor:
        """Return the weight in steps ``t``."""
        return 1 / (1 + (1 + t) ** (1 - self.kappa))


class Wrapper:
    """An optimizer that moves what another one has moved.

    Args:
        inner: the other one.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.params = [p for group in inner.param_groups for p in group["params"]]
        self.count = 0

    @property
    def param_groups(self) -> list[dict]:
        """Return those of the inner one."""
        return self.inner.param_groups

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.inner.zero_grad()

    def train(self) -> None:
        """Put the points where gradients belong into the parameters."""
        getattr(self.inner, "train", lambda: None)()  # torch's own have none

    def eval(self) -> None:
        """Put what is trained into the parameters."""
        getattr(self.inner, "eval", lambda: None)()


class Ahead:
    """An optimizer whose ``params`` hold points ahead of what is trained, ``_x``."""

    params: list[Tensor]
    _x: list[Tensor]

    @torch.no_grad()
    def eval(self) -> None:
        """Exchange the points ahead for x."""
        self._points = [p.detach().clone() for p in self.params]
        torch._foreach_copy_(self.params, self._x)

    @torch.no_grad()
    def train(self) -> None:
        """Exchange back."""
        torch._foreach_copy_(self.params, self._points)


class EMANesterov(Ahead, Wrapper):
    """EMA-Nesterov (arXiv 2605.25395, as its authors ran it: modded-nanogpt, pull
    request 308): x' = step(x + s e), e' = 0.99 e + 0.01 (x' - x), with s = ``scale``
    times the rate's share of its peak between a sixth and three quarters of the run,
    else 0. The parameters hold x + s e.

    Args:
        inner: makes the step; its rates are at their peak.
        scale: s at the peak rate.
        steps: of the run.
        decay: of e.
    """

    WINDOW = (500 / 3150, 2400 / 3150)

    def __init__(
        self, inner: Optimizer, *, scale: float, steps: int, decay: float = 0.99
    ) -> None:
        super().__init__(inner)
        self._scale, self._decay = scale, decay
        self._from, self._until = (round(share * steps) for share in self.WINDOW)
        self._peak = inner.param_groups[0]["lr"]
        self._x = [p.detach().clone() for p in self.params]
        self._e = [torch.zeros_like(x) for x in self._x]

    @torch.no_grad()
    def step(self) -> None:
        """Take a step."""
        rate = self.param_groups[0]["lr"] / self._peak
        self.inner.step()
        self.count += 1
        moved = torch._foreach_sub(self.params, self._x)
        torch._foreach_lerp_(self._e, moved, 1 - self._decay)
        torch._foreach_copy_(self._x, self.params)
        if self._from <= self.count < self._until:
            torch._foreach_add_(self.params, self._e, alpha=self._scale * rate)


class SNOO(Wrapper):
    """SNOO (arXiv 2510.15830): every so many steps, Nesterov's momentum on what they
    have moved: d = x_then - x, b' = momentum b + d, x' = x_then - lr (d + momentum b').

    Args:
        inner: makes the steps.
        lr, momentum: of the outer step.
        every: inner steps of an outer one.
    """

    def __init__(
        self, inner: Optimizer, *, lr: float, momentum: float, every: int
    ) -> None:
        super().__init__(inner)
        self._lr, self._momentum, self._every = lr, momentum, every
        self._slow = [p.detach().clone() for p in self.params]
        self._b = [torch.zeros_like(x) for x in self._slow]

    @torch.no_grad()
    def step(self) -> None:
        """Take a step."""
        self.inner.step()
        self.count += 1
        if self.count % self._every == 0:
            self.eval()  # transport: the outer step moves x, not the point ahead
            d = torch._foreach_sub(self._slow, self.params)
            torch._foreach_mul_(self._b, self._momentum)
            torch._foreach_add_(self._b, d)
            torch._foreach_add_(d, self._b, alpha=self._momentum)
            torch._foreach_add_(self._slow, d, alpha=-self._lr)
            torch._foreach_copy_(self.params, self._slow)
            self.train()


class GPA(Ahead, Wrapper):
    """Generalized primal averaging (arXiv 2512.17131; facebookresearch/optimizers,
    ``gpa/``): the inner optimizer moves z by gradients at y, and an average x of z is
    what is trained:

        y = mu_y x + (1 - mu_y) z,   z' = step(z; g(y)),   x' = mu_x x + (1 - mu_x) z'

    The parameters hold y.

    Args:
        inner: makes the step of z, weight decay included.
        mu_x: decay rate of the average.
        mu_y: weight of the average in y.
    """

    def __init__(self, inner: Optimizer, *, mu_x: float, mu_y: float) -> None:
        super().__init__(inner)
        self._mu_x, self._mu_y = mu_x, mu_y
        self._x = [p.detach().clone() for p in self.params]
        self._z = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def step(self) -> None:
        """Take a step."""
        torch._foreach_copy_(self.params, self._z)
        self.inner.step()
        torch._foreach_copy_(self._z, self.params)
        torch._foreach_lerp_(self._x, self._z, 1 - self._mu_x)
        torch._foreach_lerp_(self.params, self._x, self._mu_y)


class MONA(Wrapper):
    """MONA (arXiv 2605.26842): the inner optimizer takes c in place of g,

        a' = decay a + (1 - decay) (g - h),   c = g + scale a'

    with h the gradient of the step before, which is zero in the first step. With a
    decay of 0 c is that of approximate MARS before its clip.

    Args:
        inner: makes the step.
        params: whose gradients are corrected, some of the inner optimizer's.
        scale: of the averaged difference.
        decay: of that average; 0.975 is the default of the implementations that were
            found (the paper was read as an abstract alone).
    """

    def __init__(
        self,
        inner: Optimizer,
        *,
        params: Iterable[Tensor],
        scale: float,
        decay: float = 0.975,
    ) -> None:
        super().__init__(inner)
        self._corrected, self._scale, self._decay = list(params), scale, decay
        self._h, self._a = (
            [torch.zeros_like(p) for p in self._corrected] for _ in range(2)
        )

    @torch.no_grad()
    def step(self) -> None:
        """Take a step."""
        g = [p.grad for p in self._corrected]
        difference = torch._foreach_sub(g, self._h)
        torch._foreach_copy_(self._h, g)
        torch._foreach_lerp_(self._a, difference, 1 - self._decay)
        torch._foreach_add_(g, self._a, alpha=self._scale)
        self.inner.step()


class NearestState(Wrapper):
    """An optimizer whose state is what a narrower dtype would have kept of it, rounded
    to nearest after every step, which MARS itself refuses.

    Args:
        inner: that optimizer.
        dtype: of which the state's values are.
    """

    def __init__(self, inner: Optimizer, dtype: torch.dtype) -> None:
        super().__init__(inner)
        self._dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        """Take a step."""
        self.inner.step()
        for state in self.inner.state.values():
            for key, value in state.items():
                if key != "step":
                    value.copy_(value.to(self._dtype))


class QHAdamW(Optimizer):
    """AdamW by quasi-hyperbolic momentum (arXiv 1810.06801, with nu2 = 1): the average
    of gradients, debiased, is weighed by nu1, the gradient by 1 - nu1. NAdamW is near
    it at nu1 = beta1.

    Args:
        params: to train.
        lr: learning rate.
        betas: of the averages of gradients and of squares.
        nu1: weight of the average.
        eps: added to the root.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        params: Iterator[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        nu1: float,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        own = dict(lr=lr, betas=betas, nu1=nu1, eps=eps, weight_decay=weight_decay)
        super().__init__(params, own)
        (group,) = self.param_groups
        self._params, self._t = group["params"], 0
        self._m, self._v = (
            [torch.zeros_like(p) for p in self._params] for _ in range(2)
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take a step."""
        (group,) = self.param_groups
        lr, nu1, (beta1, beta2) = group["lr"], group["nu1"], group["betas"]
        self._t += 1
        g = [p.grad for p in self._params]
        torch._foreach_lerp_(self._m, g, 1 - beta1)
        torch._foreach_lerp_(self._v, torch._foreach_mul(g, g), 1 - beta2)
        m = torch._foreach_mul(self._m, nu1 / (1 - beta1**self._t))
        torch._foreach_add_(m, g, alpha=1 - nu1)
        torch._foreach_div_(m, _roots(self._v, beta2, self._t, group["eps"]))
        torch._foreach_mul_(self._params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(self._params, m, alpha=-lr)


class ADANA(Optimizer):
    """ADANA (arXiv 2602.05298). With a = delta / (delta + t), t = 1, 2, ..., and s the
    learning rate's share of its peak:

        m <- (1 - a) m + a g,   v <- (1 - a) v + a g^2,
        x <- x - lr (g + (n + (1 + t)^(1 - kappa)) m) / (sqrt(v) + eps)
               - s omega / (t + t_0) x

    Nothing is debiased. The paper's formula has n = 0 and t_0 = 0. The authors' code
    (mlexpos/adana at 3eef26f) has n = 1 and a tenth of the run's steps for t_0.

    Args:
        params: param groups; a group whose ``weight_decay`` is 0 has no decay.
        lr: peak of the learning rate.
        kappa, delta, omega: as above.
        extra_momentum: n.
        decay_start: t_0.
        eps: added to the root.
        weight_decay: not 0; omega says how much.
    """

    def __init__(
        self,
        params: Iterable[dict],
        *,
        lr: float,
        kappa: float = 0.85,
        delta: float = 8.0,
        omega: float = 4.0,
        extra_momentum: float = 0.0,
        decay_start: float = 0.0,
        eps: float = 1e-8,
        weight_decay: float = 1.0,
    ) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self._kappa, self._delta, self._omega, self._eps = kappa, delta, omega, eps
        self._extra, self._start = extra_momentum, decay_start
        self._peaks = [group["lr"] for group in self.param_groups]
        self._t = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take a step."""
        self._t += 1
        a = self._delta / (self._delta + self._t)
        growth = self._extra + (1 + self._t) ** (1 - self._kappa)
        decay = self._omega / (self._t + self._start)
        for group, peak in zip(self.param_groups, self._peaks, strict=True):
            share = group["lr"] / peak
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= dict(m=torch.zeros_like(p), v=torch.zeros_like(p))
                m = state["m"].lerp_(p.grad, a)
                v = state["v"].lerp_(p.grad.square(), a)
                u = (p.grad + growth * m) / (v.sqrt() + self._eps)
                p.mul_(1 - share * decay if group["weight_decay"] else 1.0)
                p.sub_(u, alpha=group["lr"])


class LogTimeDecay(Wrapper):
    """An optimizer whose weight decay is ADANA's: independent of the peak learning
    rate, omega / (t + t_0) times its share of the peak, in groups that have a decay.

    Args:
        inner: makes the step, with a decay of lr times ``weight_decay``.
        omega: as above.
        decay_start: t_0.
    """

    def __init__(self, inner: Optimizer, *, omega: float, decay_start: float) -> None:
        super().__init__(inner)
        self._omega, self._start = omega, decay_start
        self._peaks = [group["lr"] for group in inner.param_groups]

    def step(self) -> None:
        """Take a step."""
        self.count += 1
        for group, peak in zip(self.param_groups, self._peaks, strict=True):
            if group["weight_decay"]:
                decay = self._omega / (peak * (self.count + self._start))
                group["weight_decay"] = decay
        self.inner.step()


class TwoAverages(Ahead, Optimizer):
    """AdamW whose momentum is a mixture of two averages of the gradient, and whose
    gradients may be taken where that mixture has no lag: at

        y_t = x_t + gamma (a d_t + b e_t),   d_t = x_t - x_{t-1},
        e_t = rho e_{t-1} + (1 - rho) d_t,

    with a, b, rho of ``lookahead``. With gamma 1, and the weights constant, the
    mixture of the gradients of a quadratic is the gradient at x_t, once the start is
    forgotten. The parameters hold y.

    Args:
        params: to train.
        lr: learning rate.
        betas: of the faster average, the slower one, and of squares.
        weight: of the slower one, at the peak of the rate, with which it falls.
        gamma: share of the lookahead that leaves no lag; 0 = at x.
        eps: added to the root.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        params: Iterator[Tensor],
        *,
        lr: float,
        betas: tuple[float, float, float],
        weight: float,
        gamma: float = 0.0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        own = dict(lr=lr, betas=betas, weight=weight, gamma=gamma)
        super().__init__(params, own | dict(eps=eps, weight_decay=weight_decay))
        self._peak, self._t = lr, 0
        self.params = [p for group in self.param_groups for p in group["params"]]
        self._x = [p.detach().clone() for p in self.params]
        self._fast, self._slow, self._v, self._e = (
            [torch.zeros_like(x) for x in self._x] for _ in range(4)
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take a step."""
        (group,) = self.param_groups
        lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
        fast, slow, beta2 = group["betas"]
        self._t += 1
        g = [p.grad for p in self.params]
        torch._foreach_lerp_(self._fast, g, 1 - fast)
        torch._foreach_lerp_(self._slow, g, 1 - slow)
        torch._foreach_lerp_(self._v, torch._foreach_mul(g, g), 1 - beta2)
        share = group["weight"] * lr / self._peak
        m = torch._foreach_mul(self._fast, (1 - share) / (1 - fast**self._t))
        torch._foreach_add_(m, self._slow, alpha=share / (1 - slow**self._t))
        torch._foreach_div_(m, _roots(self._v, beta2, self._t, eps))
        torch._foreach_add_(m, self._x, alpha=decay)
        d = torch._foreach_mul(m, -lr)
        torch._foreach_add_(self._x, d)
        torch._foreach_copy_(self.params, self._x)
        a, b, rho = lookahead(fast, slow, share)
        torch._foreach_lerp_(self._e, d, 1 - rho)
        torch._foreach_add_(self.params, d, alpha=group["gamma"] * a)
        torch._foreach_add_(self.params, self._e, alpha=group["gamma"] * b)


def _roots(v: list[Tensor], beta2: float, t: int, eps: float) -> list[Tensor]:
    """Return AdamW's, after so many steps: of the debiased averages, and eps."""
    found = torch._foreach_sqrt(v)
    torch._foreach_div_(found, (1 - beta2**t) ** 0.5)
    torch._foreach_add_(found, eps)
    return list(found)


def lookahead(fast: float, slow: float, weight: float) -> tuple[float, float, float]:
    """Return a, b and rho, with which a mixture of two averages has no lag: a + b is
    its mean age.

    Where the mixture is the filter k(z) of gradients, y = x / k(z) makes k(z) y = x;
    with averages of decays p and q, and weights 1 - w and w, k(z) is
    n (1 - rho z) / ((1 - p z)(1 - q z)), whose inverse is 1 + a (1 - z) +
    b (1 - z)(1 - rho) / (1 - rho z).
    """
    own, other = (1 - weight) * (1 - fast), weight * (1 - slow)
    n = own + other
    rho = (own * slow + other * fast) / n
    a = fast * slow / (n * rho)
    b = (rho - fast) * (slow - rho) / (rho * n * (1 - rho) ** 2)
    return a, b, rho
