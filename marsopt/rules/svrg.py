"""SVRG with a coefficient (alpha-SVRG: Yin et al., A Coefficient Makes SVRG Effective,
arXiv 2311.05589; SVRG: Johnson and Zhang, 2013). A reference: for the same number of
gradients it is far behind plain ones, step for step ahead of them (research/study.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction
from marsopt.rules.registry import BUILT_IN, register


@dataclass(frozen=True, kw_only=True, eq=False)
class SVRG(Correction):
    """With h the batch's gradient at a snapshot of the parameters, mu the full gradient
    there, and gamma the paper's coefficient alpha (1 is SVRG):

        c = g - gamma (h - mu)

    h is given to every step: by ``MARS.at_snapshot`` and ``update_previous_grad``, or
    as the ``reference`` of ``Rule.step``. ``MARS.update_anchor`` and ``Rule.anchor``
    set snapshot and mu; before the first of them mu is zero.

    Source: alpha-SVRG, Yin et al., arXiv 2311.05589; SVRG: Johnson and Zhang, 2013.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> rule = marsopt.rule("mars-adamw", correction="svrg", gamma=1.0, clip=None)
        >>> x = {"w": torch.ones(2)}
        >>> mu, h = {"w": torch.full((2,), 2.0)}, {"w": torch.full((2,), 3.0)}
        >>> state = rule.anchor(x, mu, rule.init(x))
        >>> _, state = rule.step(x, h, state, lr=0.1, reference=h)
        >>> state.buffers["m"]["w"]     # 0.05 (g - h + mu), with g = h
        tensor([0.1000, 0.1000])
    """

    name = "svrg"
    operands = ("h", "mu")
    reference = "h"
    keeps = {
        "h": Buffer("snapshot_grad", dtype="gradient"),
        "mu": Buffer("anchor_grad"),
        "snapshot": Buffer("snapshot", start="parameter", dtype="parameter"),
    }

    def coefficients(self, beta1: Number, gamma: Number) -> tuple[Number, ...]:
        return 1.0, -gamma, gamma

    def anchored(self, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        return {"snapshot": x, "mu": g}


register(SVRG)
BUILT_IN.add(SVRG)
