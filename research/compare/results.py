"""What a study found, as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, stdev
from typing import Any

from research.compare.search import Found
from research.compare.store import Store, final
from research.compare.study import Study

LEADS, AHEAD = 2.5, 1.0  # standard errors of a difference
NUM_TRIED = 5  # draws of one who tries a method a few times
NOT_OF_A_STEP = ("recipe", "seed", "curve", "wall")  # of a run's line


@dataclass(frozen=True)
class Entry:
    """A method whose search has ended, at its best point."""

    title: str
    control: str
    values: Mapping[str, float]  # of its axes
    found: Found
    inside: float  # see ``Found.inside``
    by_seed: Mapping[int, float]  # final losses of the seeds that did not choose
    num_missing: int  # seeds not run yet
    num_draws: int
    step: Mapping[str, Any]  # what a run noted of its steps

    @property
    def losses(self) -> list[float]:
        """Return the final losses."""
        return list(self.by_seed.values())

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


def entries(study: Study, store: Store) -> list[Entry]:
    """Return all methods with a run that counts, best first."""
    made = []
    for title, method in study.methods.items():
        found = study.search(title, store.losses)
        if found.wanted or found.losses[found.best] == math.inf:
            continue
        runs = study.seeds(title, found)
        lines = {
            run.seed: store.lines[run.key] for run in runs if run.key in store.lines
        }
        if not lines:
            continue
        names = [axis.name for axis in method.axes]
        entry = Entry(
            title=title,
            control=study.control_of(title),
            values=dict(zip(names, found.best, strict=True)),
            found=found,
            inside=found.inside(method.axes),
            by_seed={seed: final(line) for seed, line in lines.items()},
            num_missing=len(runs) - len(lines),
            num_draws=min(study.num_draws, study.trials_of(title)),
            step={
                key: value
                for key, value in next(iter(lines.values())).items()
                if key not in NOT_OF_A_STEP
            },
        )
        made.append(entry)
    return sorted(made, key=lambda entry: entry.mean)


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
    z: float | None  # the same in standard errors, from sigma
    own_z: float | None  # the same, from these two methods' deviations
    paired: tuple[float, float] | None
    """Mean of the differences of a seed, and its standard error, over shared seeds."""
    wins: float | None
    """Share of all sets of five draws whose best is better than the control's of the
    same draws."""
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
        difference = z = own_z = paired = None
        if math.isfinite(entry.mean) and math.isfinite(control.mean):
            difference = entry.mean - control.mean
            n, m = len(entry.losses), len(control.losses)
            z = difference / (sigma * math.sqrt(1 / n + 1 / m)) if sigma else None
            if min(n, m) > 1:
                errors = (
                    stdev(e.losses) ** 2 / len(e.losses) for e in (entry, control)
                )
                own_z = difference / (math.sqrt(sum(errors)) or math.inf)
            paired = _paired(entry.by_seed, control.by_seed)
        wins = _wins(entry.draws, control.draws)
        missing = bool(entry.num_missing or control.num_missing)
        table.append(Row(entry, difference, z, own_z, paired, wins, missing))
    return table


def _paired(
    losses: Mapping[int, float], others: Mapping[int, float]
) -> tuple[float, float] | None:
    differences = [losses[seed] - others[seed] for seed in losses if seed in others]
    num = len(differences)
    return (mean(differences), stdev(differences) / math.sqrt(num)) if num > 1 else None


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
            own_z=known(row.own_z),
            paired=row.paired,
            verdict=row.verdict,
            step=dict(e.step),
        )
    own = dict(title=study.title, setting=store.setting, noise=noise(found))
    return own | dict(methods=methods)
