"""Hyperparameters that a step computes from its own number, on the device: decays whose
memory grows with the run (log-time momentum, as ADANA has it, arXiv 2602.05298).
"""

from __future__ import annotations

import ast
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepValue(ABC):
    """A value that stands in a hyperparameter's place and depends on the step. Its
    fields are numbers, which a compiled graph reads from a tensor.
    """

    @abstractmethod
    def at(self, t: Tensor) -> Tensor:
        """Return the hyperparameter in steps ``t`` = 1, 2, ... (N,), floating point."""


@dataclass(frozen=True, repr=False)
class LogTime(StepValue):
    """A decay that knows its step: the average remembers a fixed share of the run.

        beta_t = t / (t + delta),    between ``floor`` and ``cap``

    The weights of such an average are polynomial, its mean age is about t/(delta + 1)
    steps. It stands in the place of any decay, and t is each parameter's own count of
    steps, on its device. Both decays of AdamW or SOAP should grow: with equal ones |m|
    stays below sqrt(v).

    Source: ADANA, arXiv 2602.05298, whose beta_t = 1 - 8/(8 + t) is ``LogTime(8)``.

    Args:
        delta: steps after which the decay is a half; above 0.
        floor: least decay, in [0, 1).
        cap: largest decay, in (0, 1], at least ``floor``.
        start: steps that count before the first: t + start stands for t, from 0 up.

    Raises:
        ValueError: an argument out of its range, or a tensor.

    Example:
        >>> decay = marsopt.LogTime(10)
        >>> decay, decay == marsopt.LogTime(10.0)
        (LogTime(10.0), True)
        >>> decay.at(torch.tensor([1.0, 10.0, 990.0]))
        tensor([0.0909, 0.5000, 0.9900])
        >>> rule = marsopt.rule("adamw", betas=(decay, decay), nesterov=0.2)
    """

    delta: float = 10.0
    floor: float = 0.0
    cap: float = 1.0
    start: float = 0.0

    def __post_init__(self) -> None:
        for name in ("delta", "floor", "cap", "start"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(
                    f"got {name}={value!r} of LogTime, expected a number: put a new "
                    "LogTime into the param group to change it between steps"
                )
            object.__setattr__(self, name, float(value))
        if not (0 < self.delta < math.inf and 0 <= self.floor <= self.cap <= 1):
            raise ValueError(
                f"got {self!r}, expected delta > 0 and 0 <= floor <= cap <= 1: common "
                "values are LogTime(8) and LogTime(10)"
            )
        if not 0 <= self.start < math.inf:
            raise ValueError(
                f"got start={self.start} of LogTime, expected a number of steps from 0 "
                "up: leave it out"
            )
        if self.floor == 1:
            raise ValueError(
                "got floor=1 of LogTime, expected less than 1: such an average would "
                "never take a gradient up"
            )

    def __repr__(self) -> str:
        more = [
            f", {f.name}={value}"
            for f in fields(self)[1:]
            if (value := getattr(self, f.name)) != f.default
        ]
        return f"LogTime({self.delta}{''.join(more)})"

    @classmethod
    def parse(cls, text: str) -> LogTime:
        """Return the decay that ``repr`` writes so, for configuration files.

        Raises:
            ValueError: another text.
        """
        try:
            call = ast.parse(text.strip(), mode="eval").body
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != cls.__name__:
                raise ValueError("not a call of this class")
            values = [ast.literal_eval(value) for value in call.args]
            named = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            return cls(*values, **named)
        except (SyntaxError, TypeError, ValueError) as error:
            raise ValueError(
                f"got {text!r}, expected a number or a decay: write LogTime(10)"
            ) from error

    def at(self, t: Tensor) -> Tensor:
        t, delta, floor, cap = self._like(t)
        return (t / (t + delta)).clamp(floor, cap)

    def complement(self, t: Tensor) -> Tensor:
        """Return 1 - beta_t, whose digits a difference from 1 would lose."""
        t, delta, floor, cap = self._like(t)
        return (delta / (t + delta)).clamp(1 - cap, 1 - floor)

    def product(self, t: Tensor) -> Tensor:
        """Return beta_1 beta_2 ... beta_t. From the first step on, without ``floor``,
        ``cap`` and ``start``, it is

            Gamma(t+1) Gamma(1+delta) / Gamma(t+1+delta)
        """
        t, delta, floor, cap = self._like(t)
        start = torch.zeros_like(t) + self.start
        # the last steps at the floor, and below the cap, which may be never (infinity)
        at_floor = torch.ceil(floor * delta / (1 - floor)) - 1
        at_floor = torch.minimum(t, torch.maximum(at_floor, start))
        below_cap = torch.minimum(t, torch.floor(cap * delta / (1 - cap)))
        below_cap = torch.maximum(below_cap, at_floor)

        def log_gammas(t: Tensor) -> Tensor:
            return torch.lgamma(t + 1) - torch.lgamma(t + 1 + delta)

        log = log_gammas(below_cap) - log_gammas(at_floor)
        log = log + torch.special.xlogy(at_floor - start, floor)
        log = log + torch.special.xlogy(t - below_cap, cap)
        product: Tensor = log.exp()
        return product

    def _like(self, t: Tensor) -> tuple[Tensor, ...]:
        """Return t + ``start``, and the other fields as tensors like it."""
        t = t + self.start
        zero = torch.zeros_like(t)
        return t, *(zero + value for value in (self.delta, self.floor, self.cap))


Decay = float | Tensor | LogTime  # of an average, as hyperparameters have it
Weight = bool | float | Tensor | StepValue  # of the gradient beside its average


def at(value: Any, t: Tensor) -> Any:
    """Return a hyperparameter in steps ``t`` (N,); a number is one in all steps."""
    return value.at(t) if isinstance(value, StepValue) else value


def check_both_grow(betas: Sequence[Any]) -> None:
    """Log one warning where one decay of two moments grows and the other does not."""
    if len({isinstance(beta, StepValue) for beta in betas}) > 1:
        warn_of_one()


@cache
def warn_of_one() -> None:
    logger.warning(
        "marsopt: one of two betas is a LogTime, the other a number: such runs lost or "
        "diverged where two LogTime(10) did well; give two, or none"
    )


def from_text(value: Any) -> Any:
    """Return a hyperparameter of a configuration file with the decays that it spells.

    Raises:
        ValueError: a text that spells none.
    """
    if isinstance(value, tuple | list):
        return tuple(map(from_text, value))
    return LogTime.parse(value) if isinstance(value, str) else value


def complement(decay: Any, t: Tensor) -> Any:
    """Return 1 - beta in steps ``t`` (N,)."""
    return decay.complement(t) if isinstance(decay, LogTime) else 1 - decay


def product(decay: Any, t: Tensor) -> Any:
    """Return the product of the first ``t`` decays (N,): beta^t of a number."""
    return decay.product(t) if isinstance(decay, LogTime) else decay**t


# What torch.load makes by default, which runs no code that a file names
torch.serialization.add_safe_globals([LogTime])
