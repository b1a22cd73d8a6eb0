"""Newton-Schulz: error and time of every precision and form that is offered.

    python -m benchmarks.newton_schulz [--device cuda] [--width 768] [--batch 12]

Error: relative, in the Frobenius norm, against float64 with the same polynomial, worst
of three matrices of GPT-2's fc shape (4 width x width; no wider than 256, for the sake
of float64), Gaussian and with singular values spread over logarithms down to 1e-4 and
1e-8. Time: a list of matrices of the whole width, medians of interleaved rounds; the
rate counts the operations that the form does.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import spread, take_turns
from marsopt import NewtonSchulz
from marsopt.profiling.machine import describe, one_line, seconds

VARIANTS = {
    "bfloat16 (default)": NewtonSchulz(),
    "float16": NewtonSchulz(dtype=torch.float16),
    "float32": NewtonSchulz(dtype=torch.float32),
    "float32, Gram": NewtonSchulz(dtype=torch.float32, gram=True),
}
SPECTRA = {"gaussian": None, "to 1e-4": 1e-4, "to 1e-8": 1e-8}


def matrix(rows: int, cols: int, smallest: float | None, seed: int) -> Tensor:
    """Return a random float64 matrix; ``smallest`` is its smallest singular value."""
    g = torch.Generator().manual_seed(seed)
    m = torch.randn(rows, cols, generator=g, dtype=torch.float64)
    if smallest is None:
        return m
    u, _, vh = torch.linalg.svd(m, full_matrices=False)
    s = torch.logspace(torch.tensor(smallest).log10().item(), 0, min(rows, cols))
    return (u * s.double()) @ vh


def error(ns: NewtonSchulz, width: int, smallest: float | None, device: str) -> float:
    """Return the worst relative error over three seeds."""
    exact = NewtonSchulz(dtype=torch.float64)
    worst = 0.0
    for seed in range(3):
        m = matrix(4 * width, width, smallest, seed)
        want = exact(m)
        got = ns(m.float().to(device)).double().cpu()
        worst = max(worst, float((got - want).norm() / want.norm()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    shape = (args.batch, 4 * args.width, args.width)
    batch = torch.randn(shape, device=args.device).unbind()
    steps = {
        name: partial(seconds, partial(ns.many, batch), args.device)
        for name, ns in VARIANTS.items()
    }
    take_turns(steps, 1)  # warms up
    times = take_turns(steps, args.rounds)

    print(one_line(describe(args.device)))
    print(f"{args.batch} matrices {4 * args.width} x {args.width}, 5 iterations")
    heads = "".join(f"{name:>11}" for name in SPECTRA)
    print(f"{'':20}{heads}{'ms':>10}{'GFLOP':>9}{'GFLOP/s':>10}")
    for name, ns in VARIANTS.items():
        errors = "".join(
            f"{error(ns, min(args.width, 256), smallest, args.device):11.1e}"
            for smallest in SPECTRA.values()
        )
        median = spread(times[name]).median
        flops = args.batch * ns.num_flops(4 * args.width, args.width) / 1e9
        print(
            f"{name:20}{errors}{1e3 * median:10.1f}{flops:9.1f}{flops / median:10.1f}"
        )


if __name__ == "__main__":
    main()
