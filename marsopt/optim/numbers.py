"""The numbers of param groups: read from the groups on the host in every step, and sent
to the device if one has changed, as one table (G, K) a formula, so that nothing
recompiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from marsopt.functional.authors import REST
from marsopt.optim.groups import options_of_group, values_of
from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.numerics import scalar_dtype
from marsopt.rules.options import options_of
from marsopt.rules.registry import named

LR = ("lr", "lr_ratio", "lr_1d_ratio")  # keys whose product is a learning rate


class Row:
    """The numbers of a param group's matrices, or of its other tensors: a row of their
    formula's table, read from the group itself.

    Args:
        group: a param group, with all hyperparameters.
        is_matrix: whether it is the row of matrices.
        options: the constructor's options.

    Raises:
        ValueError: a hyperparameter out of its range.
    """

    def __init__(
        self, group: Mapping[str, Any], is_matrix: bool, options: Mapping[str, Any]
    ) -> None:
        self.group, values = group, values_of(group, is_matrix)
        algorithm = named(values["mars_type"]).algorithm({**options, **values})
        self.algorithm = algorithm
        is_of_rule = values["mars_type"] == group["mars_type"]
        # A column after lr is a key of the group and a place in its pair, or a number.
        self._sources: list[tuple[str, int | None] | Number] = []
        defaults = algorithm.defaults(0.0, None)
        lines = options_of(type(algorithm.preconditioner))
        for (name, place), default in zip(algorithm.columns, defaults, strict=True):
            key = name
            if name in lines and lines[name].beta is not None:
                key, place = "betas", lines[name].beta
            if not is_matrix and group.get(f"{key}_1d") is not None:
                key = f"{key}_1d"
            elif group.get(key) is None or (key == "nesterov" and not is_of_rule):
                self._sources.append(default)
                continue
            self._sources.append((key, place))
        del self._sources[0]
        known = options_of_group(group, options)
        self._structure = [
            key for key, line in known.items() if key in group and not line.is_number
        ]
        # Numbers that the formula does not read are checked, too.
        self._lines = {
            key: line
            for key, line in known.items()
            if line.is_number and key in group and not (is_matrix and key in REST)
        }
        self._names, self._form = set(group), self._present_form()
        self._seen: list[Any] = [...] * len(self._lines)
        self._plain: dict[str, Any] = {}
        self.numbers: list[Number] = []
        self.refresh()

    def _present_form(self) -> list[Any]:
        """Return the values that the formula depends on: structure; and None, True or
        False in the place of a number.
        """
        values = list(map(self.group.get, self._structure))
        for value in map(self.group.get, self._lines):
            is_switch = value is None or value is True or value is False
            values.append(value if is_switch else float)
        return values

    def fits(self) -> bool:
        """Return whether the group has the keys, and the formula, of before."""
        try:
            is_same_form = self._present_form() == self._form
        except (ValueError, RuntimeError):  # an array or tensor is neither true nor not
            return False
        return is_same_form and self.group.keys() == self._names

    def refresh(self) -> bool:
        """Take over the group's changes since the last call; return whether there may
        be any. Tensors, lists and arrays count as changed: they may change in place,
        and reading a tensor would sync.

        Raises:
            ValueError: a value out of its range.
        """
        group = self.group
        latest = [group.get(key) for key in self._lines]
        if all(map(is_, latest, self._seen)) and not any(map(_is_mutable, latest)):
            return False
        items = self._lines.items()
        for (key, line), value, seen in zip(items, latest, self._seen, strict=True):
            self._plain[key] = value = checks.plain(value)
            if value is seen and not checks.can_read(value):
                continue
            if line.check and not (value is None and line.is_optional):
                line.check(key, value)
        rate: Number = 1.0
        for key in LR:
            if (factor := self._plain.get(key)) is not None:
                rate = rate * factor
        checks.at_least_zero("lr * lr_ratio", rate)
        self.numbers = [rate]
        for source in self._sources:
            if isinstance(source, tuple):
                key, place = source
                value = self._plain[key]
                self.numbers.append(value if place is None else value[place])
            else:
                self.numbers.append(source)
        self._seen = latest
        return True


def _is_mutable(value: Any) -> bool:
    """Return whether a value may change in place."""
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return not isinstance(value, checks.PLAIN)


class Table:
    """The numbers of G rows of one formula, on the device.

    Args:
        rows: of the numbers.
        device: of the parameters.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = rows
        shape = len(rows), len(rows[0].numbers)
        self.values = torch.zeros(shape, dtype=scalar_dtype(device), device=device)
        self.send()

    def send(self) -> None:
        """Send all numbers, by one copy; tensors on the device are copied there.

        Raises:
            RuntimeError: a CUDA graph captures the step, and a number is a tensor on
                the host.
        """
        rows, device = [row.numbers for row in self.rows], self.values.device
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
