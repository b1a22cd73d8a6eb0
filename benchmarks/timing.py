"""Wall time of steps that take turns, and how times are summed up."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


def nothing() -> None:
    """No barrier."""


def seconds(
    step: Callable[[], object],
    *,
    before: Callable[[], object] = nothing,
    after: Callable[[], object] = nothing,
) -> float:
    """Wall time of one call, without Python's garbage collector.

    Args:
        step: what is timed.
        before: a barrier or synchronisation ahead of the clock's start, not timed.
        after: what has to be over before the clock stops, timed.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        before()
        start = time.perf_counter()
        step()
        after()
        return time.perf_counter() - start
    finally:
        if collecting:
            gc.enable()


def take_turns(
    steps: Mapping[str, Callable[[], float]],
    num_rounds: int,
    before_round: Callable[[], object] = nothing,
) -> dict[str, list[float]]:
    """Every step once a round; each round begins with another one, so that what a step
    leaves behind in caches falls on all others alike.

    Args:
        steps: name to a function that takes one step and returns its seconds.
        num_rounds: calls of each.
        before_round: called ahead of each round.
    """
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds):
        before_round()
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(steps[name]())
    return times


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """Of at least two values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)
