"""Somebody's optimizer class of PyTorch, run along the cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tests.conformance.model import cases
from tests.conformance.recordings import AUTHORS, TYPES, Arrays, Case
from tests.conformance.verdict import Report, judge

EXACT = ("update_previous_grad", "update_last_grad")  # the authors' protocol
PREFIX = "mars-"  # of the authors' types: "mars-adamw" is "adamw" elsewhere


class Port:
    """A class that takes some of the authors' arguments, perhaps by other names.

    Args:
        cls: the class. One whose types are called "adamw", not "mars-adamw", says so by
            its default.
        options: arguments for every case, by the names of the class.
        names: {the authors' name: the name that the class has for it}; so that
            ``**kwargs`` takes an argument, it has to be named here.
    """

    def __init__(
        self,
        cls: Callable[..., Optimizer],
        options: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ):
        self.cls, self.options, named = cls, dict(options or {}), dict(names or {})
        defaults = _defaults(cls)
        self.taken = {n: n for n in AUTHORS if n in defaults} | named
        default = defaults.get(self.taken.get("mars_type"))
        self.has_prefix = f"{PREFIX}{default}" not in TYPES

    @property
    def lacks(self) -> list[str]:
        """The authors' arguments that the class does not take."""
        return [name for name in AUTHORS if name not in self.taken]

    def can(self, case: Case) -> bool:
        """Whether the class has what a case is about: options that are turned on, and
        exact MARS by the authors' protocol. (Without exact MARS ``is_approx`` is no
        option.)
        """
        turned_on = {name for name, value in case.arguments.items() if value is True}
        if turned_on - {"is_approx"} - self.taken.keys():
            return False
        return case.handed is None or all(hasattr(self.cls, name) for name in EXACT)

    def optimizer(self, params: list[nn.Parameter], case: Case) -> Optimizer:
        """Return the optimizer of a case."""
        arguments = dict(case.arguments)
        if not self.has_prefix:
            arguments["mars_type"] = arguments["mars_type"].removeprefix(PREFIX)
        taken = {theirs: arguments[name] for name, theirs in self.taken.items()}
        return self.cls(params, **(taken | self.options))


def _defaults(cls: Callable[..., Optimizer]) -> dict[str, Any]:
    """Return what a class takes, with defaults; where it hands on ``**kwargs``, also
    what the classes above it take.
    """
    params = inspect.signature(cls).parameters
    defaults = {name: param.default for name, param in params.items()}
    for base in cls.__mro__[1:] if isinstance(cls, type) else ():
        if not any(param.kind is param.VAR_KEYWORD for param in params.values()):
            break
        if "__init__" in vars(base) and base is not object:
            params = inspect.signature(base).parameters
            defaults = {name: p.default for name, p in params.items()} | defaults
    return defaults


def run(port: Port, case: Case) -> list[Arrays]:
    """Return the parameters after each step of a case, in float32.

    The learning rate of each step is set in ``param_groups``, as a scheduler does.
    Gradients are in place, as after ``zero_grad(set_to_none=False)``.
    """
    params = {
        name: nn.Parameter(torch.from_numpy(np.array(x)))
        for name, x in case.init.items()
    }
    optimizer = port.optimizer(list(params.values()), case)
    trajectory: list[Arrays] = []
    for t, lr in enumerate(case.lrs):
        for group in optimizer.param_groups:
            group["lr"] = lr
        if case.handed is not None:
            _set_grads(params, case.handed[t])
            optimizer.update_previous_grad()
        _set_grads(params, case.grads[t])
        optimizer.step()
        if case.handed is not None:
            optimizer.update_last_grad()
        trajectory.append({n: p.detach().numpy().copy() for n, p in params.items()})
    return trajectory


def _set_grads(params: Mapping[str, nn.Parameter], grads: Arrays) -> None:
    for name, p in params.items():
        grad = torch.from_numpy(np.array(grads[name]))
        p.grad = grad if p.grad is None else p.grad.copy_(grad)


def check(port: Port, mars_type: str) -> Report:
    """Run a port along the recordings of a type, and say what it does."""
    trajectories, failures = {}, {}
    for case in cases(mars_type):
        if port.can(case):
            try:
                trajectories[case.name] = run(port, case)
            except Exception as error:  # whatever a port raises is a part of its report
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                failures[case.name] = reason
    return judge(trajectories, mars_type, failures)
