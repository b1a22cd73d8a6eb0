"""What ports of MARS do otherwise, each in a few lines over the oracle and in words."""

from __future__ import annotations

import numpy as np

from tests.conformance.model import Deviation
from tests.conformance.oracle import Oracle, ns5


class NotAtFirst(Oracle):
    def corrected(self, g, h=None):
        c = super().corrected(g, h)
        return self.g if self.t == 1 else c


class FromClipped(Oracle):
    def advance(self, c, lr):
        self.last = c
        return super().advance(c, lr)


class ClipsGradient(Oracle):
    def corrected(self, g, h=None):
        is_mars = self.kind.startswith("mars")
        return super().corrected(g / max(1.0, np.linalg.norm(g)) if is_mars else g, h)

    def clipped(self, c, norm):
        return c


class NoClipAtFirst(Oracle):
    def clipped(self, c, norm):
        return c if self.t == 1 else super().clipped(c, norm)


class AlwaysNormalizes(Oracle):
    def clipped(self, c, norm):
        return c / norm if self.kind.startswith("mars") and norm else c


class ClipsShards(Oracle):
    def clipped(self, c, norm):
        parts = np.array_split(c, 2)
        norms = [np.linalg.norm(part) for part in parts]
        clipped = super().clipped
        return np.concatenate(
            [clipped(*pair) for pair in zip(parts, norms, strict=True)]
        )


class SquaresGradient(Oracle):
    """v of g."""

    def adam_step(self, m_hat, c, lr):
        super().adam_step(m_hat, self.g, lr)


class SquaresUnclipped(Oracle):
    """v of c as it was before the clip."""

    def corrected(self, g, h=None):
        self.unclipped = super().corrected(g, h)
        return self.unclipped

    def adam_step(self, m_hat, c, lr):
        super().adam_step(m_hat, self.unclipped, lr)


class SecondEps(Oracle):
    def denominator(self, v):
        return super().denominator(v + 1e-15)


class NoEps(Oracle):
    def denominator(self, v):
        root = np.sqrt(v / (1 - self.beta2**self.t))
        return np.where(root == 0, 1.0, root)


class NoDebiasOfM(Oracle):
    def adam_step(self, m_hat, c, lr):
        super().adam_step(self.m, c, lr)


class DebiasedMaximum(Oracle):
    """amsgrad over v / (1 - beta2^t)."""

    largest = 0.0

    def denominator(self, v):
        if not self.amsgrad:
            return super().denominator(v)
        debiased = self.v / (1 - self.beta2**self.t)
        self.largest = np.maximum(self.largest, debiased)
        return np.sqrt(self.largest) + self.eps


class CoupledDecay(Oracle):
    """L2: the decay is a part of the gradient."""

    def corrected(self, g, h=None):
        return super().corrected(g + self.wd * self.x, h)

    def move(self, step, lr):
        self.x = self.x - step


class UnscaledDecay(Oracle):
    def move(self, step, lr):
        super().move(step, 1.0)


class SignOfC(Oracle):
    def mars_lion(self, c, lr):
        self.m = self.beta1 * self.m + (1 - self.beta1) * c
        self.move(lr * np.sign(c), lr)


def scaled(scale):
    """Return a change that scales the orthogonal factor by rows and cols otherwise."""

    class Scaled(Oracle):
        def mars_shampoo(self, c, lr):
            self.m = self.beta1 * self.m + (1 - self.beta1) * c
            o = ns5(self.m / (1 - self.beta1), eps=1e-8)
            self.move(lr * scale(*c.shape) * o, lr)

    return Scaled


def overriding(**methods):
    """Return a change of an oracle's methods."""
    return type("Overriding", (Oracle,), methods)


DEVIATIONS = (
    # the correction
    Deviation(
        "gamma and beta1 are swapped in k = gamma beta1 / (1 - beta1)",
        overriding(k=property(lambda o: o.beta1 * o.gamma / (1 - o.gamma))),
    ),
    Deviation(
        "k is gamma, without beta1 / (1 - beta1)",
        overriding(k=property(lambda o: o.gamma)),
    ),
    Deviation(
        "k is gamma / (1 - beta1), without beta1",
        overriding(k=property(lambda o: o.gamma / (1 - o.beta1))),
    ),
    Deviation("no correction at step 1, where h is 0", NotAtFirst),
    Deviation(
        "no correction at any step: h is the gradient itself, or a reference to it, "
        "which the next backward overwrites",
        overriding(k=0.0),
    ),
    Deviation("h is the c that the step before used, not its gradient", FromClipped),
    # the clip
    Deviation("c is never clipped", overriding(clipped=lambda o, c, norm: c)),
    Deviation("no clip at step 1", NoClipAtFirst),
    Deviation("g is clipped before the correction, not c after it", ClipsGradient),
    Deviation("c always has norm 1, also where it was shorter", AlwaysNormalizes),
    Deviation(
        "the clip is by the norm of a local shard (half of the rows)", ClipsShards
    ),
    Deviation(
        "the clip is by the norm over all matrices together",
        arguments=lambda _: dict(norm_over=lambda ndim: ndim == 2),
    ),
    Deviation(
        "the clip is by the norm over all tensors together",
        arguments=lambda _: dict(norm_over=lambda ndim: True),
    ),
    # AdamW
    Deviation("v is the average of g^2, not of the clipped c^2", SquaresGradient),
    Deviation("v is the average of c^2 before the clip", SquaresUnclipped),
    # before those that put eps elsewhere, whose denominator it calls
    Deviation("1e-15 is added to v under the root, beside eps", SecondEps),
    Deviation(
        "eps is added before debiasing: (sqrt(v) + eps) / sqrt(1 - beta2^t)",
        overriding(
            denominator=lambda o, v: (np.sqrt(v) + o.eps) / np.sqrt(1 - o.beta2**o.t)
        ),
    ),
    Deviation(
        "eps is added under the root",
        overriding(denominator=lambda o, v: np.sqrt(v / (1 - o.beta2**o.t) + o.eps)),
    ),
    Deviation(
        "eps is a floor: max(sqrt(v), eps)",
        overriding(
            denominator=lambda o, v: np.maximum(np.sqrt(v / (1 - o.beta2**o.t)), o.eps)
        ),
    ),
    Deviation("there is no eps", NoEps),
    Deviation("m is not debiased", NoDebiasOfM),
    Deviation(
        "v is not debiased", overriding(denominator=lambda o, v: np.sqrt(v) + o.eps)
    ),
    Deviation("amsgrad is ignored", arguments=lambda _: dict(amsgrad=False)),
    Deviation("amsgrad takes the maximum of the debiased v", DebiasedMaximum),
    # weight decay
    Deviation("weight decay is added to the gradient (L2)", CoupledDecay),
    Deviation("weight decay is not multiplied by the learning rate", UnscaledDecay),
    Deviation(
        "no weight decay of what is corrected",
        arguments=lambda _: dict(weight_decay=0.0),
    ),
    # Lion, Shampoo
    Deviation(
        "Lion's own two averages: the sign of beta1 m + (1 - beta1) c, m by beta2",
        overriding(mars_lion=Oracle.lion),
    ),
    Deviation("the sign of c, not of m", SignOfC),
    Deviation("no scale by shape", scaled(lambda rows, cols: 1.0)),
    Deviation(
        "the scale is 0.2 sqrt(max(rows, cols)), Moonlight's",
        scaled(lambda rows, cols: 0.2 * max(rows, cols) ** 0.5),
    ),
    Deviation(
        "the scale is sqrt(max(1, cols / rows)): rows and cols are swapped",
        scaled(lambda rows, cols: max(1.0, cols / rows) ** 0.5),
    ),
    # which tensors, and what moves the others
    Deviation(
        "tensors of more than two dims are corrected too",
        arguments=lambda _: dict(corrects=lambda ndim: ndim >= 2),
    ),
    Deviation(
        "every tensor is corrected, without optimize_1d",
        arguments=lambda _: dict(optimize_1d=True),
    ),
    Deviation(
        "no tensor is corrected but with optimize_1d",
        arguments=lambda _: dict(corrects=lambda ndim: False),
    ),
    Deviation("optimize_1d is ignored", arguments=lambda _: dict(optimize_1d=False)),
    Deviation("lr_1d is ignored: lr", arguments=lambda a: dict(lr_1d=a["lr"])),
    Deviation(
        "betas_1d is ignored: betas", arguments=lambda a: dict(betas_1d=a["betas"])
    ),
    Deviation(
        "weight_decay_1d is ignored: weight_decay",
        arguments=lambda a: dict(weight_decay_1d=a["weight_decay"]),
    ),
    Deviation(
        "weight_decay_1d is ignored: no decay",
        arguments=lambda _: dict(weight_decay_1d=0.0),
    ),
    # the schedule
    Deviation(
        "the learning rate does not follow the schedule",
        arguments=lambda _: dict(scheduled=False),
    ),
    Deviation(
        "lr_1d does not follow the schedule",
        arguments=lambda _: dict(scheduled_1d=False),
    ),
)
