"""Ranges of hyperparameters, checked where they come in. Tensors are taken as they are:
looking would be a sync.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches

import torch
from torch import Tensor

Number = float | Tensor


def _check(
    name: str, value: object, expected: str, holds: Callable[[float], bool], do: str
) -> None:
    if isinstance(value, Tensor):
        if value.ndim:
            raise ValueError(
                f"got {name} of shape {tuple(value.shape)}, expected a number or 0-D "
                f"tensor: {do}"
            )
        return
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not holds(float(value))
    ):
        raise ValueError(f"got {name}={value!r}, expected {expected}: {do}")


def at_least_zero(name: str, value: Number) -> None:
    """A finite number >= 0."""
    _check(
        name,
        value,
        "a finite number >= 0",
        lambda v: 0 <= v < math.inf,
        f"pass {name}=0 or more",
    )


def positive(name: str, value: Number) -> None:
    """A finite number > 0."""
    _check(
        name,
        value,
        "a finite number > 0",
        lambda v: 0 < v < math.inf,
        f"pass {name} above 0",
    )


def positive_or_none(name: str, value: Number | None) -> None:
    """None or a finite number > 0."""
    if value is not None:
        _check(
            name,
            value,
            "None or a finite number > 0",
            lambda v: 0 < v < math.inf,
            "None switches it off",
        )


def finite(name: str, value: Number) -> None:
    """Any finite number."""
    _check(name, value, "a finite number", math.isfinite, f"pass a finite {name}")


def decay_rate(name: str, value: Number) -> None:
    """A number in [0, 1)."""
    _check(
        name,
        value,
        "a number in [0, 1)",
        lambda v: 0 <= v < 1,
        "common values are 0.9 to 0.99",
    )


def betas(name: str, value: tuple[Number, Number]) -> None:
    """A pair of numbers in [0, 1)."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(
            f"got {name}={value!r}, expected a pair: pass e.g. {name}=(0.95, 0.99)"
        )
    for i, beta in enumerate(value):
        decay_rate(f"{name}[{i}]", beta)


def floating_or_none(name: str, value: torch.dtype | None) -> None:
    """None or a floating point dtype."""
    if value is not None and not (
        isinstance(value, torch.dtype) and value.is_floating_point
    ):
        raise ValueError(
            f"got {name}={value}, expected a floating point type or None: pass e.g. "
            "torch.float32"
        )


def true_or_false(name: str, value: bool) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(
            f"got {name}={value!r}, expected True or False: pass one of the two"
        )


def count_or_none(name: str, value: int | None) -> None:
    """None or a whole number >= 1."""
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or value < 1
    ):
        raise ValueError(
            f"got {name}={value!r}, expected None or a whole number >= 1: None "
            "switches it off"
        )


def count(name: str, value: int) -> None:
    """A whole number >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"got {name}={value!r}, expected a whole number >= 1: pass one"
        )


def none_or(check: Callable[[str, Number], None]) -> Callable[..., None]:
    """Return a check that takes None too."""
    return lambda name, value: None if value is None else check(name, value)


def one_of(values: tuple[object, ...]) -> Callable[[str, object], None]:
    """Return a check for one of these values."""

    def check(name: str, value: object) -> None:
        if value not in values:
            raise ValueError(
                f"got {name}={value!r}, expected one of {values}: choose one"
            )

    return check


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return what a misspelt name most likely means, if anything."""
    return next(iter(get_close_matches(name, known, n=1)), None)
