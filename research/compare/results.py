"""What a study found, as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from train.compare import timing
from train.compare.search import Found
from train.compare.store import Store, final
from train.compare.study import Study

LEADS, AHEAD = 2.5, 1.0  # standard errors of a difference
NUM_TRIED = 5  # draws of one who tries a method a few times
NOT_OF_A_STEP = ("recipe", "seed", "curve", "wall")  # of a run's line
FEWEST_POINTS = 8  # of curves that are looked into between their points


@dataclass(frozen=True)
class Curve:
    """Mean held-out losses over seeds, nats a token, at steps."""

    steps: np.ndarray
    losses: np.ndarray

    def reaches(self, loss: float) -> float:
        """Return the first step, between points too, of at most this loss, or inf."""
        below = np.flatnonzero(self.losses <= loss)
        if len(below) == 0:
            return math.inf
        i = int(below[0])
        if i == 0:
            return float(self.steps[0])
        (s0, s1), (l0, l1) = self.steps[i - 1 : i + 1], self.losses[i - 1 : i + 1]
        return float(s0 + (s1 - s0) * (l0 - loss) / (l0 - l1))


@dataclass(frozen=True)
class Entry:
    """A method whose search has ended, at its best point."""

    title: str
    control: str
    values: Mapping[str, float]  # of its axes
    found: Found
    inside: float  # see ``Found.inside``
    losses: list[float]  # final, of the seeds that did not choose
    num_missing: int  # seeds not run yet
    curve: Curve | None
    num_draws: int
    step: Mapping[str, Any]  # what a run noted of its steps
    seconds: float | None  # of a step, methods taking turns

    @property
    def finite(self) -> list[float]:
        """Return the losses of what did not diverge."""
        return [loss for loss in self.losses if math.isfinite(loss)]

    @property
    def mean(self) -> float:
        """Return the mean loss; inf where a seed diverged."""
        return mean(self.losses)

    @property
    def draws(self) -> list[float]:
        """Return the losses of the draws, in their order."""
        return list(self.found.losses.values())[: self.num_draws]


def entries(study: Study, store: Store, folder: Path) -> list[Entry]:
    """Return all methods with a run that counts, best first."""
    seconds, made = timing.read(folder), []
    for title, method in study.methods.items():
        found = study.search(title, store.losses)
        if found.wanted or found.losses[found.best] == math.inf:
            continue
        runs = study.seeds(title, found)
        lines = [store.lines[run.key] for run in runs if run.key in store.lines]
        if not lines:
            continue
        names = [axis.name for axis in method.axes]
        curves = [line["curve"] for line in lines if math.isfinite(final(line))]
        entry = Entry(
            title=title,
            control=study.control_of(title),
            values=dict(zip(names, found.best, strict=True)),
            found=found,
            inside=found.inside(method.axes),
            losses=[final(line) for line in lines],
            num_missing=len(runs) - len(lines),
            curve=_curve(curves),
            num_draws=min(study.num_draws, study.trials_of(title)),
            step={k: v for k, v in lines[0].items() if k not in NOT_OF_A_STEP},
            seconds=seconds.get(title),
        )
        made.append(entry)
    return sorted(made, key=lambda entry: entry.mean)


def _curve(curves: Sequence[Sequence[Sequence[float]]]) -> Curve | None:
    if not curves or len(curves[0]) < FEWEST_POINTS:
        return None
    losses = np.array([[loss for _, loss in points] for points in curves], float)
    return Curve(np.array([step for step, _ in curves[0]]), losses.mean(0))


def noise(found: Sequence[Entry]) -> float | None:
    """Return sigma: the standard deviation over seeds, pooled over methods; None where
    no method has two.
    """
    groups = [entry.finite for entry in found if len(entry.finite) > 1]
    free = sum(len(own) - 1 for own in groups)
    squares = sum((len(own) - 1) * stdev(own) ** 2 for own in groups)
    return math.sqrt(squares / free) if free else None


@dataclass(frozen=True)
class Row:
    """One entry beside its control; None where something is not there."""

    entry: Entry
    difference: float | None  # of mean losses; below 0 = better
    z: float | None  # the same in standard errors
    wins: float | None
    """Share of all sets of five draws whose best is better than the control's of the
    same draws."""
    tokens: float | None
    """Tokens until the control's final loss, of what the control took; inf = never."""
    seconds: float | None  # of a step, of the control's
    is_provisional: bool = False  # seeds are missing, its own or the control's

    @property
    def verdict(self) -> str:
        """Say what the difference shows."""
        if self.z is None:
            return ""
        size = abs(self.z)
        side = ("leads", "ahead") if self.z < 0 else ("behind", "behind")
        said = side[0] if size >= LEADS else f"{side[1]}, not shown"
        said = "tie" if size < AHEAD else said
        return f"{said} so far" if self.is_provisional else said


def rows(found: Sequence[Entry]) -> list[Row]:
    """Return the table, in the order of the entries."""
    by_title = {entry.title: entry for entry in found}
    sigma, table = noise(found), []
    for entry in found:
        control = by_title.get(entry.control)
        if control is None or control is entry:
            table.append(Row(entry, None, None, None, None, None))
            continue
        difference = z = tokens = None
        if math.isfinite(entry.mean) and math.isfinite(control.mean):
            difference = entry.mean - control.mean
            n, m = len(entry.losses), len(control.losses)
            z = difference / (sigma * math.sqrt(1 / n + 1 / m)) if sigma else None
        if entry.curve and control.curve and math.isfinite(control.mean):
            tokens = entry.curve.reaches(control.mean) / control.curve.steps[-1]
        own, other = entry.seconds, control.seconds
        seconds = own / other if own and other else None
        wins = _wins(entry.draws, control.draws)
        missing = bool(entry.num_missing or control.num_missing)
        table.append(Row(entry, difference, z, wins, tokens, seconds, missing))
    return table


def _wins(mine: Sequence[float], theirs: Sequence[float]) -> float | None:
    if min(len(mine), len(theirs)) < NUM_TRIED:
        return None
    every = list(combinations(range(min(len(mine), len(theirs))), NUM_TRIED))
    better = [
        min(mine[i] for i in chosen) < min(theirs[i] for i in chosen)
        for chosen in every
    ]
    return mean(better)


def as_json(
    study: Study, store: Store, found: Sequence[Entry], table: Sequence[Row]
) -> dict[str, Any]:
    """Return everything, for other programs; what is not finite as null."""

    def known(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    methods = {}
    for row in table:
        e = row.entry
        methods[e.title] = dict(
            values=dict(e.values),
            control=e.control,
            losses=[known(loss) for loss in e.losses],
            mean=known(e.mean),
            difference=known(row.difference),
            z=known(row.z),
            verdict=row.verdict,
            wins=row.wins,
            tokens=known(row.tokens),
            seconds=e.seconds,
            step=dict(e.step),
            inside=known(e.inside),
            trials=[
                dict(zip(e.values, point, strict=True)) | dict(loss=known(loss))
                for point, loss in e.found.losses.items()
                if point
            ],
        )
    own = dict(title=study.title, setting=store.setting, noise=noise(found))
    return own | dict(methods=methods)
