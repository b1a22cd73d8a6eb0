"""The GPU path, rehearsed without a GPU, in four parts.

    python -m benchmarks.gpu.rehearsal PART [CASE ...] [--workers N]
        [--out runs/gpu/rehearsal] [--json FILE]

lowered      steps over fake CUDA tensors, lowered to Triton: launches, bytes and
             recompiles; their kernels compiled for an H100: registers, spills, width
             of loads and stores
interpreted  the same kernels, interpreted on the CPU, beside eager steps
host         what crosses between host and device in a step (needs no Triton)
ranks        collectives of one rank among many, beside the forecast (no Triton)

A CASE is a pattern of names, as 'mars-adamw/*/gpt2-small/*'; --names lists them.
Without one: every case, but for those of the test suite alone. Triton is needed beside
torch: `make gpu REHEARSAL=1` installs it apart. What --out has is not done again while
no source has changed. A fault ends in exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import filter as matching
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.gpu.rehearsal.rehearse import Row, has_triton, part_of, rehearse
from benchmarks.gpu.tables import markdown
from train.errors import UserError, check_least, command
from train.files import write_json

PARTS = ("lowered", "interpreted", "host", "ranks")
WITHOUT_TRITON = ("host", "ranks")


def chosen(part: str, patterns: Sequence[str]) -> list[str]:
    """Return the names of a part's cases that ``patterns`` ask for.

    Raises:
        UserError: a pattern of no case.
    """
    names = part_of(part).NAMES
    for pattern in patterns:
        if not matching(names, pattern):
            raise UserError(
                f"got the case {pattern!r}, expected a pattern of names like "
                f"{names[0]!r}: --names lists those of {part}"
            )
    if not patterns:
        return [*part_of(part).DEFAULT]
    return [name for pattern in patterns for name in matching(names, pattern)]


def table(part: str, rows: Sequence[Row]) -> str:
    """Return the rows as a table, and below it how many faults they have."""
    lines = [dict(case=row["name"]) | part_of(part).columns(row) for row in rows]
    shown = markdown([*lines[0]], [[*line.values()] for line in lines])
    num_faults = sum(len(row["faults"]) for row in rows)
    triton = f", triton {version('triton')}" if has_triton() else ""
    return (
        f"{shown}\n\n{len(rows)} cases, {num_faults} faults; "
        f"torch {torch.__version__}{triton}"
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("part", choices=PARTS, metavar="PART")
    add("cases", nargs="*", metavar="CASE", help="patterns of names")
    add("--names", action="store_true", help="list the cases' names, and end")
    add("--workers", type=int, default=1, help="processes (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="keep every row there")
    add("--json", type=Path, metavar="FILE", help="everything")
    args = parser.parse_args(argv)
    check_least(1, workers=args.workers)
    if args.part not in WITHOUT_TRITON and not has_triton():
        raise UserError(
            "got no Triton, expected it on Python's path: run make gpu REHEARSAL=1, "
            "which installs it apart"
        )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        SystemExit: with status 1, for a fault.
    """
    args = arguments(argv)
    names = chosen(args.part, args.cases)
    if args.names:
        print("\n".join(names))
        return
    play, rows = partial(rehearse, part=args.part, out=args.out), []
    with contextlib.ExitStack() as stack:
        played = map(play, names)
        if args.workers > 1:
            pool = ProcessPoolExecutor(args.workers, get_context("spawn"))
            played = stack.enter_context(pool).map(play, names)
        for number, row in enumerate(played, 1):
            rows.append(row)
            faults = "; ".join(row["faults"]) or "as it should be"
            told = f"[{number} of {len(names)}] {row['name']}: {faults}"
            print(told, file=sys.stderr, flush=True)
    if args.json is not None:
        write_json(args.json, rows)
    print(table(args.part, rows))
    if any(row["faults"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    command(main)
