"""MARS-AdamW (arXiv 2411.10438, Algorithm 2; the authors' optimizers/mars.py, mars_type
"mars-adamw").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from marsopt.checks import Number
from marsopt.mars_rule import MarsRule
from marsopt.rules.adamw import AdamW
from marsopt.trees import Tree


class MarsAdamWState(NamedTuple):
    """Steps taken and skipped (0-D), previous gradient (None for exact MARS), moments,
    with amsgrad the largest v.
    """

    t: Tensor
    skipped: Tensor
    h: Tree | None
    m: Tree
    v: Tree
    v_max: Tree | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class MarsAdamW(AdamW, MarsRule):
    """AdamW on the corrected and clipped gradient c: v too averages c^2, as the paper's
    algorithm and the code do (the authors' README has g^2). Arguments are those of
    ``MarsRule`` and ``AdamW``, with the authors' defaults.
    """

    betas: tuple[Number, Number] = (0.95, 0.99)
    weight_decay: Number = 0.0

    State = MarsAdamWState

    @property
    def beta1(self) -> Number:
        return self.betas[0]
