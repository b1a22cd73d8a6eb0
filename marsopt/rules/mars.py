"""MARS's corrections of a gradient (arXiv 2411.10438, Algorithm 1; the authors'
optimizers/mars.py): by the previous gradient, or by two gradients of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from marsopt.rules.checks import Number
from marsopt.rules.component import Correction, Numbers

if TYPE_CHECKING:  # shapes, which tests/library/test_shapes.py checks
    pass


@dataclass(frozen=True, kw_only=True, eq=False)
class Approximate(Correction):
    """The authors' default (section 3.2): with h the previous step's gradient, which
    the state keeps,

        k = gamma beta1 / (1 - beta1)
        c = g + k (g - h)

    In the first step h is zero, as the state is, and c = (1 + k) g before the clip.

    Source: MARS, arXiv 2411.10438, Algorithm 1 and section 3.2.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> from marsopt.rules.component import Numbers
        >>> marsopt.Approximate().coefficients(0.75, Numbers(gamma=0.25))  # g, h
        (1.75, -0.75)
    """

    name = "approximate"
    h_from = "step"

    def coefficients(self, beta1: Number, n: Numbers) -> tuple[Number, ...]:
        k = scale(beta1, n.gamma)
        return 1 + k, -k


def scale(beta1: Number, gamma: Number) -> Number:
    """Return k = gamma beta1 / (1 - beta1), the scale of MARS's correction."""
    return gamma * beta1 / (1 - beta1)


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
