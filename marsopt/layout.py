"""The lanes of all groups, and this step's gradients for them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from marsopt import lanes
from marsopt.numbers import Numbers
from marsopt.step import Route

# What, when it changes in a group, changes formulas and not only their numbers.
STRUCTURE = ("mars_type", "optimize_1d", "amsgrad", "epsilon_hat")


def label(groups: Sequence[dict[str, Any]], number: int, index: int) -> str:
    """What a parameter is called in messages."""
    group = groups[number]
    if "param_names" in group:
        return f"parameter {group['param_names'][index]!r}"
    return f"parameter {index} of group {number}"


def labels(groups: Sequence[dict[str, Any]]) -> list[tuple[Tensor, str]]:
    """All parameters with what they are called."""
    return [
        (p, label(groups, number, i))
        for number, group in enumerate(groups)
        for i, p in enumerate(group["params"])
    ]


def _structure(groups: Sequence[dict[str, Any]]) -> list[tuple]:
    return [
        (
            id(g),
            g["clip"] is None,
            *(g[key] for key in STRUCTURE),
            *map(id, g["params"]),
        )
        for g in groups
    ]


class Layout:
    """Made from groups and state, and made anew when ``fits`` says so.

    Args:
        groups: the optimizer's param groups.
        state: the optimizer's state; what is missing is made, as zeros.
        options: what the optimizer was built with.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        state: MutableMapping[Tensor, dict[str, Tensor]],
        options: dict[str, Any],
    ) -> None:
        self._groups, self._options = groups, options
        self._structure = _structure(groups)
        filled = [group for group in groups if group["params"]]
        self._numbers = [Numbers(group, options) for group in filled]
        self.lanes = [
            lane
            for group, numbers in zip(filled, self._numbers, strict=True)
            for lane in lanes.build(group, numbers, state, options)
        ]
        self.leaves = [lane.params for lane in self.lanes]
        self.params = list(chain.from_iterable(self.leaves))
        self._known = set(self.params)
        # what the lanes hold views of: whoever replaces it gets a new layout
        self._held = [(p, state[p], tuple(state[p].values())) for p in self.params]
        self._zeros: dict[Tensor, Tensor] = {}

    def fits(self, state: Mapping[Tensor, dict[str, Tensor]]) -> bool:
        """Whether groups and state are still those that this was made for.

        Raises:
            ValueError: a sparse gradient.
        """
        known = True
        for number, group in enumerate(self._groups):
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if p.grad.layout != torch.strided:
                    raise ValueError(
                        f"got a gradient of layout {p.grad.layout} for "
                        f"{label(self._groups, number, i)}, expected torch.strided: "
                        "make it dense (nn.Embedding(sparse=False))"
                    )
                known = known and p in self._known  # else it has thawed
        return (
            known
            and self._structure == _structure(self._groups)
            and all(
                state.get(p) is entry and all(map(is_, entry.values(), tensors))
                for p, entry, tensors in self._held
            )
        )

    def gradients(self) -> tuple[dict[Tensor, Tensor], Tensor | None]:
        """Local gradients of all parameters, and which of them are real (None: all).

        A parameter without a gradient gets zeros, so that the graph stays the same.
        """
        local = self._options["collectives"].local
        grads, live = {}, [p.grad is not None for p in self.params]
        for p, has_gradient in zip(self.params, live, strict=True):
            if not has_gradient and p not in self._zeros:
                self._zeros[p] = torch.zeros_like(local(p))
            grads[p] = local(p.grad) if has_gradient else self._zeros[p]
        if all(live):
            return grads, None
        return grads, torch.tensor(live, device=self.params[0].device)

    def routes(self, grads: dict[Tensor, Tensor]) -> list[Route]:
        """Arguments of the pure step, with the groups' present hyperparameters.

        Raises:
            ValueError: a hyperparameter out of its range.
        """
        for numbers in self._numbers:
            numbers.refresh()
        return [lane.route(grads, self._options) for lane in self.lanes]

    def blame(self, sums: Tensor) -> str:
        """Whose gradient is not finite, from the complete sums of ``measure``."""
        rows = torch.isfinite(sums).all(1).logical_not().nonzero().flatten().tolist()
        everyone = [name for lane in self.lanes for name in lane.labels]
        named = ", ".join(everyone[i] for i in rows[:3])
        more = ", ..." if len(rows) > 3 else ""
        return (
            "got a gradient that is not finite, or whose square overflows, in "
            f"{len(rows)} of {len(everyone)} parameters ({named}{more}), expected "
            "numbers: nothing has changed; lower the learning rate, or pass "
            "nonfinite='skip' to go on"
        )
