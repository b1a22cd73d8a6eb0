"""What the MARS rules share: the corrected gradient, and momentum of it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from marsopt import checks
from marsopt.checks import Number
from marsopt.rule import LeafRule
from marsopt.trees import Tree


@dataclass(frozen=True, kw_only=True, eq=False)
class MarsRule(LeafRule):
    """A rule on the corrected gradient (MARS, arXiv 2411.10438, Algorithm 1; the
    authors' optimizers/mars.py):

        c = g + gamma beta1/(1 - beta1) (g - h)
        c <- c / max(1, ||c||_F / clip)            per tensor

    Args:
        gamma: scale of the variance reduction; 0 turns it off.
        clip: threshold of the per-tensor norm of c; None = off.
        is_approx: True keeps the previous gradient as h (approximate MARS; a
            ``reference`` given to ``step`` takes its place). False keeps nothing: every
            step needs its ``reference`` (exact MARS).
        h_dtype: dtype of h in the state; None = that of the other buffers. Half
            precision saves memory and traffic, and rounds h by up to 2^-9 (bf16).
    """

    gamma: Number = 0.025
    clip: Number | None = 1.0
    is_approx: bool = True
    h_dtype: torch.dtype | None = None

    has_gamma: ClassVar[bool] = True
    # whether c enters the state through m alone
    linear: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.finite("gamma", self.gamma)
        checks.positive_or_none("clip", self.clip)
        checks.floating_or_none("h_dtype", self.h_dtype)

    @property
    @abstractmethod
    def beta1(self) -> Number:
        """The decay rate of m, which scales the correction."""

    @property
    def own_gamma(self) -> Number:
        return self.gamma

    @property
    def quasi_hyperbolic(self) -> bool:
        """Whether m is kept as the plain average e of g, so that h need not be kept.

        Unclipped and for a constant gamma, m_t = gamma g_t + (1 - gamma) e_t with
        e_t = beta1 e_{t-1} + (1 - beta1) g_t.
        """
        return self.linear and self.clip is None and self.is_approx

    @property
    def corrected(self) -> bool:
        return not self.quasi_hyperbolic

    @property
    def keeps_h(self) -> bool:
        return self.corrected and self.is_approx

    def dtype_of(self, symbol: str, x: Tensor) -> torch.dtype:
        if symbol == "h" and self.h_dtype is not None:
            return self.h_dtype
        return super().dtype_of(symbol, x)

    def average(self, m: Tensor, c: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """(what is stored, m_t): the same tensor but in the one-buffer form."""
        m = self.beta1 * m + (1 - self.beta1) * c
        return m, (gamma * c + (1 - gamma) * m if self.quasi_hyperbolic else m)


class MarsMomentumState(NamedTuple):
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
class MarsMomentum(MarsRule):
    """A MARS rule whose one moment is m <- beta1 m + (1 - beta1) c.

    Args:
        momentum: beta1, the decay rate of m; default 0.95, the authors' betas[0].
    """

    momentum: Number = 0.95

    State = MarsMomentumState
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
