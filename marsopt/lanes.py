"""Lanes: the parameters of one group that take one rule, with their state, made ready
for the pure step.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marsopt import checks, routing
from marsopt.checks import Number
from marsopt.rule import LeafRule
from marsopt.step import Route, Scales, Verdict, move, scalar_dtype, scale, settle

# Symbols of the rules, and what torch.optim (and, for h, the authors) call them in a
# state dict.
STATE_KEYS = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "v_max": "max_exp_avg_sq",
    "b": "momentum_buffer",
    "h": "last_grad",
}
SCALARS = ("eps", "weight_decay", "gamma", "clip", "weight_decay_1d")
PAIRS = ("betas", "betas_1d")


def pair_of(values: dict[str, Any], options: dict[str, Any]) -> routing.Pair:
    """The rules behind a group's hyperparameters, which may be numbers (checked) or
    tensors.
    """
    wanted = (*SCALARS, *PAIRS, "mars_type", "amsgrad", "epsilon_hat", "optimize_1d")
    kept = {key: options[key] for key in ("is_approx", "ns", "state_dtype")}
    return routing.pair(**{key: values[key] for key in wanted}, **kept)


class Numbers:
    """A group's hyperparameters as 0-D tensors on the device: compiled code reads them
    and never recompiles.
    """

    def __init__(self, group: dict[str, Any], options: dict[str, Any]) -> None:
        self._group, self._options = group, options
        device = group["params"][0].device
        self._seen: dict[str, Any] = {}

        def cell() -> Tensor:
            return torch.zeros((), dtype=scalar_dtype(device), device=device)

        self._cells: dict[str, Tensor] = {}
        for key in SCALARS:
            if group[key] is not None:
                self._cells[key] = cell()
        for key in PAIRS:
            for i in range(2):
                self._cells[f"{key}[{i}]"] = cell()
        self.lr, self.lr_1d, self.gamma = cell(), cell(), self._cells["gamma"]
        values = {
            **group,
            **{key: self._cells.get(key) for key in SCALARS},
            **{
                key: tuple(self._cells[f"{key}[{i}]"] for i in range(2))
                for key in PAIRS
            },
        }
        self.pair = pair_of(values, options)
        self._needs_ratio = self.pair.own_rate and any(
            not routing.is_matrix(p) for p in group["params"]
        )
        self.refresh()

    def refresh(self) -> None:
        """Take over what has changed in the group since the last call, checking its
        range.
        """
        group = self._group
        now: dict[str, Number] = {
            key: group[key] for key in SCALARS if group[key] is not None
        }
        for key in PAIRS:
            now.update({f"{key}[{i}]": beta for i, beta in enumerate(group[key])})
        now |= {"lr": group["lr"], "lr_1d": self._rate_1d()}
        changed = {
            key: v
            for key, v in now.items()
            if isinstance(v, Tensor) or self._seen.get(key) != v
        }
        if any(not isinstance(v, Tensor) for v in changed.values()):
            pair_of(group, self._options)
            checks.at_least_zero("lr", group["lr"])
            checks.at_least_zero("lr_1d", group["lr_1d"])
        cells = {**self._cells, "lr": self.lr, "lr_1d": self.lr_1d}
        for key, value in changed.items():
            cells[key].copy_(value) if isinstance(value, Tensor) else cells[key].fill_(
                value
            )
        self._seen = now

    def _rate_1d(self) -> Number:
        lr, base = self._group["lr"], self._group["base_lr"]
        if base > 0:
            return lr * (self._group["lr_1d"] / base)
        if self._needs_ratio and not isinstance(lr, Tensor) and lr != 0:
            raise ValueError(
                f"got lr={lr} for a group that was added with lr=0, expected a base "
                "rate: lr_1d is measured against it; "
                "add the group with its peak lr, or set group['base_lr'] to it"
            )
        return 0.0 * lr


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
        for symbol in symbols:
            if STATE_KEYS[symbol] not in kept:
                kept[STATE_KEYS[symbol]] = torch.zeros_like(
                    p, dtype=options["state_dtype"] or p.dtype
                )
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
    live: Tensor | None,
    skipped: Tensor,
) -> tuple[list[Scales], Verdict]:
    """``step.scale``, which also counts a step that is not finite."""
    scales, verdict = scale(routes, sums, max_norm, live)
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


def settle_(
    routes: Sequence[Route], scales: Sequence[Scales], factors: Sequence[list[Tensor]]
) -> None:
    """``step.settle`` of every route, in place."""
    for route, s, o in zip(routes, scales, factors, strict=True):
        for x, new in zip(route.x, settle(route, s, o).x, strict=True):
            x.copy_(new)
