"""What runs left behind: validation curves, and their ends."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train.compare.sweep import Run, Sweep
from train.runs.checkpoints import delete, last_step, step_folders
from train.runs.summary import VAL, read_scalars


@dataclass(frozen=True)
class Curve:
    """Validation losses of one run, in nats per token.

    ``steps`` (points,) int and ``losses`` (points,) float, ascending by step.
    """

    steps: np.ndarray
    losses: np.ndarray

    @property
    def final(self) -> float:
        return float(self.losses[-1])

    @property
    def best(self) -> float:
        return float(np.nanmin(self.losses))

    @property
    def score(self) -> float:
        """Return the final loss; inf where it is not finite or as bad as untrained."""
        improved = math.isfinite(self.final) and self.final < self.losses[0]
        return self.final if improved else math.inf

    def at(self, step: float) -> float:
        """Return the loss at a step between two points, on the straight line."""
        return float(np.interp(step, self.steps, self.losses))

    def reaches(self, loss: float) -> float:
        """Return the first step, between points too, of at most this loss, or inf."""
        below = np.flatnonzero(self.losses <= loss)
        if len(below) == 0:
            return math.inf
        i = int(below[0])
        if i == 0 or not math.isfinite(self.losses[i - 1]):
            return float(self.steps[i])
        (s0, s1), (l0, l1) = self.steps[i - 1 : i + 1], self.losses[i - 1 : i + 1]
        return float(s0 + (s1 - s0) * (l0 - loss) / (l0 - l1))


def validations(folder: Path) -> dict[int, float]:
    """Return {step: loss} that the run in ``folder`` has written so far."""
    return read_scalars(folder / "tb").get(VAL, {})


def load(folder: Path, steps: int) -> Curve | None:
    """Return the curve of the run in ``folder``; None before its last step."""
    points = validations(folder)
    if steps not in points:
        return None
    return Curve(np.array(list(points)), np.array(list(points.values())))


def load_all(folder: Path, steps: int, sweeps: Collection[Sweep]) -> dict[Run, Curve]:
    """Return all finished runs of these sweeps below ``folder``."""
    found = {}
    for path in sorted(folder.glob("*/lr-*/seed-*")):
        config, lr, seed = path.relative_to(folder).parts
        try:
            lr, seed = float(lr.removeprefix("lr-")), int(seed.removeprefix("seed-"))
            run = Run(config, lr, seed)
        except ValueError:  # the user's, such as a copy seed-0.bak
            continue
        ours = any(sweep.point(run) is not None for sweep in sweeps)
        if ours and (curve := load(path, steps)) is not None:
            found[run] = curve
    return found


def discard_incomplete(folder: Path, steps: int) -> bool:
    """Delete the last checkpoint of a run that was killed between it and the last
    validation: from there it would neither train nor validate again.
    """
    last = last_step(folder)
    stale = last >= steps and load(folder, steps) is None
    if stale:
        delete(step_folders(folder / "checkpoint")[last])
    return stale


def keep_last_checkpoint(folder: Path) -> None:
    """Delete all but the newest checkpoint of a finished run."""
    last = last_step(folder)
    for step, path in step_folders(folder / "checkpoint").items():
        if step != last:
            delete(path)
