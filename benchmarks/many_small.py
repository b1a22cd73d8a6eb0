"""Thousands of small parameters: construction with the first step, and later steps,
beside torch's foreach AdamW. They take turns; medians.

    python -m benchmarks.many_small [--num 10000] [--shapes 4] [--compile]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from benchmarks.timing import spread, take_turns
from marsopt import MARS
from marsopt.profiling.machine import describe, one_line, seconds


def parameters(num: int, num_shapes: int) -> list[nn.Parameter]:
    """Return parameters with gradients, whose shapes are (1, 1) to (.., 20)."""
    torch.manual_seed(0)
    found = []
    for i in range(num):
        n = i % num_shapes
        p = nn.Parameter(torch.randn(n // 20 + 1, n % 20 + 1))
        p.grad = torch.randn_like(p)
        found.append(p)
    return found


class Started:
    """An optimizer, and how long it took to make it and its first step."""

    def __init__(self, make: Callable, params: Sequence[nn.Parameter]) -> None:
        def start() -> None:
            self.optimizer = make(params)
            self.optimizer.step()

        self.seconds = seconds(start, "cpu")


def measure(
    num: int, num_shapes: int, num_steps: int, compile: bool
) -> dict[str, tuple[float, float]]:
    """Return seconds until after the first step, and of a step, by optimizer."""
    makes = {
        "MARS-AdamW": partial(MARS, compile=compile),
        "torch AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    }
    for make in makes.values():  # what is imported at the first time
        Started(make, parameters(2, 1))
    started = {
        name: Started(make, parameters(num, num_shapes)) for name, make in makes.items()
    }
    turns = {
        name: partial(seconds, one.optimizer.step, "cpu")
        for name, one in started.items()
    }
    times = take_turns(turns, num_steps)
    return {
        name: (one.seconds, spread(times[name]).median) for name, one in started.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--shapes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    found = measure(args.num, args.shapes, args.steps, args.compile)
    print(f"{args.num} parameters of {args.shapes} shapes; {one_line(describe('cpu'))}")
    for name, (start, step) in found.items():
        print(f"{name:24} until the first step {start:6.2f} s   step {step:7.3f} s")


if __name__ == "__main__":
    main()
