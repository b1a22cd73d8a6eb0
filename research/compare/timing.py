"""Seconds of a step of each method, measured in one quiet process.

python -m train.compare.timing STUDY MODULE OUT CHANGES, as ``train.compare`` calls it.
All trainings live at once and take turns of a few steps, so that what disturbs the
machine for a while disturbs all alike; medians forget the rest.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from marsopt.profiling.machine import seconds
from train.compare.store import Store, is_number
from train.compare.study import Study, changed, named
from train.errors import UserError
from train.files import check_file, opened, write_json

TURN = 20  # steps: one of what happens every ten or twenty is in each
TURNS = 6  # of each method, after one of warm-up
FILE, WHAT = "timing.json", "seconds of steps: measure again, --only timing"


def read(folder: Path) -> dict[str, float]:
    """Return what was measured, by title; nothing where nothing was.

    Raises:
        UserError: a file that is not of this kind.
    """
    path = folder / FILE
    check_file(path, WHAT)
    try:
        found = {}
        if path.exists():
            with opened(path, WHAT) as file:
                found = json.load(file)
        if not all(is_number(value) and value > 0 for value in found.values()):
            raise ValueError("seconds are positive numbers")
    except (ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(
            f"got {path} that does not read ({error}), expected {WHAT}"
        ) from error
    return found


def measure(study: Study, store: Store) -> dict[str, float]:
    """Return the seconds of a step of each method, medians of turns, at its best point
    or, before its search, at the first.
    """
    steps = {}
    for title, method in study.methods.items():
        found = study.search(title, store.losses)
        recipe = method.at(found.best) if found.losses else study.first(title)
        steps[title] = study.setting.stepper(recipe)
    device = getattr(study.setting, "device", "cpu")
    took: dict[str, list[float]] = {title: [] for title in steps}
    for turn in range(TURNS + 1):
        for title, step in steps.items():
            own = seconds(partial(_steps, step), device) / TURN
            took[title] += [own] if turn else []
        print(f"timing: turn {turn} of {TURNS}", flush=True)
    return {title: median(own) for title, own in took.items()}


def _steps(step: Callable[[], object]) -> None:
    for _ in range(TURN):
        step()


def main() -> None:
    """Measure, as a process of its own."""
    name, module, out, overrides = sys.argv[1:]
    study, store = changed(named(name, module), json.loads(overrides)), Store(Path(out))
    study.setting.check({title: study.first(title) for title in study.methods})
    # torchtitan warns of every trainer after the first
    logging.getLogger().setLevel(logging.ERROR)
    write_json(Path(out) / FILE, measure(study, store))


if __name__ == "__main__":
    main()
