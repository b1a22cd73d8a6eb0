"""What can be verified of the GPU path without a GPU: graphs and bytes.

    python -m benchmarks.gpu.rehearsal [CASE ...] [--workers N] [--json FILE]

Steps over fake CUDA tensors of an H100 are lowered to Triton, and counted: graphs,
their calls, launches, the bytes that the loads and stores of the source move beside the
floor. Kernels over stacks are compiled for sm_90: registers, spills, width of loads and
stores. A fault ends in exit status 1.

A CASE is a pattern of RULE/CORRECTION/MODEL/DTYPE, as 'mars-adamw/*/gpt2-small/*';
with /lowered behind it nothing is compiled. Triton is needed beside torch: `make gpu
REHEARSAL=1` installs it apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import filter as matching
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu.rehearsal.steps import CASES, line, play
from train.errors import UserError, check_least, command
from train.files import write_json


def chosen(patterns: Sequence[str]) -> list[str]:
    """Return the names of the cases that ``patterns`` ask for.

    Raises:
        UserError: a pattern of no case.
    """
    for pattern in patterns:
        if not matching(CASES, pattern):
            raise UserError(
                f"got the case {pattern!r}, expected a pattern of names like "
                f"{next(iter(CASES))!r}: give a rule, a correction, a model, a dtype"
            )
    if not patterns:
        return [n for n, case in CASES.items() if case.compiles]
    return [name for pattern in patterns for name in matching(CASES, pattern)]


def quiet(name: str) -> dict[str, Any]:
    """Play a case without the warnings and the log of a first step."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    return play(name)


def played(names: Sequence[str], workers: int) -> Iterator[dict[str, Any]]:
    """Yield the row of every case."""
    if workers == 1:
        yield from map(quiet, names)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        yield from pool.map(quiet, names)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        SystemExit: with status 1, for a fault.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="patterns of names")
    add("--workers", type=int, default=1, help="processes (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="everything")
    args = parser.parse_args(argv)
    check_least(1, workers=args.workers)
    names = chosen(args.cases)
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            "got no Triton, expected it on Python's path: run make gpu REHEARSAL=1, "
            "which installs it apart"
        )
    rows = []
    for row in played(names, args.workers):
        rows.append(row)
        print(line(row), flush=True)
    if args.json is not None:
        write_json(args.json, rows)
    if any(row["faults"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    command(main)
