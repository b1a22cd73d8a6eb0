"""A param group's hyperparameters on the device: 0-D tensors that stay, so that
compiled code reads numbers that change and never recompiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from marsopt.functional.routing import route
from marsopt.functional.step_types import scalar_dtype
from marsopt.optim.groups import (
    check_direction,
    group_table,
    has_rest,
    rate_1d,
    structure,
)
from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.decay import StepValue
from marsopt.rules.hyperparameters import check_values, dynamic, rejoined

SCALARS = frozenset({float, int, type(None)})  # one that is the same object is equal


class DeviceHyperparameters:
    """One group's, and the algorithms that read them.

    ``cells`` has 0-D tensors by name, "lr_1d" already in proportion to lr; ``routing``
    reads them, but for rates and gammas. They are views of ``values`` (K,), each at its
    storage offset.

    Args:
        group: a param group.
        options: the constructor's options.
        device: of the parameters that take part in steps; None = the CPU.
    """

    def __init__(
        self,
        group: dict[str, Any],
        options: Mapping[str, Any],
        device: torch.device | None = None,
    ) -> None:
        self._options = options
        self._structure = structure(group, options)
        device = torch.device("cpu") if device is None else device
        self._device = device
        self._seen: dict[str, Any] = {}

        self._numbers = {
            name: line
            for name, line in group_table(group, options).items()
            if line.is_number and not line.is_whole
        }
        present = {n: v for n, v in self._plain(group).items() if v is not None}
        check_values(self._numbers, {n: present.get(n) for n in self._numbers})
        values = dict.fromkeys(("lr_1d", "gamma_1d"), 0.0) | present
        num = len(dynamic([*values.values()]))
        self.values = torch.zeros(num, dtype=scalar_dtype(device), device=device)
        rest = iter(self.values.unbind())
        cells = {name: rejoined(value, rest) for name, value in values.items()}
        for name, value in present.items():
            _set(cells[name], value)  # before they are checked
        self.routing = route({**options, **group, **{n: cells[n] for n in present}})
        del cells["base_lr"]  # no algorithm reads it
        self.cells = cells
        self.refresh(group)

    def fits(self, group: dict[str, Any], device: torch.device | None) -> bool:
        """Return whether these are still the hyperparameters of a group.

        Raises:
            ValueError: a scheduler has put a number in the place of a ``LogTime``.
        """
        present, before = structure(group, self._options), self._structure
        if "max_momentum" in group and _grows(before) and not _grows(present):
            raise ValueError(
                f"got betas={group['betas']} from a scheduler that cycles momentum, "
                "expected the LogTime that the group had: pass cycle_momentum=False to "
                "the scheduler, or a number as beta1"
            )
        return present == before and device in (None, self._device)

    def refresh(self, group: Mapping[str, Any]) -> bool:
        """Take over the changes of a group, which they fit, since the last call; return
        whether there may be any. Tensors count as changed: reading them would sync.

        Raises:
            ValueError: a value out of its range.
        """
        check_direction(group)
        latest, previous = self._plain(group), self._seen
        changed = [
            name
            for name, value in latest.items()
            if not (type(value) in SCALARS and value is previous.get(name, ...))
            and (
                _holds_tensor(value)  # no device is asked
                or _holds_tensor(before := previous.get(name, ...))
                or before != value
            )
        ]
        if not changed:
            return False
        new = {
            n: latest[n]
            for n in changed
            if self._seen.get(n, ...) is not latest[n] or checks.can_read(latest[n])
        }
        check_values(self._numbers, new)
        has_gamma_1d = self.routing.rest_gamma is not None
        gamma_1d = latest["gamma_1d" if has_gamma_1d else "gamma"]
        values = latest | {"lr_1d": self._rate_1d(group, latest), "gamma_1d": gamma_1d}
        for name in {*changed, "lr_1d", "gamma_1d"} & self.cells.keys():
            _set(self.cells[name], values[name])
        self._seen = latest
        return True

    def _plain(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's numbers as Python and torch write them; lists, which may be
        changed in place, as tuples.
        """
        numbers = {name: group.get(name) for name in self._numbers}
        for name, value in numbers.items():
            if type(value) is not float and value is not self._seen.get(name):
                value = self._numbers[name].plain(value)
                numbers[name] = tuple(value) if isinstance(value, list) else value
        return numbers

    def _rate_1d(self, group: Mapping[str, Any], numbers: Mapping[str, Any]) -> Number:
        lr: Number = numbers["lr"]
        base = numbers["base_lr"]
        if self.routing.rest_ratio is None:
            return lr
        if base > 0:
            return rate_1d(lr, numbers["lr_1d"], base)
        used = has_rest(group, self.routing)
        if used and not isinstance(lr, Tensor) and lr != 0:
            raise ValueError(
                f"got lr={lr} for a group that was added with lr=0, expected a base "
                "learning rate: lr_1d is measured against it; "
                "add the group with its peak lr, or set group['base_lr'] to it"
            )
        return 0.0 * lr


def _grows(structure: Mapping[str, Any]) -> bool:
    """Return whether a group of this structure has a beta1 that knows its step."""
    betas = structure["betas"]
    return isinstance(betas, tuple) and issubclass(betas[0], StepValue)


def _as_floats(value: Any) -> Any:
    """Return equal numbers as one type, for their text to be equal."""
    if isinstance(value, tuple):
        return tuple(map(_as_floats, value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else value


def _holds_tensor(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(isinstance(v, Tensor) for v in values)


def _set(cells: Any, values: Any) -> None:
    for cell, value in zip(dynamic(cells), dynamic(values), strict=True):
        _fill(cell, value)


def _fill(cell: Tensor, value: Number) -> None:
    if isinstance(value, Tensor):
        capturing = cell.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing and not value.is_cuda:
            raise RuntimeError(
                f"got a hyperparameter as a tensor on {value.device} in a step that a "
                f"CUDA graph captures, expected one on {cell.device}: a replay could "
                "not read it; move it there, and change it in place"
            )
        cell.copy_(value.detach(), non_blocking=True)
    else:
        cell.fill_(value)
