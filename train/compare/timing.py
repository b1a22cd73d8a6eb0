"""Seconds per step of each recipe, measured in one quiet process.

All trainers live at once and take turns of a few steps, so that what disturbs the
machine for a while disturbs all recipes alike; medians forget the rest.
"""

import logging
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from marsopt.profiling.machine import seconds
from train.compare.children import end, spawn
from train.compare.curves import load_all
from train.compare.study import Rate, Study
from train.compare.sweep import Run, search
from train.engine.launch import console, parse, standalone
from train.engine.resolve import resolve
from train.files import read_json, write_json

BLOCK = 5  # steps of a turn
TURNS = 8  # of each recipe, after one of warm-up
DRAFT = "timing.unfinished.json"


@dataclass(frozen=True)
class Turns:
    """What a measurement that was stopped has measured: ``seconds`` of all steps, of
    the recipes in ``runs`` at the points that these name, on ``threads``.
    """

    runs: dict[str, str]
    threads: int
    seconds: dict[str, list[Rate]]

    @property
    def done(self) -> int:
        """Return how many turns of all recipes it has."""
        return min(len(values) for values in self.seconds.values()) // BLOCK


def begun(path: Path, runs: dict[str, str], threads: int) -> Turns:
    """Return the measurement of these runs that was stopped, or a new one."""
    if path.exists():
        found = read_json(path, Turns, "what a measurement left: delete it")
        same = (found.runs, found.threads) == (runs, threads)
        if same and found.seconds.keys() == runs.keys():
            return found
    return Turns(runs, threads, {name: [] for name in runs})


def take_turns(
    turns: Turns, steps: Mapping[str, Callable[[], float]], folder: Path
) -> None:
    """Measure until all turns are there, each kept as soon as it is whole, and write
    timing.json. ``steps`` return the seconds that they took.
    """

    def turn() -> dict[str, list[float]]:
        return {name: [step() for _ in range(BLOCK)] for name, step in steps.items()}

    turn()  # warm-up
    if turns.done:
        print(f"timing: goes on after turn {turns.done} of {TURNS}", flush=True)
    while turns.done < TURNS:
        for name, took in turn().items():
            turns.seconds[name] += took
        write_json(folder / DRAFT, asdict(turns))
        print(f"timing: turn {turns.done} of {TURNS}", flush=True)
    write_json(folder / "timing.json", turns.seconds)
    (folder / DRAFT).unlink(missing_ok=True)


def measure(study: Study, folder: Path, lock: int, say: Callable[[str], None]) -> bool:
    """Write timing.json by a process of its own; return whether that worked."""
    say("timing: seconds per step, one recipe at a time")
    with tempfile.TemporaryDirectory() as scratch:
        args = (folder, scratch)
        process = spawn("train.compare.timing", args, study.threads, lock)
        try:
            return process.wait() == 0
        finally:
            end([process])


def _best(study: Study, name: str, folder: Path) -> Run:
    """Return the run at the best point so far, or that of the recipe."""
    sweep = study.sweeps[name]
    curves = load_all(folder / "runs", study.steps, [sweep])
    found = search(sweep, {run: curve.score for run, curve in curves.items()})
    return sweep.run(found.best if found.losses else sweep.start, 0)


def _trainer(study: Study, run: Run, folder: Path, dump: Path):
    """Return a trainer of a run, which neither validates nor saves."""
    options = study.arguments(run, folder)
    options += ["--validator.no-enable", "--metrics.no-enable-tensorboard"]
    options += [f"--metrics.log-freq={study.steps + BLOCK * (TURNS + 1)}"]
    config = parse([*options, f"--dump-folder={dump}"])
    resolve(config, 1)
    trainer = config.build()
    trainer.step = 1  # the first step is logged, whatever the interval
    return trainer


def _step(trainer, batches) -> None:
    trainer.step += 1
    trainer.train_step(batches)


def _timed(trainer) -> Callable[[], float]:
    """Return a step of the trainer, which returns its seconds."""
    step = partial(_step, trainer, trainer.batch_generator(trainer.dataloader))
    return partial(seconds, step, trainer.device.type)


def main() -> None:
    """Measure, as a process of its own."""
    folder, scratch = map(Path, sys.argv[1:])
    study = Study.load(folder)
    standalone()
    console(0)
    # torchtitan warns of every trainer after the first
    logging.getLogger().setLevel(logging.ERROR)
    runs = {name: _best(study, name, folder) for name in study.recipes}
    paths = {name: run.path for name, run in runs.items()}
    turns = begun(folder / DRAFT, paths, study.threads)
    trainers = {n: _trainer(study, r, folder, scratch / n) for n, r in runs.items()}
    take_turns(turns, {n: _timed(t) for n, t in trainers.items()}, folder)
    for trainer in trainers.values():
        trainer.close()


if __name__ == "__main__":
    main()
