"""Which points of a method are tried: random draws from the space of its axes, then a
compass search around the best of them, the same number for every method.

Pure: nothing here trains or reads files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

DIGITS = 4  # to which values are rounded: what prints alike is one point
SAME = 0.02  # of a step: values so near are one
AROUND = (0, -1, 1)  # steps from a start to the first draws

Point = tuple[float, ...]  # a value on each axis
Loss = Callable[[Point], float | None]  # final; inf = diverged, None = not run


@dataclass(frozen=True)
class Axis:
    """A number to be searched.

    Args:
        name: of the option, or "beta1", the first of betas.
        low, high: of the space that draws come from, uniform in the logarithm; the
            search goes beyond them.
        decay: whether it is a decay such as beta1, which is searched by 1 - beta.
        factor: between neighbours before steps are halved.
        start: value of the first draw, of which the second and third are the
            neighbours below and above; None = drawn as the others.
    """

    name: str
    low: float
    high: float
    decay: bool = False
    factor: float = 2.0
    start: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < (1 if self.decay else math.inf):
            raise ValueError(
                f"got axis {self.name} from {self.low} to {self.high}, expected two "
                "positive numbers that ascend, of a decay below 1: change them"
            )
        if self.factor <= 1:
            raise ValueError(
                f"got axis {self.name} with a factor of {self.factor}, expected more "
                "than 1: change it"
            )

    def place(self, value: float) -> float:
        """Return where a value stands, in steps."""
        number = 1 / (1 - value) if self.decay else value
        return math.log(number) / math.log(self.factor)

    def value(self, place: float) -> float:
        """Return the value that stands there, rounded."""
        number = self.factor**place
        if self.decay:
            return 1 - float(f"{1 / number:.{DIGITS}g}")
        return float(f"{number:.{DIGITS}g}")

    def drawn(self, number: int) -> float:
        """Return the value of a draw: by name and number, so that methods share it."""
        if number < len(AROUND) and self.start is not None:
            moved = self.moved(self.start, AROUND[number])
            return self.start if moved is None else moved
        digest = hashlib.sha256(f"{self.name}/{number}".encode()).digest()
        share = int.from_bytes(digest[:8], "big") / 2**64
        low, high = self.place(self.low), self.place(self.high)
        return self.value(low + share * (high - low))

    def moved(self, value: float, steps: float) -> float | None:
        """Return the value so many steps from one; None where there is none."""
        place = self.place(value) + steps
        return None if self.decay and place < 0 else self.value(place)


def draws(axes: Sequence[Axis], num: int) -> list[Point]:
    """Return the points of the space that come first."""
    return [tuple(axis.drawn(i) for axis in axes) for i in range(num)]


def neighbours(axes: Sequence[Axis], point: Point, step: float) -> list[Point]:
    """Return the points one step from this one along each axis, down and up."""
    found = []
    for i, axis in enumerate(axes):
        for sign in (-1, 1):
            value = axis.moved(point[i], sign * step)
            if value is not None:
                found.append((*point[:i], value, *point[i + 1 :]))
    return found


def _apart(axes: Sequence[Axis], a: Point, b: Point) -> list[float]:
    """Return the steps from a point to another along each axis."""
    pairs = zip(axes, a, b, strict=True)
    return [axis.place(y) - axis.place(x) for axis, x, y in pairs]


def _is_same(axes: Sequence[Axis], a: Point, b: Point) -> bool:
    return all(abs(steps) < SAME for steps in _apart(axes, a, b))


@dataclass(frozen=True)
class Found:
    """How far a search is.

    Args:
        losses: of the points that it tried, in its order.
        wanted: points that it tries next, at once; none = it has ended.
    """

    losses: dict[Point, float]
    wanted: list[Point]

    @property
    def best(self) -> Point:
        """Return the point of the lowest loss, of equals the first."""
        return min(self.losses, key=lambda point: self.losses[point])

    def inside(self, axes: Sequence[Axis]) -> float:
        """Return within how many steps of the best point there are others, to both
        sides along every axis, of those within a step of it along the rest; inf = it
        stands at an edge of what was tried.
        """
        apart = [_apart(axes, self.best, point) for point in self.losses]
        farthest = 0.0
        for i, sign in product(range(len(axes)), (-1, 1)):
            steps = [
                sign * own[i]
                for own in apart
                if sign * own[i] > SAME
                and all(abs(other) < 1 + SAME for other in (*own[:i], *own[i + 1 :]))
            ]
            farthest = max(farthest, min(steps, default=math.inf))
        return farthest


def search(
    axes: Sequence[Axis],
    loss: Loss,
    *,
    trials: int,
    num_draws: int,
    halve: bool = True,
) -> Found:
    """Return how far a search is that takes ``trials`` points, ``num_draws`` of them
    drawn; without ``halve`` it ends earlier, where all neighbours of a point are worse.

    It goes in rounds: the draws; then the neighbours of the best point so far, a step
    away along each axis; where none of them is better, the step is halved. So it takes
    one path whatever the order in which runs end, and a call that was ended is
    continued by the same losses.
    """
    tried: dict[Point, float] = {}
    points = draws(axes, min(num_draws, trials))
    step, around = 1.0, None
    while True:
        known = {point: loss(point) for point in points}
        missing = [point for point, found in known.items() if found is None]
        tried |= {p: found for p, found in known.items() if found is not None}
        if missing or len(tried) >= trials or step < 2 * SAME:
            return Found(tried, missing)
        best = min(tried, key=lambda point: tried[point])
        if best == around:  # all its neighbours are worse
            if not halve:
                return Found(tried, [])
            step /= 2
        around = best
        points = [
            point
            for point in neighbours(axes, best, step)
            if not any(_is_same(axes, point, other) for other in tried)
        ][: trials - len(tried)]
