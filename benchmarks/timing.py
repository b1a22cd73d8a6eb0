"""Steps that take turns, and how their times are summed up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from marsopt.profiling.machine import nothing

T = TypeVar("T")


def take_turns(
    steps: Mapping[str, Callable[[], T]],
    num_rounds: int,
    before_round: Callable[[], object] = nothing,
) -> dict[str, list[T]]:
    """Call every step once a round, and return what each returned. Each round begins
    with another one, so that what a step leaves behind falls on all others alike.
    """
    names, found = list(steps), {name: [] for name in steps}
    for number in range(num_rounds):
        before_round()
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(steps[name]())
    return found


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """Return that of at least two values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)
