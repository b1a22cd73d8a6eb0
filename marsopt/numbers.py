"""A group's hyperparameters, as numbers that may change and tensors that do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from marsopt import checks, routing
from marsopt.checks import Number
from marsopt.step import scalar_dtype

SCALARS = ("eps", "weight_decay", "gamma", "clip", "weight_decay_1d")
PAIRS = ("betas", "betas_1d")
LIVE = (*SCALARS, *PAIRS, "lr", "lr_1d", "base_lr")


def pair_of(values: dict[str, Any], options: dict[str, Any]) -> routing.Pair:
    """The rules behind a group's hyperparameters, which may be numbers (checked) or
    tensors.
    """
    wanted = (*SCALARS, *PAIRS, "mars_type", "amsgrad", "epsilon_hat", "optimize_1d")
    kept = {key: options[key] for key in ("is_approx", "ns", "state_dtype", "h_dtype")}
    return routing.pair(**{key: values[key] for key in wanted}, **kept)


def check_group(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Raises ValueError where a group's hyperparameter is out of its range."""
    for key in ("lr", "lr_1d", "base_lr", "eps", "weight_decay", "weight_decay_1d"):
        checks.at_least_zero(key, group.get(key))
    for key in PAIRS:
        checks.betas(key, group[key])
    checks.finite("gamma", group["gamma"])
    checks.positive_or_none("clip", group["clip"])
    pair_of(group, options)


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
            not routing.is_matrix(p.shape) for p in group["params"]
        )
        self.refresh()

    def refresh(self) -> None:
        """Take over what has changed in the group since the last call.

        Raises:
            ValueError: a value out of its range.
        """
        group = self._group
        now: dict[str, Any] = {key: group.get(key) for key in LIVE}
        for key in PAIRS:  # a list may be changed in place
            if isinstance(now[key], list):
                now[key] = tuple(now[key])
        changed = [
            key
            for key, value in now.items()
            if _holds_tensor(value) or self._seen.get(key, ...) != value
        ]
        if any(self._seen.get(key, ...) is not now[key] for key in changed):
            check_group(group, self._options)
        for key in changed:
            if key in PAIRS:
                for i, beta in enumerate(now[key]):
                    _set(self._cells[f"{key}[{i}]"], beta)
            elif key in self._cells:
                _set(self._cells[key], now[key])
        if changed:
            _set(self.lr, now["lr"])
            _set(self.lr_1d, self._rate_1d())
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


def _holds_tensor(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(isinstance(v, Tensor) for v in values)


def _set(cell: Tensor, value: Number) -> None:
    if isinstance(value, Tensor):
        cell.copy_(value, non_blocking=True)
    else:
        cell.fill_(value)
