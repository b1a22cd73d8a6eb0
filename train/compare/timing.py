"""Seconds per step of each recipe, measured in one quiet process.

All trainers live at once and take turns of a few steps, so that what disturbs the
machine for a while disturbs all recipes alike; medians forget the rest.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from train.compare.children import end, spawn
from train.compare.curves import load_all
from train.compare.plan import Plan
from train.compare.sweep import Run, best_rate, sweep_of

BLOCK = 5  # steps of a turn
ROUNDS = 9  # turns of each recipe; the first is warm-up
START = 15.0  # seconds that a run spends outside its steps


def seconds_per_run(plan: Plan) -> Callable[[str], float]:
    """A guess of what one run takes, from one timed pass of the model; nan where that
    does not fit into memory (runs may recompute activations).
    """
    options = ["--config", next(iter(plan.recipes)), *plan.options]

    @cache  # nothing is timed where nothing is left to run
    def step() -> float:
        # a process of its own, whose memory on a GPU is free again for the runs
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            try:
                return pool.submit(_pass_seconds, options, plan).result()
            except RuntimeError:  # out of memory, or killed for want of it
                return math.nan

    points = plan.steps / plan.validation_interval + 1
    held_out = points * plan.validation_samples / _global_batch(plan) / 3

    def guess(recipe: str) -> float:
        passes = 2 if plan.recipes[recipe].exact else 1
        return START + step() * (passes * plan.steps + held_out)

    return guess


def _pass_seconds(options: list[str], plan: Plan) -> float:
    """Forward and backward pass of one global batch."""
    import torch
    import torch.nn.functional as F

    from train.gpt2 import GPT2
    from train.launch import parse

    config = parse(options)
    t, shape = config.training, config.model_spec.model.shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(plan.threads)
    model = GPT2(shape).to(device)
    ids = torch.zeros(t.local_batch_size, t.seq_len, dtype=torch.long, device=device)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
        model.wte.weight.grad.sum().item()  # waits for a GPU
        seconds.append(time.perf_counter() - began)
    return min(seconds) * _global_batch(plan) / t.local_batch_size


def _global_batch(plan: Plan) -> int:
    return next(iter(plan.settings.values()))["training.global_batch_size"]


def measure(plan: Plan, folder: Path, lock: int, say: Callable[[str], None]) -> bool:
    """Write timing.json by a process of its own; whether that worked."""
    say("timing: seconds per step, one recipe at a time")
    process = spawn("train.compare.timing", [folder], plan.threads, lock)
    try:
        return process.wait() == 0
    finally:
        end([process])


def _rate(plan: Plan, name: str, folder: Path) -> float:
    """The best rate of a recipe so far, its own before any is known."""
    found = load_all(folder / "runs", plan.steps, [name])
    tried = sweep_of(name, {run: curve.score for run, curve in found.items()})
    return best_rate(tried) if tried else plan.recipes[name].lr


def _trainer(plan: Plan, name: str, folder: Path, scratch: str):
    """A trainer of one recipe that neither validates nor saves."""
    from train.launch import parse
    from train.resolve import resolve

    run = Run(name, _rate(plan, name, folder), 0)
    config = parse(
        [
            *plan.arguments(run, folder),
            "--validator.no-enable",
            "--metrics.no-enable-tensorboard",
            f"--metrics.log-freq={plan.steps + BLOCK * ROUNDS}",
            f"--dump-folder={scratch}/{name}",
        ]
    )
    resolve(config, 1)
    trainer = config.build()
    trainer.step = 1  # the first step is logged, whatever the interval
    return trainer


def _turn(trainer, batches) -> list[float]:
    """Seconds of each of BLOCK steps."""
    import torch

    seconds = []
    for _ in range(BLOCK):
        began = time.perf_counter()
        trainer.step += 1
        trainer.train_step(batches)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """The process that measures."""
    from train.launch import console, standalone

    folder = Path(sys.argv[1])
    plan = Plan.load(folder)
    standalone()
    console(0)
    # torchtitan warns of every trainer after the first
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        trainers = {n: _trainer(plan, n, folder, scratch) for n in plan.grids}
        batches = {n: t.batch_generator(t.dataloader) for n, t in trainers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        for turn in range(ROUNDS):
            for name, trainer in trainers.items():
                took = _turn(trainer, batches[name])
                if turn:
                    seconds[name] += took
            print(f"timing: turn {turn + 1} of {ROUNDS}", flush=True)
        for trainer in trainers.values():
            trainer.close()
    draft = folder / "timing.tmp"
    draft.write_text(json.dumps(seconds) + "\n")
    draft.rename(folder / "timing.json")


if __name__ == "__main__":
    main()
