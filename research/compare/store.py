"""The store of a study: a file of JSON lines, each with the name of its study. A line
with "setting" has what the study's runs share, every other line is one run.

Tables and pictures are made of stores alone. Studies of one kind may share a file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from research.compare.study import Result, Run
from train.errors import UserError
from train.files import opened, sync

WHAT = "what this command writes: restore it, or give another --store"


class Store:
    """What was run of one study.

    Args:
        path: of the file, which the first line makes.
        study: whose lines are read and written; other lines stay as they are.

    Raises:
        UserError: a file that is not of this kind.
    """

    def __init__(self, path: Path, study: str) -> None:
        self._path, self._study = path, study
        self.lines: dict[str, Result] = {}
        self.setting: dict[str, Any] = {}
        for line in _lines(path, WHAT):
            self._read(line)
        if self.lines and not self.setting:
            raise UserError(
                f"got runs of {study} in {path} without their setting, expected {WHAT}"
            )

    def _read(self, line: Any) -> None:
        """Take in a line of this study: of two settings the later one holds."""
        try:
            line = dict(line)
            if line.pop("study") != self._study:
                return
            if "setting" in line:
                self.setting = _setting(line["setting"])
            else:
                self.lines[_key(line)] = line
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise _unread(self._path, WHAT, error) from error

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
                    f"got {key}={mine[key]!r} where {self._study} in {self._path} has "
                    f"{known[key]!r}, expected what was compared there: give or "
                    "restore it, or give another --store"
                )
        if not mine.items() <= known.items():
            self.setting |= identity
            self._append(dict(setting=self.setting))

    @property
    def losses(self) -> dict[str, float]:
        """Return the final losses, inf of what diverged."""
        return {key: final(line) for key, line in self.lines.items()}

    def add(self, run: Run, found: Result) -> None:
        """Keep what a run showed, on the disk."""
        line = dict(recipe=dict(run.recipe), seed=run.seed, **found)
        self._append(line)
        self.lines[run.key] = line

    def _append(self, line: dict[str, Any]) -> None:
        content = json.dumps(dict(study=self._study, **line)).encode() + b"\n"
        with self._path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # a line that was cut off
            file.write(content)
            sync(file)


def _lines(path: Path, expected: str) -> list[Any]:
    """Return what is whole of a file: a last line may be cut off."""
    if not path.exists():
        return []
    with opened(path, expected) as file:
        content = file.read()
    try:
        return [json.loads(line) for line in content.split(b"\n")[:-1]]
    except (ValueError, RecursionError) as error:
        raise _unread(path, expected, error) from error


def _unread(path: Path, expected: str, error: Exception) -> UserError:
    return UserError(
        f"got {path} that does not read ({type(error).__name__}: {error}), expected "
        f"{expected}"
    )


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return {"name": value} and, of what is a dict, {"name option": value}."""
    found = {}
    for key, value in values.items():
        inner = value if isinstance(value, dict) else {"": value}
        found |= {f"{key} {name}".strip(): v for name, v in inner.items()}
    return found


def _setting(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict) or not found:
        raise ValueError("no table of what runs share")
    return found


def _key(line: Any) -> str:
    """Return the key of a line's run; raise ValueError for a line of none."""
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
    return Run(line["recipe"], line["seed"]).key


def is_number(value: Any) -> bool:
    """Return whether JSON's value is a number, and finite."""
    return type(value) in (int, float) and math.isfinite(value)


def final(line: Result) -> float:
    """Return a run's last held-out loss, nats a token; inf where it diverged."""
    loss = line["curve"][-1][1]
    return math.inf if loss is None else float(loss)
