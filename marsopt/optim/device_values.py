"""A param group's hyperparameters on the device: 0-D tensors that stay, so that
compiled code reads numbers that change and never recompiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from marsopt.functional.routing import algorithm_of
from marsopt.functional.step_types import scalar_dtype
from marsopt.optim.groups import (
    check_direction,
    group_table,
    learning_rate,
    structure,
)
from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.hyperparameters import check_values, dynamic, rejoined

SCALARS = frozenset({float, int, type(None)})  # one that is the same object is equal


class DeviceHyperparameters:
    """One group's, and the algorithm that reads them.

    ``cells`` has 0-D tensors by name, "lr" already times ``lr_ratio``; ``algorithm``
    reads them, but for lr and gamma. They are views of ``values`` (K,), each at its
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
        num = len(dynamic([*present.values()]))
        self.values = torch.zeros(num, dtype=scalar_dtype(device), device=device)
        rest = iter(self.values.unbind())
        cells = {name: rejoined(value, rest) for name, value in present.items()}
        for name, value in present.items():
            _set(cells[name], value)  # before they are checked
        self.algorithm = algorithm_of({**options, **group, **cells})
        del cells["lr_ratio"]  # lr has it already
        self.cells = cells
        self.refresh(group)

    def fits(self, group: dict[str, Any], device: torch.device | None) -> bool:
        """Return whether these are still the hyperparameters of a group."""
        is_same = structure(group, self._options) == self._structure
        return is_same and device in (None, self._device)

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
        values = latest | {"lr": learning_rate(latest["lr"], latest["lr_ratio"])}
        for name in {*changed, "lr"} & self.cells.keys():
            _set(self.cells[name], values[name])
        self._seen = latest
        return True

    def _plain(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's numbers as Python and torch write them."""
        numbers = {name: group.get(name) for name in self._numbers}
        for name, value in numbers.items():
            if type(value) is not float and value is not self._seen.get(name):
                numbers[name] = self._numbers[name].plain(value)
        return numbers


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
