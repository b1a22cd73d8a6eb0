"""What a page of a preconditioner states: its buffers, its scalars, its update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.checks import Number

Buffers = Mapping[str, Tensor]  # by symbol
Dims = Literal["rows"] | None  # of x that a buffer has: not columns'; None = all


@dataclass(frozen=True, kw_only=True, eq=False)
class Preconditioner(ABC):
    """Makes a step from the corrected gradient c, over stacks (L, *shape) of tensors.

    Args:
        weight_decay: decoupled: x <- (1 - lr weight_decay) x - ...
    """

    weight_decay: Number = 0.0

    matrix_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.at_least_zero("weight_decay", self.weight_decay)

    @property
    @abstractmethod
    def beta1(self) -> Number:
        """Decay rate of the first moment, which scales MARS's correction."""

    @property
    def averages(self) -> bool:
        """Whether x and the state see c through one average m alone."""
        return False

    @property
    @abstractmethod
    def buffers(self) -> dict[str, Dims]:
        """What the state keeps, by symbol, and which dims of x it has."""

    @abstractmethod
    def scalars(
        self, t: Tensor, lr: Number, w: Number | None = None
    ) -> tuple[Number, ...]:
        """Return what is one number for a whole tensor, from t = 1, 2, ... (N,):
        numbers or (N,) tensors. ``w`` is as in ``Average``.
        """

    @abstractmethod
    def update(
        self, x: Tensor, c: Tensor, buffers: Buffers, s: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the new x and buffers; a matrix rule returns in place of x what is to
        be orthogonalized, None for m itself.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class Average(Preconditioner):
    """One moment, and a direction u that looks ahead of it:

        m <- mu m + (1 - mu) c
        u = w c + (1 - w) m

    w is 0 by default, 1 - mu with Nesterov's momentum, and gamma for approximate MARS
    without clip: there m, the average of c, is gamma g + (1 - gamma) times the average
    of g (quasi-hyperbolic momentum), so that neither h nor c has to be kept.

    Args:
        momentum: mu, decay rate of m; default 0.95, the authors' betas[0].
    """

    momentum: Number = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.decay_rate("momentum", self.momentum)

    @property
    def beta1(self) -> Number:
        return self.momentum

    @property
    def averages(self) -> bool:
        return True

    @property
    def buffers(self) -> dict[str, Dims]:
        return {"m": None}

    def scalars(self, t, lr, w=None):
        weights = () if w is None else (w,)
        return lr, 1 - lr * self.weight_decay, *weights

    def average(
        self, m: Tensor, c: Tensor, w: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return (m, u); u is m itself where there is no w."""
        m = self.momentum * m + (1 - self.momentum) * c
        return m, (w[0] * c + (1 - w[0]) * m if w else m)
