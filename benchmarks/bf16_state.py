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
import json
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks import checks
from benchmarks.pretrain.loop import Plan, Task
from marsopt import MARS
from marsopt.profiling.machine import describe, one_line
from train.data.token_files import open_raw
from train.engine.schedule import cosine
from train.errors import UserError, check_least, command
from train.files import write_json
from train.gpt2 import Shape

NUM_HEADS, VOCAB_SIZE = 4, 257
WARMUP, FLOOR = 100, 0.1  # of the learning rate, as configs.tiny has it
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


def plan(args: argparse.Namespace, seed: int) -> Plan:
    """Return how runs of a seed go."""
    return Plan(
        shape=Shape(
            args.layers, NUM_HEADS, args.width, args.seq_len, VOCAB_SIZE, False
        ),
        seq_len=args.seq_len,
        batch=args.batch,
        micro_batch=args.batch,
        steps=args.steps,
        warmup=min(WARMUP, args.steps),
        floor=FLOOR,
        held_out=args.held_out,
        interval=args.steps,
        seed=seed,
        device="cpu",
        dtype="float32",
        compile=not args.eager,
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
            cells = [spread(held_out), spread(training)]
            cells.append("" if precision == FLOAT32 else spread(apart, "+"))
            yield " | ".join([recipe.rule, precision, *cells])


def spread(values: list[float], sign: str = "") -> str:
    """Return mean and standard deviation."""
    return f"{statistics.mean(values):{sign}.4f} ± {statistics.stdev(values):.4f}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bf16_state",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--data", type=Path, default=Path("data/python"), metavar="FOLDER")
    add("--json", type=Path, required=True, metavar="FILE", help="losses; continued")
    add("--layers", type=int, default=4, help="(%(default)s, as configs.tiny)")
    add("--width", type=int, default=128, help="the same (%(default)s)")
    add("--seq-len", type=int, default=128, help="the same (%(default)s)")
    add("--steps", type=int, default=3000, help="of a run (%(default)s)")
    add("--batch", type=int, default=8, help="sequences a step (%(default)s)")
    add("--held-out", type=int, default=512, help="sequences (%(default)s)")
    add("--seeds", type=int, default=3, help="(%(default)s)")
    add("--eager", action="store_true", help="compile nothing")
    # fmt: on
    args = parser.parse_args()
    names = ["layers", "width", "seq_len", "steps", "batch", "held_out"]
    about = {name: getattr(args, name) for name in names}
    check_least(1, **about)
    about |= dict(eager=args.eager)
    if args.width % NUM_HEADS:
        raise UserError(
            f"got --width {args.width}, expected a multiple of {NUM_HEADS}, the number "
            "of heads: change it"
        )
    check_least(2, seeds=args.seeds)
    checks.outputs(args.json)
    done: dict[str, Any] = dict(about=about, losses={})
    if args.json.exists():
        done = json.loads(args.json.read_bytes())
        if done["about"] != about:
            raise UserError(
                f"got {args.json} of {done['about']}, expected {about}: give the same "
                "options, or another --json"
            )
    print(one_line(describe("cpu")))
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"loss in nats a byte, mean ± standard deviation of {args.seeds} seeds")
    for recipe, seed, precision in runs(args):
        name = key(recipe, seed, precision)
        if name not in done["losses"]:
            found = train(args.data, plan(args, seed), recipe, precision)
            done["losses"][name] = found
            write_json(args.json, done)
    print(*table(done["losses"], args.seeds), sep="\n")


if __name__ == "__main__":
    command(main)
