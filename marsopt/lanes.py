"""Lanes: the parameters of one group that take one rule, with their state, made ready
for the pure step.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marsopt import routing
from marsopt.numbers import Numbers
from marsopt.rule import LeafRule
from marsopt.step import Route, Scales, Verdict, move, scale, settle

# Symbols of the rules, and what torch.optim (and, for h, the authors) call them in a
# state dict.
STATE_KEYS = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "v_max": "max_exp_avg_sq",
    "b": "momentum_buffer",
    "h": "last_grad",
    "e": "grad_avg",
}


@dataclass
class Lane:
    """Parameters as their owner holds them, and their state as local tensors."""

    rule: LeafRule
    lr: Tensor
    gamma: Tensor
    params: list[Tensor]
    labels: list[str]
    steps: Tensor  # (N,); state[p]["step"] are views of it
    h: list[Tensor]
    buffers: list[tuple[Tensor, ...]]

    def route(
        self, grads: MutableMapping[Tensor, Tensor], options: dict[str, Any]
    ) -> Route:
        """This lane as arguments of the pure step."""
        return Route(
            rule=self.rule,
            lr=self.lr,
            gamma=self.gamma,
            t=self.steps,
            x=[options["collectives"].local(p) for p in self.params],
            g=[grads[p] for p in self.params],
            h=self.h,
            kept=self.h if self.rule.keeps_h else [],
            buffers=self.buffers,
            shapes=[p.shape for p in self.params],
        )


def build(
    group: dict[str, Any],
    numbers: Numbers,
    state: MutableMapping[Tensor, dict],
    options: dict[str, Any],
) -> list[Lane]:
    """The group's lanes, over existing state and fresh zeros where there is none.

    A frozen parameter gets no state before its first gradient.
    """
    chosen = numbers.pair
    moving = [
        i
        for i, p in enumerate(group["params"])
        if p.requires_grad or p.grad is not None or state.get(p)
    ]
    if chosen.matrix is chosen.rest:
        sides = [(chosen.matrix, numbers.lr, moving)]
    else:
        matrix = [i for i in moving if routing.is_matrix(group["params"][i])]
        rest = [i for i in moving if i not in set(matrix)]
        rest_rate = numbers.lr_1d if chosen.own_rate else numbers.lr
        sides = [(chosen.matrix, numbers.lr, matrix), (chosen.rest, rest_rate, rest)]
    names = group.get("param_names", [f"{i}" for i in range(len(group["params"]))])
    return [
        _lane(rule, rate, group, part, names, numbers, state, options)
        for rule, rate, part in sides
        if part
    ]


def _lane(
    rule: LeafRule,
    rate: Tensor,
    group: dict[str, Any],
    part: Sequence[int],
    names: Sequence[str],
    numbers: Numbers,
    state: MutableMapping[Tensor, dict],
    options: dict[str, Any],
) -> Lane:
    params = [group["params"][i] for i in part]
    local = options["collectives"].local
    before = [float(state[p]["step"]) if state.get(p) else 0.0 for p in params]
    steps = torch.tensor(before, dtype=torch.float32, device=params[0].device)
    wants_h = rule.corrected
    symbols = (*rule.buffers, *(("h",) if wants_h else ()))
    for p, step in zip(params, steps.unbind(), strict=True):
        kept = state[p]
        kept["step"] = step
        wanted = {"step", *(STATE_KEYS[symbol] for symbol in symbols)}
        for key in set(kept) - wanted:
            del kept[key]  # of another rule: it would be stale when that one returns
        for key in (STATE_KEYS[symbol] for symbol in symbols):
            if key not in kept:
                kept[key] = torch.zeros_like(p, dtype=options["state_dtype"] or p.dtype)
    return Lane(
        rule=rule,
        lr=rate,
        gamma=numbers.gamma,
        params=params,
        labels=[names[i] for i in part],
        steps=steps,
        h=[local(state[p]["last_grad"]) for p in params] if wants_h else [],
        buffers=[
            tuple(local(state[p][STATE_KEYS[s]]) for s in rule.buffers) for p in params
        ],
    )


# ---- the one commit at the rim: what the pure step returned, into the tensors that
# hold it --------------------------


def _commit(route: Route, new: Route) -> None:
    pairs = [(route.t, new.t)]
    if new.x is not route.x:
        pairs += zip(route.x, new.x, strict=True)
    for old, fresh in zip(route.buffers, new.buffers, strict=True):
        pairs += zip(old, fresh, strict=True)
    pairs += zip(route.kept, new.kept, strict=True)
    for old, fresh in pairs:
        old.copy_(fresh)


def scale_(
    routes: list[Route],
    sums: Tensor,
    max_norm: Tensor | None,
    skipped: Tensor,
) -> tuple[list[Scales], Verdict]:
    """``step.scale``, which also counts a step that is not finite."""
    scales, verdict = scale(routes, sums, max_norm)
    skipped += verdict.finite.logical_not()
    return scales, verdict


def move_(routes: list[Route], scales: list[Scales]) -> list[list[Tensor | None]]:
    """``step.move`` of every route, in place."""
    matrices = []
    for route, s in zip(routes, scales, strict=True):
        new, part = move(route, s)
        _commit(route, new)
        matrices.append(part)
    return matrices


def settle_(parts: Sequence[tuple[Route, Scales, list[Tensor]]]) -> None:
    """``step.settle`` of every matrix route with its factors, in place."""
    for route, scales, factors in parts:
        new = settle(route, scales, factors)
        for x, fresh in zip(route.x, new.x, strict=True):
            x.copy_(fresh)
