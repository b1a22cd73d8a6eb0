"""The GPU path, rehearsed without a GPU: steps of MARS over fake CUDA tensors are
lowered to Triton, and every kernel over stacks is compiled for an H100. Nothing is run.

    python -m benchmarks.gpu.rehearsal [--rules RULE ...] [--corrections KIND ...]
        [--models MODEL ...] [--dtypes DTYPE ...] [--no-binaries] [--workers N]
        [--out runs/gpu/rehearsal] [--json FILE]

Triton is needed beside torch: `make gpu REHEARSAL=1` installs it apart. What --out has
is not done again while no source has changed, so that a run that was cut goes on. A
fault (a byte beyond the floor, a recompile, a spill, a narrow load) ends in exit
status 1.
`python -m benchmarks.gpu.rehearsal.tables FILE` prints the tables again from --json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.gpu.rehearsal.cases import ALL_MODELS, DTYPES, NONE, cases
from benchmarks.gpu.rehearsal.faults import faults
from benchmarks.gpu.rehearsal.rehearse import rehearse
from benchmarks.gpu.rehearsal.tables import report
from marsopt.rules.registry import CORRECTIONS, REGISTRY, canonical
from train.errors import UserError, check_least, command
from train.files import write_json


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--rules", nargs="+", type=canonical, choices=list(REGISTRY), metavar="RULE",
        default=list(REGISTRY), help="(default: all)")
    every = [*CORRECTIONS, NONE]
    add("--corrections", nargs="+", choices=every, default=every, help="(default: all)")
    add("--models", nargs="+", choices=ALL_MODELS, default=ALL_MODELS,
        help="(default: all)")
    add("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES),
        help="of parameters and gradients; the state is in float32 (default: both)")
    add("--no-binaries", action="store_true", help="lower, and compile nothing")
    add("--workers", type=int, default=2, help="processes (%(default)s)")
    add("--out", type=Path, default=Path("runs/gpu/rehearsal"), help="(%(default)s)")
    add("--json", type=Path, metavar="FILE", help="everything")
    # fmt: on
    args = parser.parse_args(argv)
    check_least(1, workers=args.workers)
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            "got no Triton, expected it on Python's path: run make gpu REHEARSAL=1, "
            "which installs it apart"
        )
    return args


def main() -> None:
    """Run the command."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [
        case
        for case in cases(args.models, args.dtypes)
        if case.rule in args.rules and (case.correction or NONE) in args.corrections
    ]
    if not chosen:
        raise UserError(
            f"got --rules {' '.join(args.rules)} with --corrections "
            f"{' '.join(args.corrections)}, expected corrections that one of them has: "
            "leave one option out"
        )
    do, found = partial(rehearse, binaries=not args.no_binaries, out=args.out), []
    with contextlib.ExitStack() as stack:
        each = map(do, chosen)
        if args.workers > 1:
            pool = ProcessPoolExecutor(args.workers, get_context("spawn"))
            each = stack.enter_context(pool).map(do, chosen)
        for number, row in enumerate(each, 1):
            found.append(row)
            said = "; ".join(faults(row)) or "as it should be"
            print(
                f"[{number} of {len(chosen)}] {row['name']}, {row['model']}, "
                f"{row['dtype']}: {said}",
                file=sys.stderr,
                flush=True,
            )
    made = dict(torch=torch.__version__, triton=version("triton"), device="sm_90")
    if args.json is not None:
        write_json(args.json, dict(made_with=made, cases=found))
    print("bytes a parameter, from the Triton source; registers and widths from SASS\n")
    print(report(made, found))
    if any(any(faults(row)) for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    command(main)
