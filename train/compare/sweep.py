"""Which runs a comparison still needs: a search over rates and other options of the
optimizer, along one of them at a time, then seeds.

Pure: nothing here trains or reads files.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from typing import Literal, Self

FACTOR = 2.0  # between neighbouring rates of the default grid, and of a widened one
MOST_SEEDS = 1000
WIDEST = 6  # values that an axis may gain; then its edge is reported instead


@dataclass(frozen=True, order=True)
class Run:
    """One training: a recipe with its options, CONFIG[:OPTION=VALUE...], at a learning
    rate, its weights and data of one seed.
    """

    config: str
    lr: float
    seed: int

    @property
    def path(self) -> str:
        """Return its folder below the comparison's runs."""
        return f"{self.config}/lr-{self.lr:g}/seed-{self.seed}"

    def __str__(self) -> str:
        return f"{self.config} lr {self.lr:g} seed {self.seed}"


Losses = Mapping[Run, float]  # final ones; inf = diverged
Point = tuple[str, ...]  # a value on each axis of a sweep


def rounded(lr: float) -> float:
    """Round to six digits: rates that print alike are one rate."""
    return float(f"{lr:.6g}")


def default_grid(lr: float) -> tuple[float, ...]:
    """Return the rates around a recipe's."""
    return tuple(rounded(lr * factor) for factor in (1 / FACTOR, 1.0, FACTOR))


def _number(value: str) -> float:
    """Return the number that a value is, nan where it is a word."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def _is_number(value: str) -> bool:
    return 0 <= _number(value) < math.inf


def _is_decay(value: str) -> bool:
    return 0 <= _number(value) < 1


@dataclass(frozen=True)
class Axis:
    """What a sweep varies: the rate, an option, or one of an option's numbers.

    ``values`` are those listed, as text and in order; ``start`` is one of them. A
    single value stays. "rates" widen by FACTOR, "numbers" by the ratio of the two
    listed at the edge, "decays", the first of betas, by FACTOR in 1 - beta, "words"
    do not.
    """

    option: str
    kind: Literal["rates", "numbers", "decays", "words"]
    values: tuple[str, ...]
    start: str

    @classmethod
    def of(cls, option: str, kind: str, listed: Sequence[str], own: str) -> Self:
        """Return the axis of these values, which starts at the recipe's own one, else
        at the nearest number, or the first word.
        """
        axis = cls(option, kind, tuple(listed), listed[0])
        values = tuple(axis.ordered(listed))
        start = own if own in values else values[0]
        if kind != "words" and axis.holds(own):
            start = min(values, key=lambda v: abs(axis.place(v) - axis.place(own)))
        return replace(axis, values=values, start=start)

    def holds(self, value: str) -> bool:
        """Return whether a value can stand on this axis."""
        if self.kind == "decays":
            return _is_decay(value)
        return self.kind == "words" or _is_number(value)

    def place(self, value: str) -> float:
        """Return where a number stands: its logarithm, or that of 1 / (1 - beta)."""
        if self.kind == "decays":
            return -math.log1p(-float(value))
        return math.log(max(float(value), 1e-300))

    def ordered(self, values: Iterable[str]) -> list[str]:
        """Return each value once: numbers ascending, words as they come."""
        unique = list(dict.fromkeys(values))
        return unique if self.kind == "words" else sorted(unique, key=self.place)

    def beyond(self, edge: str, *, up: bool) -> str | None:
        """Return the next number beyond the edge; None where there is none."""
        number, factor = float(edge), FACTOR
        inner, outer = map(float, self.values[-2:] if up else self.values[1::-1])
        if self.kind == "numbers" and inner > 0:
            factor = outer / inner if up else inner / outer if outer else math.inf
        if self.kind == "decays":
            found = 1 - (1 - number) * (1 / factor if up else factor)
        else:
            found = number * factor if up else number / factor
        text = f"{found:.6g}"
        return text if float(text) > 0 and self.holds(text) else None

    def near(
        self, value: str, tried: Iterable[str], on_line: Collection[str]
    ) -> list[str]:
        """Return the values to be tried beside the best one: its neighbours among those
        listed or ``tried`` anywhere, all words; once they are ``on_line``, that is
        tried where all other axes are at their best, one beyond the edge.
        """
        if len(self.values) == 1:
            return []
        values = self.ordered([*self.values, *tried])
        if self.kind == "words":
            return values
        i, last = values.index(value), len(values) - 1
        beside = values[max(0, i - 1) : i + 2]
        done = i in (0, last) and set(beside) <= set(on_line)
        if not done or len(values) >= len(self.values) + WIDEST:
            return beside
        further = self.beyond(value, up=i == last)
        return beside if further is None else [further]


def option_axes(option: str, values: Sequence[str], own: str) -> list[Axis]:
    """Return the axes of an option: a pair such as betas has one for each number, the
    first of which widens.
    """
    rows = [value.split(",") for value in values]
    width = len(rows[0])
    decays = all(len(row) == width and all(map(_is_decay, row)) for row in rows)
    if width > 1 and decays:
        starts = own.split(",") if own.count(",") == width - 1 else rows[0]
        kinds = ["decays", *["words"] * (width - 1)]
        columns = zip(kinds, zip(*rows, strict=True), starts, strict=True)
        return [Axis.of(option, kind, column, start) for kind, column, start in columns]
    kind = "numbers" if all(map(_is_number, values)) else "words"
    return [Axis.of(option, kind, values, own)]


@dataclass(frozen=True)
class Sweep:
    """The search of one recipe, ``config``; the first axis is the rate."""

    config: str
    axes: tuple[Axis, ...]

    @classmethod
    def of(
        cls,
        config: str,
        rates: Sequence[float],
        lr: float,
        options: Mapping[str, Sequence[str]],
        own: Mapping[str, str],
    ) -> Self:
        """Return the sweep over rates and {option: values} of a recipe whose own values
        are ``lr`` and ``own``.
        """
        axes = [Axis.of("lr", "rates", [f"{rate:g}" for rate in rates], f"{lr:g}")]
        for option, values in options.items():
            axes += option_axes(option, values, own[option])
        return cls(config, tuple(axes))

    @property
    def start(self) -> Point:
        """Return the recipe's own values, or what is listed nearest to them."""
        return tuple(axis.start for axis in self.axes)

    def listed(self) -> list[Point]:
        """Return the points with each value listed of an option in turn."""
        numbered = [*enumerate(self.axes)][1:]
        return [_moved(self.start, i, v) for i, axis in numbered for v in axis.values]

    def options(self, point: Point) -> dict[str, str]:
        """Return {option: value} of a point, the rate apart."""
        pairs = zip(self.axes[1:], point[1:], strict=True)
        grouped = groupby(pairs, key=lambda pair: pair[0].option)
        return {option: ",".join(v for _, v in found) for option, found in grouped}

    def run(self, point: Point, seed: int) -> Run:
        """Return the run of a point."""
        written = [f"{key}={value}" for key, value in self.options(point).items()]
        return Run(":".join([self.config, *written]), float(point[0]), seed)

    def point(self, run: Run) -> Point | None:
        """Return the point of a run; None for one of another recipe."""
        rest, *written = run.config.removeprefix(self.config).split(":")
        pairs = [text.partition("=")[::2] for text in written]
        widths = Counter(axis.option for axis in self.axes[1:])
        ours = run.config.startswith(self.config) and not rest
        if not ours or [key for key, _ in pairs] != [*widths]:
            return None
        parts = [v.split(",") if widths[key] > 1 else [v] for key, v in pairs]
        point = (f"{run.lr:g}", *chain.from_iterable(parts))
        if len(point) != len(self.axes):
            return None
        held = all(a.holds(v) for a, v in zip(self.axes, point, strict=True))
        return point if held else None


@dataclass(frozen=True)
class Found:
    """How far a sweep is: ``losses`` of what was tried, in the order of the search, inf
    = diverged, and the points ``wanted`` next.
    """

    sweep: Sweep
    losses: dict[Point, float]
    wanted: list[Point]

    @cached_property
    def best(self) -> Point:
        """Return the point of the lowest loss: of equals that of the smallest rate, of
        these the first that was tried, so that an option without effect stays.
        """
        return min(self.losses, key=lambda p: (self.losses[p], float(p[0])))

    @property
    def loss(self) -> float:
        """Return the lowest loss; inf before the first."""
        return self.losses[self.best] if self.losses else math.inf

    def line(self, i: int) -> dict[str, float]:
        """Return {value: loss} along axis ``i`` through the best point, in order."""
        best = self.best
        found = {p[i]: p for p in self.losses if _moved(p, i, best[i]) == best}
        return {v: self.losses[found[v]] for v in self.sweep.axes[i].ordered(found)}

    @property
    def inside(self) -> dict[str, bool]:
        """Return for each axis that could have an edge whether the best point has a
        worse one on both sides.
        """
        found = {}
        for i, axis in enumerate(self.sweep.axes):
            values = list(self.line(i))
            if len(values) > 1 and axis.kind != "words":
                found[axis.option] = self.best[i] not in (values[0], values[-1])
        return found


def _moved(point: Point, i: int, value: str) -> Point:
    return (*point[:i], value, *point[i + 1 :])


def _wanted(sweep: Sweep, known: dict[Point, float]) -> list[Point]:
    """Return the points that a search which knows these tries next, at once."""
    if not known:
        start = sweep.start
        points = [_moved(start, 0, rate) for rate in sweep.axes[0].values]
        for i, axis in enumerate(sweep.axes[1:], start=1):
            points += [_moved(start, i, v) for v in axis.near(start[i], (), ())]
        return list(dict.fromkeys(points))
    found, points = Found(sweep, known, []), []
    for i, axis in enumerate(sweep.axes):
        if i == 1 and points and math.isinf(found.loss):
            break  # where all diverges nothing is learned of other options
        tried = {point[i] for point in known}
        values = axis.near(found.best[i], tried, found.line(i))
        points += [_moved(found.best, i, value) for value in values]
        points = [point for point in points if point not in known]
    return points


def search(sweep: Sweep, losses: Losses) -> Found:
    """Return how far a sweep is by the runs of seed 0.

    It goes in rounds: first all rates, and the neighbours along every other axis, of
    the recipe's own values; then, as soon as a round is whole, the neighbours of the
    best point so far along every axis, until it has worse ones on both sides. So it
    takes one path whatever the order in which runs end. What else was tried, by
    earlier calls, counts when it would end.
    """
    runs = sorted(run for run in losses if run.seed == 0)
    pairs = [(sweep.point(run), losses[run]) for run in runs]
    tried = {point: loss for point, loss in pairs if point is not None}
    known: dict[Point, float] = {}
    while True:
        wanted = _wanted(sweep, known)
        missing = [point for point in wanted if point not in tried]
        if missing or len(known) == len(tried):
            return Found(sweep, known | tried, missing)
        known |= {point: tried[point] for point in wanted} if wanted else tried


def next_runs(
    sweeps: Iterable[Sweep],
    num_seeds: int,
    losses: Losses,
    failed: Collection[Run] = (),
) -> list[Run]:
    """Return all runs that can be started now, those of sweeps first.

    A recipe with a failed run in its sweep chooses nothing, and waits for the next
    call; so does one that diverges everywhere.
    """
    trials, seeds = [], []
    for sweep in sweeps:
        found = search(sweep, losses)
        trials += [sweep.run(point, 0) for point in found.wanted]
        if not found.wanted and math.isfinite(found.loss):
            seeds += [sweep.run(found.best, seed) for seed in range(1, num_seeds)]
    runs = dict.fromkeys(trials + seeds)
    return [run for run in runs if run not in losses and run not in failed]


def num_to_come(
    sweep: Sweep, num_seeds: int, losses: Losses, failed: Collection[Run] = ()
) -> int:
    """Return the runs that a recipe still needs if its sweep goes no further."""
    mine = len(next_runs([sweep], num_seeds, losses, failed))
    return mine + (num_seeds - 1 if mine and search(sweep, losses).wanted else 0)
