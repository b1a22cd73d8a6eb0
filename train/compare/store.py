"""The store of a study, a folder: setting.json, what its runs share, and runs.jsonl, a
line for each run. It is all that tables and pictures are made of.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from train.compare.study import Result, Run
from train.errors import UserError
from train.files import check_file, sync, write_json

WHAT = "what this command writes: restore it, or give another --out"


class Store:
    """What was run in one setting.

    Args:
        folder: of the two files, which the first run makes.

    Raises:
        UserError: a file that is not of this kind.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._shared = folder / "runs.jsonl", folder / "setting.json"
        self.lines: dict[str, Result] = {}
        self.setting: dict[str, Any] = {}
        for path in (self._path, self._shared):
            check_file(path, WHAT)
            try:
                if path.exists():
                    self._read(path.read_bytes())
            except (
                ValueError,
                KeyError,
                TypeError,
                OverflowError,
                RecursionError,
            ) as error:
                raise UserError(
                    f"got {path} that does not read ({type(error).__name__}: {error}),"
                    f" expected {WHAT}"
                ) from error

    def _read(self, content: bytes) -> None:
        """Read setting.json, or runs but for a last line that was cut off."""
        if content.startswith(b"{\n"):
            self.setting = json.loads(content)
            return
        for line in content.split(b"\n")[:-1]:
            run = json.loads(line)
            _check(run)
            self.lines[Run(run["recipe"], run["seed"]).key] = run

    def agree(self, identity: dict[str, Any]) -> None:
        """Note what runs share: what is known of it may not change, and may grow.

        Raises:
            UserError: it is another than that of the runs that are there.
        """
        mine = _flat(json.loads(json.dumps(identity)))
        known = _flat(self.setting)
        for key in sorted(mine.keys() & known.keys()):
            if mine[key] != known[key]:
                raise UserError(
                    f"got {key}={mine[key]!r} where {self._shared} has {known[key]!r}, "
                    "expected what was compared there: give or restore it, or give "
                    "another --out"
                )
        if not mine.items() <= known.items():
            self.setting |= identity
            write_json(self._shared, self.setting)

    @property
    def losses(self) -> dict[str, float]:
        """Return the final losses, inf of what diverged."""
        return {key: final(line) for key, line in self.lines.items()}

    def add(self, run: Run, found: Result) -> None:
        """Keep what a run showed, on the disk."""
        line = dict(recipe=dict(run.recipe), seed=run.seed, **found)
        with self._path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # a line that was cut off
            file.write(json.dumps(line).encode() + b"\n")
            sync(file)
        self.lines[run.key] = line


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return {"name": value} and, of what is a dict, {"name option": value}."""
    found = {}
    for key, value in values.items():
        inner = value if isinstance(value, dict) else {"": value}
        found |= {f"{key} {name}".strip(): v for name, v in inner.items()}
    return found


def _check(line: Any) -> None:
    """Raise ValueError, KeyError or TypeError for what is no line of a run."""
    recipe, seed, curve = (line[key] for key in ("recipe", "seed", "curve"))
    wall = line.get("wall", 0.0)
    right = isinstance(recipe, dict) and is_number(seed) and is_number(wall)
    right &= isinstance(curve, list) and len(curve) > 0
    if not right or min(seed, wall) < 0:
        raise ValueError("a run without recipe, seed, or curve")
    for step, loss in curve:
        if not is_number(step) or step < 1 or not (loss is None or is_number(loss)):
            raise ValueError("a curve that is not of steps and losses")


def is_number(value: Any) -> bool:
    """Return whether JSON's value is a number, and finite."""
    return type(value) in (int, float) and math.isfinite(value)


def final(line: Result) -> float:
    """Return a run's last held-out loss, nats a token; inf where it diverged."""
    loss = line["curve"][-1][1]
    return math.inf if loss is None else float(loss)
