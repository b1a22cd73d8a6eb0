"""Newton-Schulz: error and time of every precision that is offered.

    python -m benchmarks.newton_schulz [--device cuda] [--width 768] [--batch 12]

Rounding: relative, in the Frobenius norm, against float64 with the same polynomials,
worst of three matrices of GPT-2's fc shape (4 width x width; no wider than 256, for the
sake of float64), Gaussian and with singular values spread over logarithms down to 1e-4
and 1e-8. Polar: the same of the distance from the exact polar factor, which is what
polynomials differ in. Time: a list of matrices of the whole width, medians
of interleaved rounds; the rate counts the operations. float16 is not
timed on a CPU.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import spread, take_turns
from marsopt import NewtonSchulz, polar_factor
from marsopt.profiling.machine import describe, one_line, seconds

BF16, FP32 = dict(dtype=torch.bfloat16), dict(dtype=torch.float32)
VARIANTS = {
    "default here": NewtonSchulz(),
    "bfloat16": NewtonSchulz(**BF16),
    "float16": NewtonSchulz(dtype=torch.float16),
    "float32": NewtonSchulz(**FP32),
    "bf16, Polar Express": NewtonSchulz(**BF16, coefficients="polar_express"),
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


def errors(
    ns: NewtonSchulz, width: int, smallest: float | None, device: str
) -> tuple[float, float]:
    """Return the worst of three seeds: what rounding does, and the distance from the
    polar factor.
    """
    exact = replace(ns, dtype=torch.float64)
    worst = [0.0, 0.0]
    for seed in range(3):
        m = matrix(4 * width, width, smallest, seed)
        got = ns(m.float().to(device)).double().cpu()
        for i, want in enumerate((exact(m), polar_factor(m))):
            worst[i] = max(worst[i], float((got - want).norm() / want.norm()))
    return worst[0], worst[1]


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
        if args.device != "cpu" or ns.dtype != torch.float16  # seconds a matrix
    }
    take_turns(steps, 1)  # warms up
    times = take_turns(steps, args.rounds)

    print(one_line(describe(args.device)))
    print(f"{args.batch} matrices {4 * args.width} x {args.width}")
    heads = "".join(f"{name:>10}" for name in SPECTRA)
    print(f"{'':20}{'rounding':>10}{'':20}  {'polar':>10}")
    heads += "  " + heads
    print(f"{'':20}{heads}{'ms':>9}{'GFLOP':>8}{'GFLOP/s':>9}")
    for name, ns in VARIANTS.items():
        found = [
            errors(ns, min(args.width, 256), smallest, args.device)
            for smallest in SPECTRA.values()
        ]
        rounding = "".join(f"{one:10.1e}" for one, _ in found)
        polar = "".join(f"{one:10.2f}" for _, one in found)
        line = f"{name:20}{rounding}  {polar}"
        if name in times:
            median, shape = spread(times[name]).median, (4 * args.width, args.width)
            flops = args.batch * ns.on(args.device).num_flops(*shape) / 1e9
            line += f"{1e3 * median:9.1f}{flops:8.1f}{flops / median:9.1f}"
        print(line)


if __name__ == "__main__":
    main()
