"""What a study found: numbers, and the table that is printed and saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from research.compare.search import Found
from research.compare.store import Store, final
from research.compare.study import Study
from train.errors import counted

LEADS, AHEAD = 2.5, 1.0  # standard errors of a difference
NOT_OF_A_STEP = ("recipe", "seed", "curve", "wall")  # of a run's line
HEAD = (
    "| method | at | trials | loss | seeds | to its control | z | | own z | paired |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


READ = (
    "Loss: held out, nats {}, at the last step, mean (and range) over seeds that "
    "the search did not see. Inside: within so many steps, "
    "factors of two, there are worse points on both sides along every axis. z: the "
    "difference to the control in standard errors, from sigma, the deviation over "
    f"seeds, pooled over methods; leads: {LEADS} and more; not significant: {AHEAD} to "
    f"{LEADS}. Own z: from the deviations of these two methods alone, by which nothing "
    "is decided. Paired: mean and standard error of the differences of seeds that both "
    "have."
)


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
    is_provisional: bool = False  # seeds are missing, its own or the control's

    @property
    def verdict(self) -> str:
        """Say what the difference shows."""
        if self.z is None:
            return ""
        size = abs(self.z)
        side = ("leads", "ahead") if self.z < 0 else ("behind", "behind")
        said = side[0] if size >= LEADS else f"{side[1]}, not significant"
        said = "tie" if size < AHEAD else said
        return f"{said} so far" if self.is_provisional else said


def rows(found: Sequence[Entry]) -> list[Row]:
    """Return the table, in the order of the entries."""
    by_title = {entry.title: entry for entry in found}
    sigma, table = noise(found), []
    for entry in found:
        control = by_title.get(entry.control)
        if control is None or control is entry:
            table.append(Row(entry, None, None, None, None))
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
        missing = bool(entry.num_missing or control.num_missing)
        table.append(Row(entry, difference, z, own_z, paired, missing))
    return table


def _paired(
    losses: Mapping[int, float], others: Mapping[int, float]
) -> tuple[float, float] | None:
    differences = [losses[seed] - others[seed] for seed in losses if seed in others]
    num = len(differences)
    return (mean(differences), stdev(differences) / math.sqrt(num)) if num > 1 else None


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


# ---- as a table ----------------------------------------------------------------------


def _trials(e: Entry) -> str:
    """Say how many trials there were, and how near the worse neighbours are."""
    if not e.values:
        return "0"
    said, inside = str(len(e.found.losses)), e.inside
    where = f"inside {inside:.2g} steps" if inside < math.inf else "at an edge"
    return f"{said}, {where}"


def _loss(e: Entry) -> str:
    if not math.isfinite(e.mean):
        return f"{len(e.losses) - len(e.finite)} diverged"
    low, high = min(e.losses), max(e.losses)
    return f"{e.mean:.4f}" + (f" ({low:.3f} to {high:.3f})" if high > low else "")


def _form(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _line(row: Row) -> str:
    e = row.entry
    at = ", ".join(f"{name} {value:.4g}" for name, value in e.values.items())
    seeds = str(len(e.losses))
    if e.num_missing:
        seeds += f" of {len(e.losses) + e.num_missing}"
    cells = [e.title, at, _trials(e), _loss(e), seeds]
    cells.append(
        "control" if e.control == e.title else _form(row.difference, "{:+.4f}")
    )
    paired = "" if row.paired is None else "{:+.4f} ± {:.4f}".format(*row.paired)
    cells += [_form(row.z, "{:+.1f}"), row.verdict, _form(row.own_z, "{:+.1f}"), paired]
    return f"| {' | '.join(cells)} |"


def markdown(study: Study, store: Store, found: list[Entry], table: list[Row]) -> str:
    """Return the table, and how to read it."""
    sigma, unit = noise(found), study.setting.unit
    scatter = "no two seeds" if sigma is None else f"sigma {sigma:.4f}"
    lines = [
        f"{study.title}: {store.setting['steps']:,} steps; searches of "
        f"{counted(study.trials, 'trial')}, {study.num_draws} of them drawn, by "
        f"{counted(len(study.search_seeds), 'seed')}; {scatter}.",
        "",
        HEAD,
        *map(_line, table),
        "",
        READ.format("an image" if unit == "image" else f"a {unit}"),
    ]
    missing = [t for t in study.methods if t not in {e.title for e in found}]
    if missing:
        lines.append(f"Not here, since not run to an end: {'; '.join(missing)}.")
    return "\n".join(lines) + "\n"
