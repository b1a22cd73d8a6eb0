"""Newton-Schulz for every shape of matrix in a GPT-2, beside matrix products.

    python -m benchmarks.newton_schulz_shapes [--model gpt2-large] [--device cuda]
        [--layers N] [--rounds 5] [--json FILE]

All matrices of one shape are iterated together, as a step does it, in bfloat16. The
rate counts the operations of the iterations; it stands beside that of their products
alone (same shapes, batched) and that of one large square product.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import checks
from benchmarks.timing import spread
from marsopt import NewtonSchulz
from marsopt.profiling.gpt2 import EMBEDDINGS, MODELS, shapes
from marsopt.profiling.machine import describe, matmul_rate, one_line, timed, typical
from train.errors import command


def arguments() -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.newton_schulz_shapes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="gpt2-large", choices=MODELS)
    add("--layers", type=int, help="instead of the model's own number")
    add("--width", type=int, help="instead of the model's own")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--rounds", type=int, default=5, help="that count (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write everything measured here")
    args = parser.parse_args()
    checks.outputs(args.json)
    checks.device(args.device)
    return args


def products_rate(shape: tuple[int, int], count: int, device: str) -> float:
    """Return the FLOP/s of X X^T, G G and P X, the products of an iteration, over a
    batch of X.
    """
    short, long = sorted(shape)
    options: dict[str, Any] = dict(device=device, dtype=torch.bfloat16)
    x = torch.randn(count, short, long, **options)
    gram = torch.randn(count, short, short, **options)
    wide, square = torch.empty_like(x), torch.empty_like(gram)

    def products() -> None:
        torch.bmm(x, x.mT, out=square)
        torch.bmm(gram, gram, out=square)
        torch.bmm(gram, x, out=wide)

    flops = count * (4 * long * short**2 + 2 * short**3)
    return flops / typical(products)


def row(
    shape: tuple[int, int], count: int, device: str, num_rounds: int
) -> dict[str, Any]:
    """Return what ``count`` matrices of a shape take; FLOP/s and seconds."""
    ns = NewtonSchulz(dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    batch = torch.randn(count, *shape, device=device, generator=generator).unbind()
    call = partial(ns.many, batch)
    call()  # warms up
    times = spread([timed(call, device).seconds for _ in range(num_rounds)])
    flops = count * ns.on(device).num_flops(*shape)
    return dict(
        count=count,
        rows=shape[0],
        cols=shape[1],
        flops=flops,
        seconds=times._asdict(),
        rate=flops / times.median,
        products_rate=products_rate(shape, count, device),
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return everything, ready for JSON."""
    depth, width = MODELS[args.model]
    depth = depth if args.layers is None else args.layers
    tensors = shapes(depth, args.width or width)
    counts = Counter(
        shape
        for name, shape in tensors.items()
        if len(shape) == 2 and name not in EMBEDDINGS
    )
    rows = [row(s, n, args.device, max(2, args.rounds)) for s, n in counts.items()]
    return dict(
        model=args.model,
        layers=depth,
        machine=describe(args.device),
        matmul_rate=matmul_rate(args.device),
        rows=rows,
    )


def table(found: dict[str, Any]) -> str:
    """Return it as text."""
    whole = found["matmul_rate"]
    lines = [
        f"{found['model']}, {found['layers']} layers, bfloat16",
        one_line(found["machine"]),
        f"one square product: {whole / 1e12:.4g} TFLOP/s",
        f"{'matrices':24}{'ms':>10}{'TFLOP/s':>10}{'of products':>13}{'of square':>11}",
    ]
    for r in found["rows"]:
        what = f"{r['count']} x ({r['rows']}, {r['cols']})"
        lines.append(
            f"{what:24}{1e3 * r['seconds']['median']:10.2f}{r['rate'] / 1e12:10.4g}"
            f"{r['rate'] / r['products_rate']:13.0%}{r['rate'] / whole:11.0%}"
        )
    flops = sum(r["flops"] for r in found["rows"])
    seconds = sum(r["seconds"]["median"] for r in found["rows"])
    lines.append(
        f"{'all':24}{1e3 * seconds:10.2f}{flops / seconds / 1e12:10.4g}"
        f"{'':13}{flops / seconds / whole:11.0%}"
    )
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    args = arguments()
    found = measure(args)
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    command(main)
