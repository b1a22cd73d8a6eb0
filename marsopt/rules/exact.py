"""Exact MARS (arXiv 2411.10438, Algorithm 1): two gradients of every batch."""

from __future__ import annotations

from dataclasses import dataclass

from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction, scale
from marsopt.rules.hyperparameters import Numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class Exact(Correction):
    """With h the current batch's gradient at the parameters one step before:

        k = gamma beta1 / (1 - beta1)
        c = g + k (g - h)

    h is given to every step: by ``MARS.update_previous_grad`` and
    ``update_last_grad``, or as the ``reference`` of ``Rule.step``.

    Source: MARS, arXiv 2411.10438, Algorithm 1.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> rule = marsopt.rule("mars-adamw", correction="exact", clip=None)
        >>> x = {"w": torch.ones(2)}
        >>> g, h = {"w": torch.full((2,), 3.0)}, {"w": torch.ones(2)}
        >>> _, state = rule.step(x, g, rule.init(x), lr=0.1, reference=h)
        >>> state.buffers["m"]["w"]     # 0.05 (g + 0.475 (g - h))
        tensor([0.1975, 0.1975])
    """

    name = "exact"
    h_from = "caller"

    def coefficients(self, beta1: Number, n: Numbers) -> tuple[Number, ...]:
        k = scale(beta1, n.gamma)
        return 1 + k, -k
