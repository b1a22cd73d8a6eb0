"""The host's share of a step on a CPU.

    python -m benchmarks.host_calls [--num 12] [--shape 768 3072] [--steps 40]

First tensors of 16 x 16, which a step copies into rows and out: arithmetic
vanishes, and what is left is the host's. Then tensors of ``--shape``, whose data push
out of the caches what the host needs. MARS-AdamW with both clips beside
clip_grad_norm_ and torch's fused AdamW; they take turns, step by step; medians, and
medians of ratios within a round.
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

REFERENCE = "clip_grad_norm_ + AdamW fused"
TINY = (16, 16)


def contenders(num: int, shape: Sequence[int]) -> dict[str, Callable[[], object]]:
    """Return the steps of optimizers over ``num`` tensors, with gradients that stay."""

    def parameters() -> list[nn.Parameter]:
        torch.manual_seed(0)
        found = [nn.Parameter(0.02 * torch.randn(*shape)) for _ in range(num)]
        for p in found:
            p.grad = 1e-3 * torch.randn_like(p)
        return found

    params = parameters()
    adamw = torch.optim.AdamW(params, fused=True)

    def reference() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        adamw.step()

    return {REFERENCE: reference, "MARS-AdamW": MARS(parameters(), max_norm=1.0).step}


def measure(
    num: int, shape: Sequence[int], num_steps: int
) -> dict[str, dict[str, list[float]]]:
    """Return seconds of every step, by what was stepped and by optimizer."""
    found = {}
    for sizes in (TINY, shape):
        name = f"{num} tensors of {' x '.join(map(str, sizes))}"
        turns = {
            key: partial(seconds, step, "cpu")
            for key, step in contenders(num, sizes).items()
        }
        take_turns(turns, 3)  # what is compiled, made, found
        found[name] = take_turns(turns, num_steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=12)
    parser.add_argument("--shape", type=int, nargs="+", default=[768, 3072])
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    print(one_line(describe("cpu")))
    for name, times in measure(args.num, args.shape, args.steps).items():
        print(name)
        for key, row in times.items():
            ratios = [a / b for a, b in zip(row, times[REFERENCE], strict=True)]
            print(
                f"  {key:30} {1e3 * spread(row).median:8.3f} ms   "
                f"ratio {spread(ratios).median:5.2f}"
            )


if __name__ == "__main__":
    main()
