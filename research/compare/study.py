"""What a study consists of: how runs go, methods, how many trials each of them has."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import signature
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

from research.compare.search import Axis, Found, Point, draws, search
from train.engine.recipes import load
from train.errors import UserError

MODULE = "research.studies"
Result = dict[str, Any]  # of a run: "curve" [[step, loss]], "wall" seconds, and others


@dataclass(frozen=True)
class Method:
    """An optimizer, and what of it is searched.

    Args:
        recipe: its options, as the study's setting takes them.
        axes: of the search, whose values are options too; none = the recipe as it is.
        num_seeds: of the runs at the best point, 1 and on, without the search's; 0 = a
            search alone.
        search_seeds: by whose mean loss its search goes; None = the study's.
        control: title of the method that it is compared with; None = the study's first.
    """

    recipe: Mapping[str, Any]
    axes: tuple[Axis, ...] = ()
    num_seeds: int = 3
    control: str | None = None
    search_seeds: tuple[int, ...] | None = None

    def at(self, point: Point) -> dict[str, Any]:
        """Return the recipe of a point."""
        names = [axis.name for axis in self.axes]
        return dict(self.recipe) | dict(zip(names, point, strict=True))


@dataclass(frozen=True)
class Run:
    """A recipe trained from a seed."""

    recipe: Mapping[str, Any]
    seed: int

    @property
    def key(self) -> str:
        """Return what tells it from others of its setting."""
        return json.dumps([self.recipe, self.seed], sort_keys=True)


class Setting(Protocol):
    """How runs of a study go, all alike: ``research.compare.plain``, ``.images`` and
    ``.recipes`` have one each, dataclasses that JSON can hold.
    """

    steps: int
    keeps: ClassVar[bool]  # whether a run's folder stays once its result is stored
    unit: ClassVar[str]  # of which the loss is a mean: token, image

    def check(self, recipes: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise UserError where a setting, or a title's recipe, cannot be run."""

    def identity(self) -> dict[str, Any]:
        """Return what two calls must agree on, by name; after ``check``."""

    def command(self, run: Run, folder: Path) -> tuple[str, list[str]]:
        """Return the module and the arguments that train a run in a folder."""

    def found(self, folder: Path) -> Result | None:
        """Return what the run in a folder showed; None before its end."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Methods in one setting.

    Args:
        title: what is trained, in words, for its table and pictures.
        setting: how runs go.
        methods: by title; the first is the control of those that name none.
        trials: points that the search of every method with axes tries.
        num_draws: of them that are drawn.
        search_seeds: by whose mean loss a search goes; two choose better than one.
        halve: whether a search goes on with half its steps where none is better.
    """

    title: str
    setting: Setting
    methods: Mapping[str, Method]
    trials: int = 1
    num_draws: int = 1
    search_seeds: tuple[int, ...] = (0,)
    halve: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_draws <= self.trials:
            raise ValueError(
                f"got num_draws={self.num_draws} of trials={self.trials}, expected at "
                "least one, and no more than all: change them"
            )
        if not self.methods:
            raise ValueError("got a study without methods, expected some: add them")
        for title, method in self.methods.items():
            if method.num_seeds < 0:
                raise ValueError(
                    f"got {title} with num_seeds={method.num_seeds}, expected none or "
                    "more: change it"
                )
            if method.control not in (None, *self.methods):
                raise ValueError(
                    f"got {title} with control={method.control!r}, expected the title "
                    f"of another method ({', '.join(self.methods)}): name one"
                )

    def first(self, title: str) -> dict[str, Any]:
        """Return the recipe of the first point that a method tries."""
        method = self.methods[title]
        return method.at(draws(method.axes, 1)[0])

    def trials_of(self, title: str) -> int:
        """Return how many trials a method has."""
        return self.trials if self.methods[title].axes else 0

    def control_of(self, title: str) -> str:
        """Return the title of the method that one is compared with."""
        return self.methods[title].control or next(iter(self.methods))

    def search(self, title: str, losses: Mapping[str, float]) -> Found:
        """Return how far the search of a method is, by final losses of runs."""
        method = self.methods[title]

        def loss(point: Point) -> float | None:
            runs = [losses.get(run.key) for run in self._trial(title, point)]
            return None if None in runs else sum(runs) / len(runs)

        if not method.axes:
            return Found({(): math.nan}, [])
        own = dict(trials=self.trials, num_draws=self.num_draws, halve=self.halve)
        return search(method.axes, loss, **own)

    def _trial(self, title: str, point: Point) -> list[Run]:
        """Return the runs by which a point is tried."""
        method = self.methods[title]
        seeds = method.search_seeds or self.search_seeds
        return [Run(method.at(point), seed) for seed in seeds]

    def seeds(self, title: str, found: Found) -> list[Run]:
        """Return the runs by which a method is judged, at the best point."""
        method = self.methods[title]
        best, unseen = method.at(found.best), count(1)
        seeds = (seed for seed in unseen if seed not in self.search_seeds)
        return [Run(best, seed) for seed in islice(seeds, method.num_seeds)]

    def wanted(self, title: str, losses: Mapping[str, float]) -> list[Run]:
        """Return the runs of a method that can be started now."""
        found = self.search(title, losses)
        if found.wanted:
            runs = [run for p in found.wanted for run in self._trial(title, p)]
            return [run for run in runs if run.key not in losses]
        return [run for run in self.seeds(title, found) if run.key not in losses]

    def num_left(self, title: str, losses: Mapping[str, float]) -> int:
        """Return how many runs a method still needs."""
        found = self.search(title, losses)
        if found.wanted:
            trials = self.trials_of(title) - len(found.losses) - len(found.wanted)
            method = self.methods[title]
            trials *= len(method.search_seeds or self.search_seeds)
            return len(self.wanted(title, losses)) + trials + method.num_seeds
        return len(self.wanted(title, losses))


def named(name: str, module: str = MODULE) -> Study:
    """Return the study of a function that a module's ``__all__`` names.

    Raises:
        UserError: there is none.
    """
    home = load(module)
    made = getattr(home, name) if name in home.__all__ else None
    try:
        found = made() if callable(made) and _takes_nothing(made) else None
    except ValueError as error:  # of an axis, or of the study
        raise UserError(f"{name}: {error}") from error
    if not isinstance(found, Study):
        raise UserError(
            f"got study {name!r}, expected one of the functions of {module} that return"
            f" a Study: {', '.join(home.__all__)}"
        )
    return found


def _takes_nothing(function: Callable) -> bool:
    try:
        signature(function).bind()
    except (TypeError, ValueError):  # it asks for more, or does not say
        return False
    return True


def changed(study: Study, values: Mapping[str, Any]) -> Study:
    """Return a study with other values of its fields, of its setting's, or of
    ``num_seeds`` of all methods.

    Raises:
        UserError: nothing of this name, or a value that is none.
    """
    own = dict(trials=study.trials, num_draws=study.num_draws, num_seeds=1)
    setting = {
        field.name: getattr(study.setting, field.name)
        for field in fields(study.setting)
    }
    try:
        for name, value in values.items():
            known = own if name in own else setting
            known[name] = _like(known[name], value)
        methods = study.methods
        if "num_seeds" in values:
            methods = {
                title: replace(method, num_seeds=own["num_seeds"])
                for title, method in methods.items()
            }
        own.pop("num_seeds")
        return replace(
            study, setting=replace(study.setting, **setting), methods=methods, **own
        )
    except (KeyError, TypeError, ValueError) as error:
        told = " ".join(f"{name}={value}" for name, value in values.items())
        raise UserError(
            f"got --set {told} ({type(error).__name__}: {error}), expected values of "
            f"{', '.join([*own, *setting])}: change it"
        ) from error


def _like(known: Any, value: Any) -> Any:
    """Return a value, if it can stand for the known one."""
    kinds = type(known), type(value)
    others = ((float, int), (tuple, list), (type(None), int))
    if kinds[0] is not kinds[1] and kinds not in others:
        raise TypeError(f"expected {type(known).__name__}")
    return value
