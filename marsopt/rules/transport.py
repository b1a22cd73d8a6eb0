"""Transport: exact MARS to first order, from one gradient a step (this project's;
implicit gradient transport, arXiv 1906.03532, seen through MARS).
"""

from __future__ import annotations

from dataclasses import dataclass

from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction, scale
from marsopt.rules.hyperparameters import structure


@dataclass(frozen=True, kw_only=True, eq=False)
class Transport(Correction):
    """With x_prev the parameters one step before:

        k = gamma beta1 / (1 - beta1)
        c = g(y)  at  y = x + k (x - x_prev)

    On the current batch that is the exact c to first order in x - x_prev, and c itself
    where the loss is quadratic. Parameters hold y while gradients are taken; there is
    no reference gradient. The lookahead that a step leaves has the gamma of that step.

    With AdamW x follows from y, the moments and four numbers of the last step, so that
    the state is AdamW's own; other rules, and parameters of half precision, keep it in
    the state.

    Source: this project's; implicit gradient transport (arXiv 1906.03532), seen through
    MARS (arXiv 2411.10438).

    Args:
        store_iterate: keep x in the state with AdamW too: 4 bytes a parameter more of
            state and of traffic, to avoid one rounding.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> rule = marsopt.rule("mars-adamw", correction="transport", gamma=0.1)
        >>> params = {"w": torch.ones(2)}
        >>> params, state = rule.step(params, params, rule.init(params), lr=0.1)
        >>> params["w"]                         # y = x + 1.9 (x - x_prev)
        tensor([0.7100, 0.7100])
        >>> rule.iterate(params, state)["w"]    # x
        tensor([0.9000, 0.9000])
    """

    # a choice here, where other corrections have a fact
    store_iterate: bool = structure(False, whole=True)  # type: ignore[misc]

    name = "transport"
    keeps = {"x": Buffer("iterate", start="parameter", dtype="parameter")}
    is_ahead = True
    suits_baselines = True

    def coefficients(self, beta1: Number, gamma: Number) -> tuple[Number, ...]:
        return (1.0,)

    def extrapolation(self, beta1: Number, gamma: Number) -> Number:
        return scale(beta1, gamma)
