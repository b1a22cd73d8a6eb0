"""What a comparison found, as numbers."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Annotated, Self

import numpy as np
from pydantic import Field
from pydantic_core import from_json, to_json

from train.compare.curves import Curve, load_all
from train.compare.study import Rate, Recipe, Study
from train.compare.sweep import Found, search
from train.files import read_json

Timing = dict[str, Annotated[list[Rate], Field(min_length=1)]]  # seconds of each step


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, and standard deviation (0 of one seed)."""

    mean: float
    deviation: float
    values: list[float]

    @classmethod
    def of(cls, values: list[float]) -> Self:
        deviation = stdev(values) if len(values) > 1 else 0.0
        return cls(mean(values), deviation, values)


@dataclass(frozen=True)
class Entry:
    """One recipe at the best point of its sweep. Losses in nats per token of held-out
    text.
    """

    recipe: Recipe
    found: Found
    curves: list[Curve]  # of each seed that did not diverge
    num_diverged: int  # seeds that did
    seconds_per_step: float | None  # median; None = not measured

    @property
    def name(self) -> str:
        """Return the recipe's name, with the options that its sweep chose."""
        return self.found.sweep.run(self.found.best, 0).config

    @property
    def lr(self) -> float:
        return float(self.found.best[0])

    @property
    def num_trials(self) -> int:
        """Return the runs of seed 0, among which it was chosen."""
        return len(self.found.losses)

    @property
    def best(self) -> Spread:
        return Spread.of([c.best for c in self.curves])

    @property
    def final(self) -> Spread:
        return Spread.of([c.final for c in self.curves])

    def facts(self) -> dict:
        """Return what results.json says of it alone."""
        names = "lr num_trials num_diverged best final seconds_per_step"
        own = {name: getattr(self, name) for name in names.split()}
        found = self.found
        return {
            "name": self.name,
            **own,
            "options": found.sweep.options(found.best),
            "inside": found.inside,
            "num_untried": len(found.wanted),
            "num_seeds": len(self.curves),
        }

    def trials(self) -> list[dict]:
        """Return all points tried, each with its final loss of seed 0."""
        options = self.found.sweep.options
        return [
            {"lr": float(point[0]), **options(point), "final_loss": loss}
            for point, loss in sorted(self.found.losses.items(), key=lambda kv: kv[1])
        ]

    @property
    def curve(self) -> Curve:
        """Return the mean over seeds, at the steps that all have."""
        steps = self.curves[0].steps
        for other in self.curves[1:]:
            steps = np.intersect1d(steps, other.steps)
        losses = [np.interp(steps, c.steps, c.losses) for c in self.curves]
        return Curve(steps, np.mean(losses, axis=0))


@dataclass(frozen=True)
class Row:
    """One entry's numbers beside the others', most of them to the worst final loss."""

    tokens_ratio: float
    """Tokens until the worst optimizer's final loss, of the tokens that it took."""
    tokens_ratio_range: tuple[float, float]
    """Smallest and largest over seeds; inf = a seed did not get there."""
    seconds_per_step_ratio: float | None  # of the fastest's
    seconds_ratio: float | None
    """Seconds until the worst optimizer's final loss, of the seconds that it took."""
    loss_at_time: float | None  # when the fastest optimizer has finished


def entries(study: Study, folder: Path) -> list[Entry]:
    """Return all recipes with a finished run that converged, best first."""
    curves = load_all(folder / "runs", study.steps, study.sweeps.values())
    scores = {run: curve.score for run, curve in curves.items()}
    path, again = folder / "timing.json", "seconds: measure again, --only timing"
    timing = read_json(path, Timing, again) if path.exists() else {}
    made = []
    for name, recipe in study.recipes.items():
        found = search(study.sweeps[name], scores)
        if math.isinf(found.loss):
            continue
        seeds = [found.sweep.run(found.best, seed) for seed in range(study.num_seeds)]
        mine = [curves[r] for r in seeds if r in curves and scores[r] < math.inf]
        diverged = sum(scores.get(run) == math.inf for run in seeds)
        seconds = median(timing[name]) if name in timing else None
        made.append(Entry(recipe, found, mine, diverged, seconds))
    return sorted(made, key=lambda e: e.final.mean)


def rows(found: list[Entry], steps: int) -> list[Row]:
    """Return the table, in the order of the entries, which is best first."""
    target = found[-1].final.mean
    timed = [e.seconds_per_step for e in found if e.seconds_per_step is not None]
    fastest = min(timed) if timed else None
    slow = found[-1].seconds_per_step
    table = []
    for e in found:
        curve, own = e.curve, e.seconds_per_step
        reached = curve.reaches(target) / steps
        seeds = [c.reaches(target) / steps for c in e.curves]
        table.append(
            Row(
                tokens_ratio=reached,
                tokens_ratio_range=(min(seeds), max(seeds)),
                seconds_per_step_ratio=own / fastest if own else None,
                seconds_ratio=reached * own / slow if own and slow else None,
                loss_at_time=curve.at(steps * fastest / own) if own else None,
            )
        )
    return table


def as_json(found: list[Entry], table: list[Row], study: Study) -> dict:
    """Return everything, for other programs; inf and nan as null."""
    tokens = study.tokens_per_step
    raw = {
        "steps": study.steps,
        "tokens_per_run": study.steps * tokens,
        "target_loss": found[-1].final.mean,
        "target_set_by": found[-1].recipe.name,
        "optimizers": {
            e.recipe.name: e.facts() | asdict(row)
            for e, row in zip(found, table, strict=True)
        },
        "sweeps": {e.recipe.name: e.trials() for e in found},
        "curves": {
            e.recipe.name: {
                "tokens": (e.curve.steps * tokens).tolist(),
                "mean_loss": e.curve.losses.tolist(),
                "loss_of_each_seed": [c.losses.tolist() for c in e.curves],
            }
            for e in found
        },
    }
    return from_json(to_json(raw, inf_nan_mode="null"))
