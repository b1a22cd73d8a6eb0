"""The numbers of param groups: read on the host every step, and sent to the device if
one has changed, as one table (G, K) a formula, so that nothing recompiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from marsopt.functional.routing import algorithm_of
from marsopt.optim.groups import (
    check_direction,
    group_table,
    learning_rate,
    structure,
)
from marsopt.rules import checks
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.checks import Number
from marsopt.rules.hyperparameters import (
    check_values,
    dynamic,
    numbers_of,
    rejoined,
    with_numbers,
)
from marsopt.step.tables import scalar_dtype

SCALARS = frozenset({float, int, type(None)})  # one that is the same object is equal


class GroupValues:
    """The numbers of one param group, and its algorithm, which tells the structure: its
    numbers are not refreshed.

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
        self._device = torch.device("cpu") if device is None else device
        self._seen: dict[str, Any] = {}
        self._numbers = {
            name: line
            for name, line in group_table(group, options).items()
            if line.is_number and not line.is_whole
        }
        present = {n: v for n, v in self._plain(group).items() if v is not None}
        check_values(self._numbers, {n: present.get(n) for n in self._numbers})
        numbers = dynamic([*present.values()])
        # by their offsets in one tensor, the columns of the table are known by name
        cells = torch.zeros(
            len(numbers), dtype=scalar_dtype(self._device), device=self._device
        )
        for cell, number in zip(cells.unbind(), numbers, strict=True):
            put(cell, number)  # before they are checked
        rest = iter(cells.unbind())
        by_name = {name: rejoined(value, rest) for name, value in present.items()}
        self.algorithm = algorithm_of({**options, **group, **by_name})
        columns = [by_name["lr"], by_name["gamma"], *numbers_of(self.algorithm)]
        # the place of each among the group's numbers; a default that no group has as a
        # key stands for itself
        self._columns = [
            int(c.storage_offset()) if isinstance(c, Tensor) else float(c)
            for c in columns
        ]
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
        self._rate = learning_rate(latest["lr"], latest["lr_ratio"])
        self._seen = latest
        return True

    @property
    def row(self) -> list[Number]:
        """The numbers as the table has them: lr, gamma, and the algorithm's."""
        numbers = self._seen | {"lr": self._rate}
        values = dynamic([v for v in numbers.values() if v is not None])
        return [c if isinstance(c, float) else values[c] for c in self._columns]

    def _plain(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's numbers as Python and torch write them."""
        numbers = {name: group.get(name) for name in self._numbers}
        for name, value in numbers.items():
            if type(value) is not float and value is not self._seen.get(name):
                numbers[name] = self._numbers[name].plain(value)
        return numbers


class FormulaValues:
    """The numbers of G param groups of one formula, on the device.

    Args:
        groups: of the numbers.
        device: of the parameters.
    """

    def __init__(self, groups: Sequence[GroupValues], device: torch.device) -> None:
        self._groups = groups
        num = len(groups[0].row)
        self.values = torch.zeros(
            len(groups), num, dtype=scalar_dtype(device), device=device
        )
        # of each group: its numbers are views of the table
        self.algorithms: list[Algorithm] = [
            with_numbers(group.algorithm, iter(row[2:].unbind()))
            for group, row in zip(groups, self.values.unbind(), strict=True)
        ]
        self.send()

    def send(self) -> None:
        """Send all numbers, by one copy; tensors on the device are copied there.

        Raises:
            RuntimeError: a CUDA graph captures the step, and a number is a tensor on
                the host.
        """
        rows = [group.row for group in self._groups]
        device = self.values.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            for row, numbers in zip(self.values.unbind(), rows, strict=True):
                for cell, number in zip(row.unbind(), numbers, strict=True):
                    put(cell, number)
            return
        plain = [[0.0 if isinstance(n, Tensor) else n for n in row] for row in rows]
        host = torch.tensor(plain, dtype=self.values.dtype, device="cpu")
        self.values.copy_(host, non_blocking=True)
        for row, numbers in zip(self.values, rows, strict=True):
            for column, number in enumerate(numbers):
                if isinstance(number, Tensor):
                    put(row[column], number)


def _holds_tensor(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(isinstance(v, Tensor) for v in values)


def put(cell: Tensor, value: Number) -> None:
    """Write a number into a 0-D tensor; a tensor without a sync.

    Raises:
        RuntimeError: a CUDA graph captures it, and the tensor is on the host.
    """
    if isinstance(value, Tensor):
        capturing = cell.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing and not value.is_cuda:
            raise RuntimeError(
                f"got a hyperparameter as a tensor on {value.device} in a step that a "
                f"CUDA graph captures, expected one on {cell.device}: a replay could "
                "not read it; move it there, and change it in place"
            )
        cell.copy_(value.detach().reshape(()), non_blocking=True)
    else:
        cell.fill_(value)
