"""Newton-Schulz for every shape of matrix in a model, beside matrix products.

    python -m benchmarks.newton_schulz_shapes [--model gpt2-large ...] [--device cuda]
        [--layers N] [--rounds 5] [--json FILE]

All matrices of one shape are iterated together, as a step does it: in bfloat16, in
float16 with a Gram matrix in every step, and in float16 as by default; these take
turns. The rate counts the operations of the form; it stands beside that of the products
of the standard form alone (bfloat16, same shapes, batched) and that of one large square
product.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import checks
from benchmarks.timing import spread, take_turns
from marsopt import NewtonSchulz
from marsopt.profiling.machine import describe, matmul_rate, one_line, timed, typical
from marsopt.rules.newton_schulz import FORMS
from train.errors import command
from train.forecast.models import MODELS

STANDARD = "bfloat16"
# by title: a precision, and the forms that it may take
FORMS_OF = {
    STANDARD: (torch.bfloat16, (1,)),
    "float16, standard": (torch.float16, (1,)),
    "float16": (torch.float16, FORMS[torch.float16]),
}


def arguments() -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.newton_schulz_shapes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", nargs="+", default=["gpt2-large"], choices=MODELS)
    add(
        "--layers", type=int, help="the first of the model's own, as one owner has them"
    )
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


def rows_of(
    shape: tuple[int, int], count: int, device: str, num_rounds: int
) -> list[dict[str, Any]]:
    """Return what ``count`` matrices of a shape take in each form; FLOP/s, seconds."""
    generator = torch.Generator(device).manual_seed(0)
    batch = torch.randn(count, *shape, device=device, generator=generator).unbind()
    flops = {}

    def seconds(title: str) -> float:
        dtype, forms = FORMS_OF[title]
        with patch.dict(FORMS, {dtype: forms}):
            ns = NewtonSchulz(dtype=dtype)
            flops[title] = count * ns.num_flops(*shape)
            return timed(lambda: ns.many(batch), device).seconds

    steps = {title: partial(seconds, title) for title in FORMS_OF}
    take_turns(steps, 1)  # warms up
    found = take_turns(steps, num_rounds)
    products = products_rate(shape, count, device)
    return [
        dict(
            form=title,
            count=count,
            rows=shape[0],
            cols=shape[1],
            flops=flops[title],
            seconds=spread(times)._asdict(),
            rate=flops[title] / spread(times).median,
            products_rate=products,
        )
        for title, times in found.items()
    ]


def matrices(model: str, layers: int | None, width: int | None) -> Counter:
    """Return the shapes of a model's matrices, with their numbers."""
    chosen = MODELS[model]
    (whole,) = chosen.shapes["norm"]
    return Counter(
        tuple(size * (width or whole) // whole for size in shape)
        for name, shape in chosen.shapes.items()
        if len(shape) == 2
        and name not in chosen.elementwise
        and (layers is None or int(name.split(".")[0]) < layers)
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return everything, ready for JSON."""
    rows = []
    for model in args.model:
        for shape, num in matrices(model, args.layers, args.width).items():
            found = rows_of(shape, num, args.device, max(2, args.rounds))
            rows += [dict(model=model, **row) for row in found]
    return dict(
        layers=args.layers,
        machine=describe(args.device),
        matmul_rate=matmul_rate(args.device),
        rows=rows,
    )


def line(what: str, form: str, rows: list[dict[str, Any]], whole: float) -> str:
    """Return a line of the table, for rows of one form together."""
    seconds = sum(row["seconds"]["median"] for row in rows)
    rate = sum(row["flops"] for row in rows) / seconds
    of_products = f"{rate / rows[0]['products_rate']:.0%}" if len(rows) == 1 else ""
    return (
        f"{what:24}{form:20}{1e3 * seconds:9.2f}{rate / 1e12:10.4g}"
        f"{of_products:>13}{rate / whole:11.0%}"
    )


def table(found: dict[str, Any]) -> str:
    """Return it as text."""
    whole, every = found["matmul_rate"], found["rows"]
    head = f"{'ms':>9}{'TFLOP/s':>10}{'of products':>13}{'of square':>11}"
    lines = [
        one_line(found["machine"]),
        f"one square product in bfloat16: {whole / 1e12:.4g} TFLOP/s",
        f"{'matrices':24}{'precision':20}{head}",
    ]
    for model in dict.fromkeys(row["model"] for row in every):
        rows = [row for row in every if row["model"] == model]
        lines.append(model)
        for r in rows:
            what = f"{r['count']} x ({r['rows']}, {r['cols']})"
            lines.append(line(what, r["form"], [r], whole))
        for form in FORMS_OF:
            own = [row for row in rows if row["form"] == form]
            lines.append(line("all", form, own, whole))
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
