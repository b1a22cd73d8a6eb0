"""Seconds per step of each recipe, measured in one quiet process.

All trainers live at once and take turns of a few steps, so that what disturbs the
machine for a while disturbs all recipes alike; medians forget the rest.
"""

import logging
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from marsopt.profiling.machine import seconds
from train.compare.children import end, spawn
from train.compare.curves import load_all
from train.compare.study import Study
from train.compare.sweep import search
from train.engine.launch import console, parse, standalone
from train.engine.resolve import resolve
from train.files import write_json

BLOCK = 5  # steps of a turn
ROUNDS = 9  # turns of each recipe; the first is warm-up


def measure(study: Study, folder: Path, lock: int, say: Callable[[str], None]) -> bool:
    """Write timing.json by a process of its own; return whether that worked."""
    say("timing: seconds per step, one recipe at a time")
    process = spawn("train.compare.timing", [folder], study.threads, lock)
    try:
        return process.wait() == 0
    finally:
        end([process])


def _trainer(study: Study, name: str, folder: Path, scratch: str):
    """Return a trainer at the best point so far, which neither validates nor saves."""
    sweep = study.sweeps[name]
    curves = load_all(folder / "runs", study.steps, [sweep])
    found = search(sweep, {run: curve.score for run, curve in curves.items()})
    point = found.best if found.losses else sweep.start
    options = study.arguments(sweep.run(point, 0), folder)
    options += ["--validator.no-enable", "--metrics.no-enable-tensorboard"]
    options += [f"--metrics.log-freq={study.steps + BLOCK * ROUNDS}"]
    config = parse([*options, f"--dump-folder={scratch}/{name}"])
    resolve(config, 1)
    trainer = config.build()
    trainer.step = 1  # the first step is logged, whatever the interval
    return trainer


def _step(trainer, batches) -> None:
    trainer.step += 1
    trainer.train_step(batches)


def main() -> None:
    """Measure, as a process of its own."""
    folder = Path(sys.argv[1])
    study = Study.load(folder)
    standalone()
    console(0)
    # torchtitan warns of every trainer after the first
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        trainers = {n: _trainer(study, n, folder, scratch) for n in study.grids}
        batches = {n: t.batch_generator(t.dataloader) for n, t in trainers.items()}
        found: dict[str, list[float]] = {name: [] for name in trainers}
        for turn in range(ROUNDS):
            for name, trainer in trainers.items():
                step = partial(_step, trainer, batches[name])
                took = [seconds(step, trainer.device.type) for _ in range(BLOCK)]
                found[name] += took if turn else []
            print(f"timing: turn {turn + 1} of {ROUNDS}", flush=True)
        for trainer in trainers.values():
            trainer.close()
    write_json(folder / "timing.json", found)


if __name__ == "__main__":
    main()
