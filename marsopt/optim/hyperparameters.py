"""A group's hyperparameters on the device: numbers that may change as tensors that do
not, so that compiled code reads them and never recompiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from marsopt.functional.routing import FOLLOWED, MATRICES, Routing, route
from marsopt.functional.step_types import scalar_dtype
from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.registry import named

SCALARS = ("eps", "weight_decay", "gamma", "clip", "weight_decay_1d")
PAIRS = ("betas", "betas_1d")
RATES = ("lr", "lr_1d", "base_lr")
# What, when it changes in a group, changes formulas and not only their numbers.
STRUCTURE = (
    "mars_type",
    "optimize_1d",
    "amsgrad",
    "epsilon_hat",
    "nesterov",
    "adjust_lr_fn",
    *MATRICES,
)
# What is off, or another value, where it is None: that changes formulas too.
OPTIONAL = ("clip", *FOLLOWED)


def complete(
    group: dict[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> set[str]:
    """Give a new param group what it lacks of the rule's hyperparameters: the
    constructor's value, else the rule's own default. What the group itself gives as lr,
    betas or weight_decay holds for everything in it, unless it gives the value that
    ends in ``_1d`` too.

    Args:
        group: as its user wrote it.
        given: what the constructor was given, and "mars_type".
        defaults: the optimizer's, of that type: the rule's own but for what was given.

    Returns:
        The names of the values that are the rule's own defaults.

    Raises:
        ValueError: an unknown ``mars_type``.
    """
    row = named(group.get("mars_type", given["mars_type"]))
    own = {name: None for name, of in FOLLOWED.items() if of in group}
    missing = {**row.hyperparameters, **given, **own}
    if row.name == given["mars_type"]:
        missing = {name: defaults[name] for name in missing} | own
    filled = [name for name in missing if name not in group]  # in one order everywhere
    group.update({name: missing[name] for name in filled})
    group["mars_type"] = row.name
    return {name for name in filled if name not in given and name not in own}


def structure(group: Mapping[str, Any]) -> tuple:
    """Return what decides about formulas."""
    return *map(group.get, STRUCTURE), *(group[key] is None for key in OPTIONAL)


def check_group(group: Mapping[str, Any], options: Mapping[str, Any]) -> Routing:
    """Check a group's hyperparameters; return the algorithms that they name.

    Raises:
        ValueError: one is out of its range.
    """
    for key in (*RATES, "eps", "weight_decay", "weight_decay_1d"):
        if not (key in FOLLOWED and group[key] is None):
            checks.at_least_zero(key, group[key])
    for key in PAIRS:
        if not (key in FOLLOWED and group[key] is None):
            checks.betas(key, group[key])
    checks.finite("gamma", group["gamma"])
    if group.get("gamma_1d") is not None:
        checks.finite("gamma_1d", group["gamma_1d"])
    checks.positive_or_none("clip", group["clip"])
    return route({**options, **group})


class DeviceHyperparameters:
    """One group's, and the algorithms that read them.

    ``lr``, ``lr_1d`` (already in proportion to lr), ``gamma`` and ``gamma_1d`` are 0-D
    tensors;
    ``routing`` reads the others.
    """

    def __init__(self, group: dict[str, Any], options: Mapping[str, Any]) -> None:
        self._group, self._options = group, options
        device = group["params"][0].device
        self._seen: dict[str, Any] = {}

        def cell() -> Tensor:
            return torch.zeros((), dtype=scalar_dtype(device), device=device)

        scalars = {key: cell() for key in SCALARS if group[key] is not None}
        pairs = {key: (cell(), cell()) for key in PAIRS if group[key] is not None}
        self._cells = {**scalars, **pairs}
        self.lr, self.lr_1d, self.gamma = cell(), cell(), scalars["gamma"]
        self.gamma_1d = cell()
        self.routing = route({**options, **group, **self._cells})
        self._needs_base_lr = self.routing.own_rate and any(
            not self.routing.matrix.matrices.takes(p.shape) for p in group["params"]
        )
        self.refresh()

    def refresh(self) -> bool:
        """Take over what has changed in the group since the last call; return whether
        a number has.

        Raises:
            ValueError: a value out of its range.
        """
        group = self._group
        now = {key: group.get(key) for key in (*SCALARS, *PAIRS, *RATES, "gamma_1d")}
        for key in PAIRS:  # a list may be changed in place
            if isinstance(now[key], list):
                now[key] = tuple(now[key])
        changed = [
            key
            for key, value in now.items()
            if _holds_tensor(value)
            or _holds_tensor(before := self._seen.get(key, ...))  # no device is asked
            or before != value
        ]
        if any(self._seen.get(key, ...) is not now[key] for key in changed):
            check_group(group, self._options)
        for key in changed:
            if key not in self._cells:
                continue
            if key in PAIRS:
                for cell, beta in zip(self._cells[key], now[key], strict=True):
                    _set(cell, beta)
            else:
                _set(self._cells[key], now[key])
        if changed:
            _set(self.lr, now["lr"])
            _set(self.lr_1d, self._rate_1d())
            own = now["gamma_1d"]
            _set(self.gamma_1d, now["gamma"] if own is None else own)
        self._seen = now
        return any(not _holds_tensor(now[key]) for key in changed)

    def told(self) -> str:
        """Return what ranks have to have alike, but for tensors."""
        fixed = {key: self._group.get(key) for key in STRUCTURE}
        numbers = {k: v for k, v in self._seen.items() if not _holds_tensor(v)}
        return repr({key: _plain(v) for key, v in (numbers | fixed).items()})

    def _rate_1d(self) -> Number:
        lr, base = self._group["lr"], self._group["base_lr"]
        if not self.routing.own_rate:
            return lr
        if base > 0:
            return lr * (self._group["lr_1d"] / base)
        if self._needs_base_lr and not isinstance(lr, Tensor) and lr != 0:
            raise ValueError(
                f"got lr={lr} for a group that was added with lr=0, expected a base "
                "rate: lr_1d is measured against it; "
                "add the group with its peak lr, or set group['base_lr'] to it"
            )
        return 0.0 * lr


def _plain(value: Any) -> Any:
    """Return equal numbers as one type, for their text to be equal."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value if value is None or isinstance(value, bool | str) else float(value)


def _holds_tensor(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(isinstance(v, Tensor) for v in values)


def _set(cell: Tensor, value: Number) -> None:
    if isinstance(value, Tensor):
        capturing = cell.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing and not value.is_cuda:
            raise RuntimeError(
                f"got a hyperparameter as a tensor on {value.device} in a step that a "
                f"CUDA graph captures, expected one on {cell.device}: a replay could "
                "not read it; move it there, and change it in place"
            )
        cell.copy_(value, non_blocking=True)
    else:
        cell.fill_(value)
