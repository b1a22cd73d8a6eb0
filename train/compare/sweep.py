"""Which runs a comparison still needs: a grid of rates that widens, then seeds.

Pure: nothing here trains or reads files.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

FACTOR = 2.0  # between neighbouring rates of the default grid, and of a widened one
MOST_SEEDS = 1000
WIDEST = 6  # rates that a grid may gain; then its edge is reported instead


@dataclass(frozen=True, order=True)
class Run:
    """One training: a recipe at a learning rate, its weights and data of one seed."""

    config: str
    lr: float
    seed: int

    @property
    def path(self) -> str:
        """Return its folder below the comparison's runs."""
        return f"{self.config}/lr-{self.lr:g}/seed-{self.seed}"

    def __str__(self) -> str:
        return f"{self.config} lr {self.lr:g} seed {self.seed}"


Grids, Losses = Mapping[str, Sequence[float]], Mapping[Run, float]  # rates; of runs


def rounded(lr: float) -> float:
    """Round to six digits: rates that print alike are one rate."""
    return float(f"{lr:.6g}")


def default_grid(lr: float) -> tuple[float, ...]:
    """Return the rates around a recipe's."""
    return tuple(rounded(lr * factor) for factor in (1 / FACTOR, 1.0, FACTOR))


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the rate of the lowest loss, the smaller one of equals."""
    return min(losses, key=lambda lr: (losses[lr], lr))


def is_inside(losses: Mapping[float, float]) -> bool:
    """Return whether the best rate has a worse one on both sides."""
    return min(losses) < best_rate(losses) < max(losses)


def next_rates(grid: Sequence[float], losses: Mapping[float, float]) -> list[float]:
    """Return the rates still to be tried: the rest of the grid, then one beyond the
    edge at which the best lies, none when it lies inside.

    ``losses`` has what was tried; inf = diverged.
    """
    if missing := [lr for lr in grid if lr not in losses]:
        return missing
    if len(grid) == 1 or is_inside(losses) or len(losses) >= len(grid) + WIDEST:
        return []
    best = best_rate(losses)
    return [rounded(best / FACTOR if best == min(losses) else best * FACTOR)]


def sweep_of(config: str, losses: Losses) -> dict[float, float]:
    """Return {rate: loss} of the runs that choose the rate: those of seed 0."""
    runs = sorted(run for run in losses if (run.config, run.seed) == (config, 0))
    return {run.lr: losses[run] for run in runs}


def next_runs(
    grids: Grids, num_seeds: int, losses: Losses, failed: Collection[Run] = ()
) -> list[Run]:
    """Return all runs that can be started now, those of sweeps first.

    A recipe with a failed run in its sweep chooses no rate, and waits for the next
    call; so does one that diverges at every rate.
    """
    sweeps, seeds = [], []
    for config, grid in grids.items():
        tried = sweep_of(config, losses)
        if rates := next_rates(grid, tried):
            sweeps += [Run(config, lr, 0) for lr in rates]
        elif math.isfinite(tried[best := best_rate(tried)]):
            seeds += [Run(config, best, seed) for seed in range(1, num_seeds)]
    return [run for run in sweeps + seeds if run not in losses and run not in failed]


def num_to_come(
    grids: Grids, num_seeds: int, losses: Losses, failed: Collection[Run] = ()
) -> dict[str, int]:
    """Return {config: runs that it still needs if no grid widens any more}."""
    count = {}
    for config, grid in grids.items():
        mine = len(next_runs({config: grid}, num_seeds, losses, failed))
        sweeping = mine and next_rates(grid, sweep_of(config, losses))
        count[config] = mine + (num_seeds - 1 if sweeping else 0)
    return count
