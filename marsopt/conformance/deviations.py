"""What ports of MARS have been found to do otherwise, one by one.

Each is a few lines over the oracle, with the words in which a verdict names it.
"""

from __future__ import annotations

import numpy as np

from marsopt.conformance.model import Arguments, Deviation
from marsopt.conformance.oracle import Oracle, ns5


class SwappedGamma(Oracle):
    @property
    def k(self):
        return self.beta1 * self.gamma / (1 - self.gamma)


class BareGamma(Oracle):
    @property
    def k(self):
        return self.gamma


class UnscaledGamma(Oracle):
    @property
    def k(self):
        return self.gamma / (1 - self.beta1)


class NoCorrection(Oracle):
    @property
    def k(self):
        return 0.0


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


class NoClip(Oracle):
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


class EarlyEps(Oracle):
    def denominator(self, v):
        return (np.sqrt(v) + self.eps) / np.sqrt(1 - self.beta2**self.t)


class EpsUnderRoot(Oracle):
    def denominator(self, v):
        return np.sqrt(v / (1 - self.beta2**self.t) + self.eps)


class FloorEps(Oracle):
    def denominator(self, v):
        return np.maximum(np.sqrt(v / (1 - self.beta2**self.t)), self.eps)


class SecondEps(Oracle):
    def denominator(self, v):
        return super().denominator(v + 1e-15)


class NoEps(Oracle):
    def denominator(self, v):
        found = np.sqrt(v / (1 - self.beta2**self.t))
        return np.where(found == 0, 1.0, found)


class NoDebiasOfV(Oracle):
    def denominator(self, v):
        return np.sqrt(v) + self.eps


class NoDebiasOfM(Oracle):
    def adam_step(self, m_hat, c, lr):
        super().adam_step(self.m, c, lr)


class DebiasedMaximum(Oracle):
    """amsgrad over v / (1 - beta2^t)."""

    def denominator(self, v):
        if not self.amsgrad:
            return super().denominator(v)
        debiased = self.v / (1 - self.beta2**self.t)
        self.largest = np.maximum(getattr(self, "largest", 0.0), debiased)
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


class LionsTwoAverages(Oracle):
    def mars_lion(self, c, lr):
        self.lion(c, lr)


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


def replaced(**values):
    """Return a change of arguments."""

    def change(arguments: Arguments) -> Arguments:
        return {**arguments, **values}

    return change


def renamed(**sources):
    """Return a change of arguments to the values of others."""

    def change(arguments: Arguments) -> Arguments:
        return {**arguments, **{to: arguments[of] for to, of in sources.items()}}

    return change


def unscheduled(of: int):
    """Return a change: the rate of a kind of tensors does not follow the schedule."""

    def change(arguments: Arguments) -> Arguments:
        told = list(arguments["scheduled"])
        told[of] = False
        return {**arguments, "scheduled": tuple(told)}

    return change


DEVIATIONS = (
    # the correction
    Deviation(
        "gamma and beta1 are swapped in k = gamma beta1 / (1 - beta1)", SwappedGamma
    ),
    Deviation("k is gamma, without beta1 / (1 - beta1)", BareGamma),
    Deviation("k is gamma / (1 - beta1), without beta1", UnscaledGamma),
    Deviation("no correction at step 1, where h is 0", NotAtFirst),
    Deviation("no correction at any step: h is the gradient itself", NoCorrection),
    Deviation("h is the c that the step before used, not its gradient", FromClipped),
    # the clip
    Deviation("c is never clipped", NoClip),
    Deviation("no clip at step 1", NoClipAtFirst),
    Deviation("g is clipped before the correction, not c after it", ClipsGradient),
    Deviation("c always has norm 1, also where it was shorter", AlwaysNormalizes),
    Deviation(
        "the clip is by the norm of a local shard (half of the rows)", ClipsShards
    ),
    Deviation(
        "the clip is by the norm over all matrices together",
        arguments=replaced(norm_over=lambda ndim: ndim == 2),
    ),
    Deviation(
        "the clip is by the norm over all tensors together",
        arguments=replaced(norm_over=lambda ndim: True),
    ),
    # AdamW
    Deviation("v is the average of g^2, not of the clipped c^2", SquaresGradient),
    Deviation("v is the average of c^2 before the clip", SquaresUnclipped),
    # before those that put eps elsewhere, whose denominator it calls
    Deviation("1e-15 is added to v under the root, beside eps", SecondEps),
    Deviation(
        "eps is added before debiasing: (sqrt(v) + eps) / sqrt(1 - beta2^t)", EarlyEps
    ),
    Deviation("eps is added under the root", EpsUnderRoot),
    Deviation("eps is a floor: max(sqrt(v), eps)", FloorEps),
    Deviation("there is no eps", NoEps),
    Deviation("m is not debiased", NoDebiasOfM),
    Deviation("v is not debiased", NoDebiasOfV),
    Deviation("amsgrad is ignored", arguments=replaced(amsgrad=False)),
    Deviation("amsgrad takes the maximum of the debiased v", DebiasedMaximum),
    # weight decay
    Deviation("weight decay is added to the gradient (L2)", CoupledDecay),
    Deviation("weight decay is not multiplied by the rate", UnscaledDecay),
    Deviation(
        "no weight decay of what is corrected", arguments=replaced(weight_decay=0.0)
    ),
    # Lion, Shampoo
    Deviation(
        "Lion's own two averages: the sign of beta1 m + (1 - beta1) c, m by beta2",
        LionsTwoAverages,
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
        arguments=replaced(corrects=lambda ndim: ndim >= 2),
    ),
    Deviation(
        "every tensor is corrected, without optimize_1d",
        arguments=replaced(optimize_1d=True),
    ),
    Deviation(
        "no tensor is corrected but with optimize_1d",
        arguments=replaced(corrects=lambda ndim: False),
    ),
    Deviation("optimize_1d is ignored", arguments=replaced(optimize_1d=False)),
    Deviation("lr_1d is ignored: lr", arguments=renamed(lr_1d="lr")),
    Deviation("betas_1d is ignored: betas", arguments=renamed(betas_1d="betas")),
    Deviation(
        "weight_decay_1d is ignored: weight_decay",
        arguments=renamed(weight_decay_1d="weight_decay"),
    ),
    Deviation(
        "weight_decay_1d is ignored: no decay", arguments=replaced(weight_decay_1d=0.0)
    ),
    # the schedule
    Deviation("the rate does not follow the schedule", arguments=unscheduled(0)),
    Deviation("lr_1d does not follow the schedule", arguments=unscheduled(1)),
)
