"""A study's table and pictures, printed and saved."""

from __future__ import annotations

import math
from pathlib import Path

from research.compare import plots
from research.compare.results import (
    AHEAD,
    LEADS,
    NUM_TRIED,
    Entry,
    Row,
    as_json,
    entries,
    rows,
)
from research.compare.results import noise as noise_of
from research.compare.store import Store
from research.compare.study import Study
from train.errors import UserError, counted
from train.files import write, write_json

HEAD = (
    "| method | at | trials | loss | seeds | to its control | z | | own z | paired "
    "| of five draws |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


READ = (
    "Loss: held out, nats {}, at the last step, mean (and range) over seeds that "
    "the search did not see. Inside: within so many steps, "
    "factors of two, there are worse points on both sides along every axis. z: the "
    "difference to the control in standard errors, from sigma, the deviation over "
    f"seeds, pooled over methods; leads: {LEADS} and more; not shown: {AHEAD} to "
    f"{LEADS}. Own z: from the deviations of these two methods alone, by which nothing "
    "is decided. Paired: mean and standard error of the differences of seeds that both "
    "have. Of five draws: "
    f"the share of sets of {NUM_TRIED} draws whose best beats the control's best of "
    "the same."
)


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
    cells.append(_form(row.wins, "{:.0%}"))
    return f"| {' | '.join(cells)} |"


def markdown(study: Study, store: Store, found: list[Entry], table: list[Row]) -> str:
    """Return the table, and how to read it."""
    noise, unit = noise_of(found), study.setting.unit
    sigma = "no two seeds" if noise is None else f"sigma {noise:.4f}"
    lines = [
        f"{study.title}: {store.setting['steps']:,} steps; searches of "
        f"{counted(study.trials, 'trial')}, {study.num_draws} of them drawn, by "
        f"{counted(len(study.search_seeds), 'seed')}; {sigma}.",
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


def report(study: Study, store: Store, folder: Path) -> None:
    """Print and save table.md, results.json and the pictures."""
    found = entries(study, store)
    if not found:
        raise UserError(
            f"got no method in {folder} whose search has ended, expected one: leave "
            "out --only to train"
        )
    table = rows(found)
    text = markdown(study, store, found, table)
    write(folder / "table.md", text.encode())
    write_json(folder / "results.json", as_json(study, store, found, table))
    pictures = plots.draw(study, found, folder)
    print(
        f"\n{text}\n"
        f"{'table':9} {folder / 'table.md'}\n"
        f"{'numbers':9} {folder / 'results.json'}\n"
        f"{'pictures':9} {', '.join(str(folder / name) for name in pictures)}",
        flush=True,
    )
