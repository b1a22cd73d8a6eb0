"""A tiny GPT-2 trained with its optimizer's state in float32, in bfloat16 rounded
stochastically, and in bfloat16 rounded to nearest, which MARS itself refuses: this
loop rounds a float32 state after every step.

    OMP_NUM_THREADS=1 python -m benchmarks.bf16_state --json FILE [--data data/python]

The folder holds train.bin and val.bin, as train.prepare makes them. Runs of one seed
begin with the same weights and see the same batches. What FILE has is not run again, so
that a call which was ended is continued by the same command.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks import tiny
from benchmarks.pretrain.loop import Plan, Task
from marsopt import MARS
from marsopt.profiling.machine import describe, one_line
from train.data.token_files import open_raw
from train.engine.schedule import cosine
from train.errors import command
from train.files import write_json

WARMUP = 100  # steps, as configs.tiny has it
FLOAT32 = "float32"
NEAREST = "bfloat16, to nearest"
STOCHASTIC = "bfloat16, stochastic"
OPTIONS: dict[str, dict[str, Any]] = {
    FLOAT32: {},
    STOCHASTIC: dict(state_dtype=torch.bfloat16, stochastic_rounding=True),
    NEAREST: {},
}
SHARE = 10  # the training loss is that of the last steps, one in so many


class Recipe(NamedTuple):
    """A rule and its numbers; ``lr`` is that of configs.tiny."""

    rule: str
    lr: float
    betas: tuple[float, float]


RECIPES = (
    Recipe("mars-adamw", 6e-3, (0.95, 0.99)),
    Recipe("adamw", 4e-3, (0.9, 0.999)),
)


def train(
    folder: Path, plan: Plan, recipe: Recipe, precision: str
) -> tuple[float, float]:
    """Train from the start; return the held-out loss, and the training loss of the last
    steps.
    """
    task = Task(plan, open_raw(folder / "train.bin"), open_raw(folder / "val.bin"))
    optimizer = MARS(
        task.model.parameters(),
        lr=recipe.lr,
        betas=recipe.betas,
        mars_type=recipe.rule,
        max_norm=1.0,
        optimize_1d=recipe.rule != "adamw",  # which moves all tensors alike
        compile=plan.compile,
        **OPTIONS[precision],
    )
    rate = partial(cosine, warmup=plan.warmup, total=plan.steps, floor=plan.floor)
    scheduler, batches = LambdaLR(optimizer, rate), task.batches()
    losses = []
    for _ in range(plan.steps):
        optimizer.zero_grad()
        losses.append(float(task.gradient(batches.next())))
        optimizer.step()
        if precision == NEAREST:
            round_to_nearest(optimizer)
        scheduler.step()
    last = losses[-max(1, plan.steps // SHARE) :]
    return task.validate(), statistics.mean(last)


def round_to_nearest(optimizer: MARS) -> None:
    """Let the state be what bfloat16 would have kept of it."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step":
                value.copy_(value.to(torch.bfloat16))


def runs(args: argparse.Namespace) -> Iterator[tuple[Recipe, int, str]]:
    """Yield what is to be run: every seed of everything, before the next seed."""
    for seed in range(args.seeds):
        for recipe in RECIPES:
            for precision in OPTIONS:
                yield recipe, seed, precision


def key(recipe: Recipe, seed: int, precision: str) -> str:
    """Return what the file calls a run."""
    return f"{recipe.rule}, {precision}, seed {seed}"


def table(found: dict[str, list[float]], seeds: int) -> Iterator[str]:
    """Yield the lines of the table: means and standard deviations over seeds, and how
    far a seed's held-out loss is from that of the same seed with float32 state.
    """
    yield "rule | state | held out | training, last tenth | held out - float32's"
    for recipe in RECIPES:
        for precision in OPTIONS:
            both = [
                (found[key(recipe, seed, precision)], found[key(recipe, seed, FLOAT32)])
                for seed in range(seeds)
            ]
            held_out, training = zip(*(one for one, _ in both), strict=True)
            apart = [one[0] - base[0] for one, base in both]
            cells = [tiny.spread(held_out), tiny.spread(training)]
            cells.append("" if precision == FLOAT32 else tiny.spread(apart, "+"))
            yield " | ".join([recipe.rule, precision, *cells])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bf16_state",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="FILE", help="losses; continued")
    tiny.add_sizes(
        parser,
        layers=4,
        width=128,
        seq_len=128,
        steps=3000,
        batch=8,
        held_out=512,
    )
    add("--eager", action="store_true", help="compile nothing")
    args = parser.parse_args()
    about = tiny.sizes(args, [args.json]) | dict(eager=args.eager)
    done = tiny.known(args.json, about, losses={})
    print(one_line(describe("cpu")))
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"loss in nats a byte, mean ± standard deviation of {args.seeds} seeds")
    for recipe, seed, precision in runs(args):
        name = key(recipe, seed, precision)
        if name not in done["losses"]:
            plan = tiny.plan(
                args,
                seed,
                steps=args.steps,
                warmup=min(WARMUP, args.steps),
                compile=not args.eager,
            )
            found = train(args.data, plan, recipe, precision)
            done["losses"][name] = found
            write_json(args.json, done)
    print(*table(done["losses"], args.seeds), sep="\n")


if __name__ == "__main__":
    command(main)
