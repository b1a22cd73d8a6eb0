"""Newton-Schulz: rounding error and FLOPs of every precision and form.

    python -m benchmarks.newton_schulz [--shape 256 1024] [--device cuda]
        [--momentum FILE]

Errors are relative, in the Frobenius norm, against float64 with the same polynomials,
for matrices of five spectra. FLOPs are those of the matrix, beside a Gram matrix in
every step. FILE is the ``state_dict()`` of a matrix rule, as torch.save writes it: its
column has the worst of all momentum matrices. Times: benchmarks.newton_schulz_shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from marsopt import NewtonSchulz
from marsopt.profiling.machine import describe, one_line
from marsopt.rules.newton_schulz import FORMS

STEPS = (1, 2, 3, 5)  # on one Gram matrix, where a precision allows several
SPECTRA = ("random", "low rank", "6 decades", "3 decades", "one large")


def matrix(spectrum: str, rows: int, cols: int) -> Tensor:
    """Return a float64 matrix (rows, cols) of one of the spectra.

    "low rank" is a random matrix of a sixteenth of the rank, and 0.001 of noise; "one
    large" has singular values of 1 and 0.01; in 3 or 6 decades they lie on logarithms.
    """
    short = min(rows, cols)
    g = torch.Generator().manual_seed(0)
    own = dict(generator=g, dtype=torch.float64)
    noise, rank = torch.randn(rows, cols, **own), max(1, short // 16)
    if spectrum == "random":
        return noise
    if spectrum == "low rank":
        low = torch.randn(rows, rank, **own) @ torch.randn(rank, cols, **own)
        return low + 1e-3 * noise
    u, _, vh = torch.linalg.svd(noise, full_matrices=False)
    if spectrum == "one large":
        s = torch.full((short,), 0.01, dtype=torch.float64)
        s[0] = 1
    else:
        s = torch.logspace(0, -int(spectrum[0]), short, dtype=torch.float64)
    return (u * s) @ vh


def variants() -> Iterator[tuple[str, NewtonSchulz]]:
    """Yield every precision and form, with the form in force."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name, ns = str(dtype).removeprefix("torch."), NewtonSchulz(dtype=dtype)
        if dtype not in FORMS:
            yield name, ns
            continue
        for num in STEPS:
            default = " *" if num == max(FORMS[dtype]) else ""
            with patch.dict(FORMS, {dtype: (num,)}):
                yield f"{name}, {num} steps on a Gram matrix{default}", ns


def worst(ns: NewtonSchulz, pairs: list[tuple[Tensor, Tensor]], device: str) -> float:
    """Return the largest error over matrices and their factors in float64."""
    errors = []
    for m, exact in pairs:
        got = ns(m.float().to(device)).double().cpu()
        errors.append(float((got - exact).norm() / exact.norm()))
    return max(errors)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", type=int, nargs=2, default=(256, 1024))
    parser.add_argument("--momentum", type=Path, metavar="FILE")
    args = parser.parse_args()

    given = {name: [matrix(name, *args.shape)] for name in SPECTRA}
    if args.momentum is not None:
        state = torch.load(args.momentum)["state"].values()
        found = [own["momentum_buffer"] for own in state if "momentum_buffer" in own]
        given["momentum"] = [m.double() for m in found if m.ndim == 2]
    exact = NewtonSchulz(dtype=torch.float64)
    columns = {name: [(m, exact(m)) for m in ms] for name, ms in given.items()}

    print(one_line(describe(args.device)))
    print(f"{args.shape[0]} x {args.shape[1]}; * = by default")
    print(f"{'':36}{'FLOPs':>7}", *(f"{name:>10}" for name in columns))
    standard = NewtonSchulz().num_flops(*args.shape)
    for name, ns in variants():
        share = ns.num_flops(*args.shape) / standard
        errors = [worst(ns, pairs, args.device) for pairs in columns.values()]
        print(f"{name:36}{share:7.2f}", *(f"{e:10.1e}" for e in errors), flush=True)


if __name__ == "__main__":
    main()
