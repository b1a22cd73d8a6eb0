"""What the rules on matrices share: the orthogonal step and its scale by shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from marsopt import checks
from marsopt.checks import Number
from marsopt.newton_schulz import NewtonSchulz
from marsopt.rule import LeafRule


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixRule(LeafRule):
    """x <- (1 - lr weight_decay) x - lr sqrt(max(1, rows/cols)) NS(u), with u from the
    page's ``update``.

    Args:
        momentum: decay rate of the one moment; default 0.95.
        ns: how matrices are orthogonalized.
    """

    momentum: Number = 0.95
    ns: NewtonSchulz = NewtonSchulz()

    matrix_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.decay_rate("momentum", self.momentum)

    def scalars(self, t: Tensor, lr: Number, gamma: Number) -> tuple[Number, ...]:
        return lr, 1 - lr * self.weight_decay, gamma

    def lr_scale(self, shape: torch.Size) -> float:
        """What a matrix of this shape multiplies the learning rate with (K. Jordan,
        Muon, 2024).
        """
        rows, cols = shape
        return max(1, rows / max(1, cols)) ** 0.5

    def apply(
        self, x: Tensor, o: Tensor, s: tuple[Tensor, ...], shape: torch.Size
    ) -> Tensor:
        rate, decay, _ = s
        return decay * x - (rate * self.lr_scale(shape)) * o


class RmsScale:
    """0.2 sqrt(max(rows, cols)): an orthogonal step of AdamW's root mean square
    (Moonlight, arXiv 2502.16982, eq. 4).
    """

    def lr_scale(self, shape: torch.Size) -> float:
        """What a matrix of this shape multiplies the learning rate with."""
        return 0.2 * max(shape) ** 0.5
