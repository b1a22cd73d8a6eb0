"""Runs of recipes, each a ``python -m train``, which goes on from its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from train.engine.launch import console, parse, standalone
from train.engine.recipes import MODULE
from train.engine.resolve import resolve
from train.engine.titan_optim import MarsOptimizers
from train.errors import UserError
from train.runs.checkpoints import delete, last_step, step_folders
from train.runs.settings import settings
from train.runs.summary import VAL, read_scalars

if TYPE_CHECKING:
    from research.compare.study import Run

VALIDATION_SHARE = 0.1  # of a run's arithmetic, at most

# What all recipes of one study have to share, and what to say of it
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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How every recipe of a study is trained.

    A method's recipe is {"config": name of a recipe, option of the optimizer: value}.
    lr_1d keeps its ratio to lr, as the published recipes do from size to size. The
    warm-up keeps its share of the run, and the schedule ends at its last step.

    Args:
        steps: of a run.
        options: given to every run, as ``python -m train`` takes them.
        module: that has the recipes.
        points: validations of a run.
    """

    steps: int
    options: tuple[str, ...] = ()
    module: str = MODULE
    points: int = 15
    keeps: ClassVar[bool] = True  # its last checkpoint and TensorBoard's curves
    unit: ClassVar[str] = "token"

    @cached_property
    def _configs(self) -> dict[str, Any]:
        """Return the recipes asked for so far, resolved, by name."""
        return {}

    def _config(self, name: str):
        if name not in self._configs:
            config = parse(["--config", name, "--module", self.module, *self.options])
            resolve(config, 1)
            self._configs[name] = config
        return self._configs[name]

    @property
    def _first(self):
        return next(iter(self._configs.values()))

    def check(self, recipes: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that all methods can be run, and differ in their optimizer alone.

        Raises:
            UserError: a recipe or an option that is none; recipes that do not compare.
        """
        standalone()
        console(0)
        for title, recipe in recipes.items():
            config = self._config(recipe["config"])
            if round(self._warmup_share(config) * self.steps) >= self.steps:
                raise UserError(
                    f"got {title} with a warm-up as long as its run, expected a shorter"
                    " one: give --lr-scheduler.warmup-steps in the study's options"
                )
            parsed = parse(self._arguments(recipe, 0, Path("unused")))
            resolve(parsed, 1)  # the method's own options
        given = {name: settings(config) for name, config in self._configs.items()}
        first = next(iter(given))
        for name, (key, what) in product(given, SHARED.items()):
            if given[name][key] != given[first][key]:
                raise UserError(
                    f"got {first} and {name} with different {what}, expected recipes "
                    "that differ in their optimizer alone: compare them in two "
                    "studies, or give all the same option"
                )

    def identity(self) -> dict[str, Any]:
        """Return what two calls must agree on, by name."""
        every = {name: settings(config) for name, config in self._configs.items()}
        own = dict(steps=self.steps, options=[*self.options], points=self.points)
        return own | dict(held_out=self._num_held_out) | every

    def _warmup_share(self, config) -> float:
        own = config.lr_scheduler
        return own.warmup_steps / (own.total_steps or config.training.steps)

    @property
    def _interval(self) -> int:
        return max(1, round(self.steps / self.points))

    @property
    def _num_held_out(self) -> int:
        """Return the sequences of one validation: the recipes', but no more than its
        share of the run's arithmetic allows, of which a forward pass is a third of a
        training step's; in whole batches of every recipe.
        """
        configs = self._configs.values()
        batch = math.lcm(*(config.training.local_batch_size for config in configs))
        trained = self.steps * self._first.training.global_batch_size
        budget = int(3 * VALIDATION_SHARE * trained / (self.steps / self._interval + 1))
        samples = min([budget, *(config.validator.samples for config in configs)])
        return max(batch, samples // batch * batch)

    def command(self, run: Run, folder: Path) -> tuple[str, list[str]]:
        """Return the module and the arguments that train a run."""
        go_back(folder, self.steps)
        return "train", self._arguments(run.recipe, run.seed, folder)

    def _arguments(
        self, recipe: Mapping[str, Any], seed: int, folder: Path
    ) -> list[str]:
        own = dict(recipe)
        name = own.pop("config")
        config, lr = self._config(name), own.pop("lr", None)
        optimizer = config.optimizer
        scale = 1.0 if lr is None else lr / optimizer.lr
        lr_1d = own.pop("lr_1d", optimizer.lr_1d)
        if "beta1" in own or "beta2" in own:
            first, second = optimizer.betas
            own["betas"] = own.pop("beta1", first), own.pop("beta2", second)
        values = {
            "training.steps": self.steps,
            "lr-scheduler.total-steps": self.steps,
            "lr-scheduler.warmup-steps": round(self._warmup_share(config) * self.steps),
            "optimizer.lr": f"{optimizer.lr * scale:.6g}",
            "debug.seed": seed,
            "validator.freq": self._interval,
            "validator.samples": self._num_held_out,
            # not at a validation's step: a kill between the two would lose its point
            "checkpoint.interval": 3 * self._interval + 1,
            "metrics.log-freq": max(1, self._interval // 5),
            "dump-folder": folder,
        }
        if lr_1d is not None:
            values["optimizer.lr-1d"] = f"{lr_1d * scale:.6g}"
        words = ["--config", name, "--module", self.module, *self.options]
        for key, value in values.items():
            words += [f"--{key}", str(value)]
        for key, value in own.items():
            words += _option(key, value)
        return words

    def found(self, folder: Path) -> dict[str, Any] | None:
        """Return what a run in ``folder`` showed; None before its end."""
        points = read_scalars(folder / "tb").get(VAL, {})
        if self.steps not in points:
            return None
        keep_last_checkpoint(folder)
        finite = {k: v if math.isfinite(v) else None for k, v in points.items()}
        return dict(curve=[[step, loss] for step, loss in finite.items()])


def _option(key: str, value: Any) -> list[str]:
    """Return an option of the optimizer as the command line takes it."""
    is_switch = TYPES.get(key) is bool
    name = key.replace("_", "-")
    if is_switch and isinstance(value, bool):
        return [f"--optimizer.{'' if value else 'no-'}{name}"]
    values = value if isinstance(value, list | tuple) else (value,)
    return [f"--optimizer.{name}", *map(str, values)]


def go_back(folder: Path, steps: int) -> None:
    """Delete the last checkpoint of a run that was killed between it and the last
    validation: from there it would neither train nor validate again.
    """
    last = last_step(folder)
    if last >= steps:
        delete(step_folders(folder / "checkpoint")[last])


def keep_last_checkpoint(folder: Path) -> None:
    """Delete all but the newest checkpoint of a finished run."""
    last = last_step(folder)
    for step, path in step_folders(folder / "checkpoint").items():
        if step != last:
            delete(path)
