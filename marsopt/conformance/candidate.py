"""An optimizer class of somebody's, run along the cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from marsopt.conformance.recordings import AUTHORS, Arrays, Case

Factory = Callable[..., Optimizer]  # of a list of parameters, and AUTHORS's arguments
EXACT = ("update_previous_grad", "update_last_grad")  # the authors' protocol


class Adapted:
    """As a factory, a class that lacks some of the authors' arguments, or has them by
    other names.

    Args:
        made: the class.
        options: arguments that it is given in any case, by its own names.
        names: the authors' name: its own.

    Raises:
        ValueError: a class whose signature cannot be read.

    Example:
        >>> from marsopt.conformance import Adapted
        >>> Adapted(torch.optim.AdamW).lacks[:3]
        ['gamma', 'is_approx', 'mars_type']
    """

    def __init__(
        self,
        made: Factory,
        options: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ):
        self.made, self.options = made, dict(options or {})
        self.names = {name: name for name in AUTHORS} | dict(names or {})
        known = _parameters(made)
        told = names or {}  # what is said to be taken is given: **kwargs may take it
        self.taken = {
            n: own for n, own in self.names.items() if own in known or n in told
        }

    @property
    def lacks(self) -> list[str]:
        """Return the authors' arguments that it does not take."""
        return [name for name in AUTHORS if name not in self.taken]

    def can(self, case: Case) -> bool:
        """Whether it takes the options that a case turns on."""
        turned_on = [name for name, value in case.arguments.items() if value is True]
        default = "is_approx"  # on: a port that has nothing else need not say so
        return all(name in self.taken for name in turned_on if name != default)

    def __call__(self, params: list[nn.Parameter], **arguments: Any) -> Optimizer:
        own = {own: arguments[name] for name, own in self.taken.items()}
        return self.made(params, **(own | self.options))


def _parameters(made: Factory) -> set[str]:
    """Return the names of what a class takes; where it hands on ``**kwargs``, of what
    the classes that it inherits from take, too.
    """
    kinds = inspect.signature(made).parameters
    found = set(kinds)
    above = made.__mro__[1:] if isinstance(made, type) else ()
    for cls in above:
        if not any(kind.kind is kind.VAR_KEYWORD for kind in kinds.values()):
            break
        if "__init__" in vars(cls) and cls is not object:
            kinds = inspect.signature(cls).parameters
            found |= set(kinds)
    return found


def can(factory: Factory, case: Case) -> bool:
    """Return whether an optimizer has what a case is about: options that are turned on,
    and exact MARS, which is looked for as the authors' protocol.
    """
    if isinstance(factory, Adapted) and not factory.can(case):
        return False
    return case.handed is None or all(
        hasattr(getattr(factory, "made", factory), name) for name in EXACT
    )


def run(factory: Factory, case: Case) -> list[Arrays]:
    """Return the parameters after each step of a case, in float32.

    The rate of each step is set in ``param_groups``, as a scheduler does.
    """
    params = {
        name: nn.Parameter(torch.from_numpy(np.array(x)))
        for name, x in case.init.items()
    }
    optimizer = factory(list(params.values()), **case.arguments)
    after: list[Arrays] = []
    for t, lr in enumerate(case.lrs):
        for group in optimizer.param_groups:
            group["lr"] = lr
        if case.handed is not None:
            _give(params, case.handed[t])
            optimizer.update_previous_grad()
        _give(params, case.grads[t])
        optimizer.step()
        if case.handed is not None:
            optimizer.update_last_grad()
        after.append({n: p.detach().numpy().copy() for n, p in params.items()})
    return after


def _give(params: Mapping[str, nn.Parameter], grads: Arrays) -> None:
    for name, p in params.items():
        p.grad = torch.from_numpy(np.array(grads[name]))
