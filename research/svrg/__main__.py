"""SVRG with a coefficient beside MARS and AdamW, on a GPT-2 so small that the gradient
of its whole training set can be afforded; and how noisy their gradients are.

    OMP_NUM_THREADS=1 python -m research.svrg [--data data/python]

The folder holds train.bin and val.bin, as train.prepare makes them. Each method takes
the rate with the lowest held-out loss of seed 0, of rates that differ by factors of 2
and go on until the best has a neighbour on both sides.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

from marsopt.profiling.machine import describe, one_line
from research.svrg.errors import errors
from research.svrg.loop import BETAS, SEQ_LEN, Method, Point, Run, Size
from train.errors import command
from train.gpt2 import Shape

GAMMA, FIRST_LR, SEEDS = 0.025, 2e-3, 3
FULL = Size(Shape(2, 4, 48, SEQ_LEN, 257, False), 8, 32, 256, 9)
QUICK = Size(Shape(1, 1, 8, SEQ_LEN, 257, False), 2, 4, 4, 3)
PLAIN = Method("MARS-AdamW, gamma 0")
METHODS = [
    Method("AdamW", rule="adamw", correction=None),
    PLAIN,
    Method("MARS-AdamW, approximate", gamma=GAMMA),
    Method("MARS-AdamW, transport", correction="transport", gamma=0.1),
    Method("SVRG, alpha 0.25", correction="svrg", gamma=0.25),
    Method("SVRG, alpha 0.5", correction="svrg", gamma=0.5),
    Method("SVRG, alpha 1", correction="svrg", gamma=1.0),
    Method("SVRG, alpha 0.5 to 0", correction="svrg", gamma=0.5, decays=True),
]


def tuned(train: Callable[[float, int], list[Point]]) -> tuple[float, int, list]:
    """Return the best rate, how many were tried, and the points of every seed at it."""
    runs = {i: train(FIRST_LR * 2.0**i, 0) for i in (-1, 0, 1)}
    while True:
        best = min(runs, key=lambda i: runs[i][-1].held_out)
        if min(runs) < best < max(runs):
            break
        i = best + (1 if best == max(runs) else -1)
        runs[i] = train(FIRST_LR * 2.0**i, 0)
    lr = FIRST_LR * 2.0**best
    return lr, len(runs), [runs[best], *(train(lr, seed) for seed in range(1, SEEDS))]


def spread(points: list[Point]) -> list[str]:
    """Return mean and standard deviation of both losses over seeds."""
    each = [p.held_out for p in points], [p.train for p in points]
    return [f"{statistics.mean(x):.3f} ± {statistics.stdev(x):.3f}" for x in each]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/python"))
    parser.add_argument("--quick", action="store_true", help="sizes that show nothing")
    args = parser.parse_args()
    size = QUICK if args.quick else FULL
    budget, rates = size.epochs * size.num_batches, {}
    print(one_line(describe("cpu")))
    print(
        f"loss, mean ± standard deviation of {SEEDS} seeds, at the end: {budget} steps;"
    )
    print(f"and when {budget} gradients of a batch were taken")
    print("method | lr (tried) | gradients | held out | training | the same two then")
    for method in METHODS:

        def train(lr: float, seed: int, method=method) -> list[Point]:
            run = Run(args.data, size, method, lr, seed)
            for _ in run.steps():
                pass
            return run.points

        lr, num_tried, runs = tuned(train)
        ends = [points[-1] for points in runs]
        equal = [
            [p for p in points if p.num_gradients <= budget][-1] for points in runs
        ]
        cells = f"{lr:g} ({num_tried})", str(ends[0].num_gradients)
        print(
            method.title, *cells, *spread(ends), *spread(equal), sep=" | ", flush=True
        )
        rates[method] = lr

    print(f"squared error of c, over that of g, along {PLAIN.title}, seed 0")
    run = Run(args.data, size, PLAIN, rates[PLAIN], seed=0)
    for i, (where, ratios) in enumerate(errors(run, BETAS[0], GAMMA)):
        if i == 0:
            print("before", *ratios, sep=" | ")
        print(where, *(f"{ratio:.2f}" for ratio in ratios.values()), sep=" | ")


if __name__ == "__main__":
    command(main)
