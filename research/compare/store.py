"""The store of a study, a folder: setting.json, what its runs share, and runs.jsonl, a
line for each run. It is all that tables and pictures are made of.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from research.compare.study import Result, Run
from train.errors import UserError
from train.files import check_file, growing, opened, sync, write_json

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
        for path, read in (self._shared, self._setting), (self._path, self._runs):
            check_file(path, WHAT)
            try:
                if path.exists():
                    with opened(path, WHAT) as file:
                        read(file.read())
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                raise UserError(
                    f"got {path} that does not read ({type(error).__name__}: {error}),"
                    f" expected {WHAT}"
                ) from error
        if self.lines and not self.setting:
            raise UserError(
                f"got {self._path} without {self._shared.name}, expected {WHAT}"
            )

    def _setting(self, content: bytes) -> None:
        found = json.loads(content)
        if not isinstance(found, dict) or not found:
            raise ValueError("no table of what runs share")
        self.setting = found

    def _runs(self, content: bytes) -> None:
        """Read what is whole of it: a last line may be cut off."""
        for line in content.split(b"\n")[:-1]:
            run = _checked(json.loads(line))
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
        with growing(self._path, "a+b") as file:
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


def _checked(line: Any) -> Result:
    """Return a line of a run; raise ValueError for what is none."""
    if not isinstance(line, dict) or not {"recipe", "seed", "curve"} <= line.keys():
        raise ValueError("a run without recipe, seed, or curve")
    numbers = (line["seed"], line.get("wall", 0.0))
    curve = line["curve"]
    right = isinstance(line["recipe"], dict) and isinstance(curve, list) and curve
    if not right or not all(is_number(value) and value >= 0 for value in numbers):
        raise ValueError("a recipe, seed or curve that is none")
    for point in curve:
        right = isinstance(point, list) and len(point) == 2
        right = right and is_number(point[0]) and point[0] >= 1
        if not right or not (point[1] is None or is_number(point[1])):
            raise ValueError("a curve that is not of steps and losses")
    return line


def is_number(value: Any) -> bool:
    """Return whether JSON's value is a number, and finite."""
    return type(value) in (int, float) and math.isfinite(value)


def final(line: Result) -> float:
    """Return a run's last held-out loss, nats a token; inf where it diverged."""
    loss = line["curve"][-1][1]
    return math.inf if loss is None else float(loss)
