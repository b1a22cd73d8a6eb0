"""Time and memory of an optimizer's step, with the zero_grad after it: our rules,
torch's, and the peers'.

    python -m benchmarks.step --model gpt2-small [--layers N] [--only mars-adamw torch]
                              [--json FILE]

One process, GPT-2's own tensors, the same gradients for all. Contenders take turns
step by step, and ratios are between steps of one round. Peers are optional: the
group peers of pyproject.toml.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from benchmarks import checks, memory, peers, table
from benchmarks.contenders import OURS, REFERENCE, TORCH, Contender
from benchmarks.measure import plan, run
from marsopt.profiling.gpt2 import MODELS, VOCAB_SIZE, shapes
from marsopt.profiling.machine import describe
from marsopt.rules.registry import canonical
from train.errors import UserError, command

FAMILIES = ("ours", "torch", "peers")


def arguments() -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"NAME: {', '.join(FAMILIES)}, or one of\n  "
        + "\n  ".join(c.key for c in [REFERENCE, *OURS, *TORCH, *peers.table()]),
    )
    add = parser.add_argument
    add("--model", default="gpt2-small", choices=MODELS)
    add("--layers", type=int, help="instead of the model's own number")
    add("--width", type=int, help="instead of the model's own")
    add("--vocab", type=int, help="instead of the model's own")
    # fmt: off
    add("--only", nargs="+", action="extend", metavar="NAME",
        help="these, beside the reference")
    add("--without", nargs="+", action="extend", metavar="NAME", default=[],
        help="all but these")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", default="float32", choices=["float32", "bfloat16"],
        help="of parameters and gradients; our state is float32")
    # fmt: on
    add("--rounds", type=int, default=9, help="steps of each that count (9)")
    add("--memory", type=float, help="GiB to plan groups with (60%% of the machine's)")
    add("--eager", action="store_true", help="do not compile our rules")
    add("--json", type=Path, help="write everything measured here")
    args = parser.parse_args()
    least_of = dict(layers=0, width=1, vocab=1, rounds=2, memory=0.01)
    for name, least in least_of.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(
                f"got --{name} {value}, expected at least {least}: give a larger number"
            )
    checks.outputs(args.json)
    checks.device(args.device)
    return args


def choose(
    every: Sequence[Contender], only: Sequence[str] | None, without: Sequence[str]
) -> list[Contender]:
    """Return what was asked for, by key or family, and the reference.

    Raises:
        UserError: an unknown name.
    """
    without = [*map(canonical, without)]
    only = None if only is None else [*map(canonical, only)]
    known = {*FAMILIES, *(c.key for c in every)}
    unknown = [name for name in [*(only or []), *without] if name not in known]
    if unknown:
        raise UserError(
            f"got contender {unknown[0]!r}, expected one that is known: --help lists "
            "them"
        )

    def named(c: Contender, names: Sequence[str]) -> bool:
        return c.key in names or c.family in names

    return [
        c
        for c in every
        if c is REFERENCE
        or ((only is None or named(c, only)) and not named(c, without))
    ]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that was asked for, ready for JSON."""
    every = [REFERENCE, *OURS, *TORCH, *peers.table()]
    chosen = choose(every, args.only, args.without)
    depth, width = MODELS[args.model]
    tensors = shapes(
        depth if args.layers is None else args.layers,
        width if args.width is None else args.width,
        VOCAB_SIZE if args.vocab is None else args.vocab,
    )
    num_params = sum(map(math.prod, tensors.values()))
    device = torch.device(args.device)
    budget = memory.budget(device)
    if args.memory is not None:
        budget = int(args.memory * 2**30)
    groups = plan([c for c in chosen if not c.lacks], num_params, budget)
    with fresh_cache():  # or compile times would be those of a second run
        rows = run(
            groups,
            tensors,
            device,
            num_rounds=args.rounds,
            compile=not args.eager,
            dtype=getattr(torch, args.dtype),
            tell=lambda text: print(text, file=sys.stderr, flush=True),
        )
    changed = {"layers": args.layers, "width": args.width, "vocab": args.vocab}
    own = [f"{name} {value}" for name, value in changed.items() if value is not None]
    return dict(
        model=", ".join([args.model, *own]),
        num_params=num_params,
        num_tensors=len(tensors),
        num_rounds=args.rounds,
        num_groups=len(groups),
        compiled=not args.eager,
        dtype=args.dtype,
        reference=REFERENCE.key,
        machine=describe(args.device),
        rows=[table.values(row, num_params) for row in rows],
        missing={c.title: c.lacks for c in chosen if c.lacks},
    )


def main() -> None:
    """Run the command."""
    args = arguments()
    found = measure(args)
    print(table.table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    command(main)
