"""What a comparison consists of, and how its folder is recognised."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

from pydantic import Field

from marsopt import REGISTRY
from train.compare.sweep import MOST_SEEDS, Run, Sweep, default_grid
from train.engine.launch import parse
from train.engine.resolve import resolve
from train.engine.titan_optim import MarsOptimizers
from train.errors import UserError
from train.files import check_folder, read_json, write_json
from train.runs.settings import SETTINGS, difference, read, settings

LOCK = ".lock"  # held by the call at work in the folder, and its runs
NUM_POINTS = 15  # of each validation curve
VALIDATION_SHARE = 0.1  # of a run's arithmetic, at most
AGAIN = "the folder of a comparison: restore it, or start one with --configs and --out"

# in comparison.json
Whole = Annotated[int, Field(ge=1, lt=2**63)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Swept = dict[str, Annotated[list[str], Field(min_length=1)]]  # {option: values}

# What all recipes of one comparison have to share, and what to say of it
SHARED = {
    "data.train": "training data",
    "data.val": "held-out data",
    "tokenizer.name": "tokenizer",
    "model_spec.model": "model",
    "training.seq_len": "sequence length",
    "training.global_batch_size": "global batch",
}

# The command line takes --NAME and --no-NAME for a bool that cannot be None alone.
TYPES = get_type_hints(MarsOptimizers.Config)


def command_line(name: str) -> list[str]:
    """Return the arguments of ``python -m train`` for CONFIG[:OPTION=VALUE...], with
    options of the optimizer, e.g. tiny_adamw:betas=0.95,0.99.
    """
    config, *options = name.split(":")
    arguments = ["--config", config]
    for option in options:
        key, equals, value = option.partition("=")
        if not (key and equals and value) or "/" in option:
            raise UserError(
                f"got {name}, expected CONFIG:OPTION=VALUE with an option of the "
                "optimizer: write e.g. tiny_mars_m:gamma=0.05"
            )
        is_switch = TYPES.get(key.replace("-", "_")) is bool
        key = key.replace("_", "-")
        if is_switch and value in ("True", "False"):
            arguments.append(f"--optimizer.{'' if value == 'True' else 'no-'}{key}")
        else:
            arguments += [f"--optimizer.{key}", *value.split(",")]
    return arguments


@dataclass(frozen=True)
class Recipe:
    """What of a recipe the comparison varies or shows."""

    name: str
    mars_type: str
    corrects: bool  # MARS or transport, with a gamma above 0
    correction: str
    lr: Rate
    lr_1d: NotNegative | None  # None: lr
    min_lr: NotNegative
    warmup_share: NotNegative  # warm-up steps of the recipe's own steps


@dataclass(frozen=True)
class Study:
    """Everything but the results. Recipes with their grids of rates and the values of
    options ``swept`` ({recipe: {option: values}}), and ``num_seeds``, may grow from
    call to call; the rest identifies the comparison.
    """

    steps: Whole
    tokens_per_step: Whole
    validation_interval: Whole
    validation_samples: Whole
    options: list[str]
    settings: dict[str, dict[str, Any]]  # of each, as ``train.runs.settings`` says
    recipes: Annotated[dict[str, Recipe], Field(min_length=1)]
    grids: dict[str, Annotated[list[Rate], Field(min_length=1)]]
    num_seeds: Annotated[int, Field(ge=1, le=MOST_SEEDS)]
    threads: Whole = field(default=1, compare=False)
    # what files of earlier releases do not have
    swept: dict[str, Swept] = field(default_factory=dict)
    model: str = field(default="", compare=False)  # in words

    def __post_init__(self) -> None:
        if not self.recipes.keys() == self.grids.keys() == self.settings.keys():
            raise ValueError("recipes, grids and settings are not of the same names")
        if not self.swept.keys() <= self.recipes.keys():
            raise ValueError("swept names what is no recipe")

    @cached_property
    def sweeps(self) -> dict[str, Sweep]:
        """Return the sweep of each recipe."""
        return {name: self._sweep(name) for name in self.recipes}

    def _sweep(self, name: str) -> Sweep:
        options, given = self.swept.get(name, {}), self.settings[name]
        own = {option: _text(given.get(f"optimizer.{option}")) for option in options}
        return Sweep.of(name, self.grids[name], self.recipes[name].lr, options, own)

    def recipe_of(self, run: Run) -> Recipe:
        """Return the recipe in whose sweep a run is."""
        found = (n for n, s in self.sweeps.items() if s.point(run) is not None)
        return self.recipes[next(found)]

    def arguments(self, run: Run, folder: Path) -> list[str]:
        """Return the options of ``python -m train`` for one run.

        lr_1d and min_lr keep their ratio to lr, as the published recipes do from size
        to size (lr_1d) and as a schedule scaled as a whole does (min_lr); an lr_1d that
        is swept is one at the recipe's own lr. The warm-up keeps its share of the run,
        and the schedule ends at its last step.
        """
        recipe = self.recipe_of(run)
        sweep = self.sweeps[recipe.name]
        lr_1d = sweep.options(sweep.point(run)).get("lr_1d", recipe.lr_1d)
        scale = run.lr / recipe.lr
        values = {
            "training.steps": self.steps,
            "lr-scheduler.total-steps": self.steps,
            "lr-scheduler.warmup-steps": round(recipe.warmup_share * self.steps),
            "lr-scheduler.min-lr": f"{recipe.min_lr * scale:.6g}",
            "optimizer.lr": f"{run.lr:.6g}",
            "debug.seed": run.seed,
            "validator.freq": self.validation_interval,
            "validator.samples": self.validation_samples,
            # not at a validation's step: a kill between the two would lose its point
            "checkpoint.interval": 3 * self.validation_interval + 1,
            "metrics.log-freq": max(1, self.validation_interval // 5),
            "dump-folder": folder / "runs" / run.path,
        }
        if lr_1d is not None:
            values["optimizer.lr-1d"] = f"{float(lr_1d) * scale:.6g}"
        ours = [str(x) for name, v in values.items() for x in (f"--{name}", v)]
        return [*command_line(run.config), *self.options, *ours]

    @property
    def length(self) -> str:
        """Say how long its runs are, and of which model."""
        model = f"{self.model}, " if self.model else ""
        return f"{model}{self.steps:,} steps of {self.tokens_per_step:,} tokens"

    def save(self, folder: Path) -> None:
        """Write comparison.json."""
        write_json(folder / "comparison.json", asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read comparison.json."""
        return read_json(folder / "comparison.json", cls, AGAIN)


def _words(config) -> str:
    """Say which model a recipe trains."""
    shape = config.model_spec.model.shape
    return f"GPT-2, {shape.num_layers} layers of width {shape.width}"


def _text(value: object) -> str:
    """Return a setting as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def make(
    names: Sequence[str],
    grids: dict[str, list[float]],
    swept: dict[str, Swept],
    *,
    steps: int | None,
    num_seeds: int,
    threads: int,
    options: Sequence[str],
) -> Study:
    """Return the study of a call, checked without training."""
    configs = {name: _resolved(name, options) for name in names}
    given = {name: settings(config) for name, config in configs.items()}
    first = names[0]
    for name, (key, what) in product(names, SHARED.items()):
        if given[name][key] != given[first][key]:
            raise UserError(
                f"got {first} and {name} with different {what}, expected recipes that "
                "differ in their optimizer alone: compare them in two calls, or give "
                "all the same option after --"
            )
    recipes = {name: _recipe(name, config) for name, config in configs.items()}
    lengths = sorted({config.training.steps for config in configs.values()})
    if steps is None and len(lengths) > 1:
        raise UserError(
            f"got recipes of {lengths} steps, expected one length: give --steps"
        )
    steps = steps or lengths[0]
    for name, recipe in recipes.items():
        if round(recipe.warmup_share * steps) >= steps:
            raise UserError(
                f"got {name} with a warm-up as long as its run, expected a shorter "
                "one: give --lr-scheduler.warmup-steps after --"
            )
    t, interval = configs[first].training, max(1, round(steps / NUM_POINTS))
    study = Study(
        steps=steps,
        tokens_per_step=t.global_batch_size * t.seq_len,
        validation_interval=interval,
        validation_samples=_num_held_out([*configs.values()], steps, interval),
        options=list(options),
        settings=given,
        recipes=recipes,
        grids={n: grids.get(n) or list(default_grid(recipes[n].lr)) for n in names},
        num_seeds=num_seeds,
        threads=threads,
        swept=swept,
        model=_words(configs[first]),
    )
    for sweep in study.sweeps.values():
        for point in sweep.listed():  # before the first of them is trained
            _resolved(sweep.run(point, 0).config, options)
    return study


def again(study: Study, threads: int) -> Study:
    """Return the same comparison from recipes and data as they are now."""
    kept = dict(steps=study.steps, num_seeds=study.num_seeds, options=study.options)
    names = list(study.recipes)
    return make(names, study.grids, study.swept, threads=threads, **kept)


def _resolved(name: str, options: Sequence[str]):
    """Return a recipe's checked configuration, which validates on what there is."""
    config = parse([*command_line(name), *options])
    resolve(config, 1)
    return config


def _num_held_out(configs: list, steps: int, interval: int) -> int:
    """Return the sequences of one validation: the recipes', but no more than its share
    of the run's arithmetic allows, of which a forward pass is a third of a training
    step's; in whole batches of every recipe.
    """
    batch = math.lcm(*(config.training.local_batch_size for config in configs))
    trained = steps * configs[0].training.global_batch_size
    budget = int(3 * VALIDATION_SHARE * trained / (steps / interval + 1))
    samples = min([budget, *(config.validator.samples for config in configs)])
    return max(1, samples // batch) * batch


def _recipe(name: str, config) -> Recipe:
    opt, rates = config.optimizer, config.lr_scheduler
    mars = REGISTRY[opt.mars_type].is_mars
    return Recipe(
        name=name,
        mars_type=opt.mars_type,
        corrects=opt.gamma > 0 and (mars or opt.correction == "transport"),
        correction=opt.correction,
        lr=opt.lr,
        lr_1d=opt.lr_1d,
        min_lr=rates.min_lr,
        warmup_share=rates.warmup_steps / (rates.total_steps or config.training.steps),
    )


def check(study: Study, folder: Path) -> Study:
    """Return the study for a folder that is free but for runs of the like, or that
    holds the same comparison, whose recipes and seeds stay in it.
    """
    check_folder("--out", folder)
    if (folder / "comparison.json").exists():
        theirs = Study.load(folder)
        _check_same(study, theirs, folder)
        others = theirs.recipes.keys() - study.recipes.keys()
        swept = {name: kept for name, kept in theirs.swept.items() if name in others}
        for name, options in study.swept.items():
            known = theirs.swept.get(name, {})  # whose order names the folders
            same = known.keys() == options.keys()
            swept[name] = {o: options[o] for o in (known if same else options)}
        return replace(
            study,
            swept=swept,
            settings=theirs.settings | study.settings,
            recipes=theirs.recipes | study.recipes,
            grids=theirs.grids | study.grids,
            num_seeds=max(theirs.num_seeds, study.num_seeds),
        )
    if folder.exists() and {p.name for p in folder.iterdir()} - {LOCK, "runs"}:
        raise UserError(
            f"got --out {folder}, which holds something else, expected a new or empty "
            "folder: choose another"
        )
    mine = next(iter(study.settings.values()))
    for path in sorted((folder / "runs").glob(f"*/lr-*/seed-*/{SETTINGS}")):
        theirs = read(path)
        for key, what in SHARED.items():
            if theirs.get(key) != mine[key]:
                raise UserError(
                    f"got {path.parent} with another {what}, expected runs that can be "
                    "compared with this call's: give another --out"
                )
    return study


def _check_same(study: Study, theirs: Study, folder: Path) -> None:
    """Check what may not change from call to call."""
    changed = {
        "--steps": (study.steps, theirs.steps),
        "options after --": (study.options, theirs.options),
        "validation samples": (study.validation_samples, theirs.validation_samples),
    }
    mine, there = (next(iter(p.settings.values())) for p in (study, theirs))
    changed |= {what: (mine.get(k), there.get(k)) for k, what in SHARED.items()}
    for what, (given, known) in changed.items():
        if given != known:
            raise UserError(
                f"got {what} {given} where the comparison in {folder} has {known}, "
                "expected the same: give or restore it, or give another --out"
            )
    for name in study.recipes.keys() & theirs.recipes.keys():
        if what := difference(study.settings[name], theirs.settings[name]):
            raise UserError(
                f"got {name} with {what} in {folder}, expected the recipe that was "
                "compared there: give another --out"
            )
