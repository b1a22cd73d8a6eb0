"""The documentation's tables, from what the rehearsal wrote.

python -m benchmarks.gpu.rehearsal.tables FILE.json [--rules ...]
    [--corrections ...] [--models ...] [--dtypes ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.rehearsal.cases import NONE
from benchmarks.gpu.rehearsal.faults import faults
from benchmarks.gpu.tables import markdown
from train.errors import command

Row = dict[str, Any]  # of a case, as ``measure.to_dict`` makes it
KEYS = dict(rules="rule", corrections="correction", models="model", dtypes="dtype")


def binaries(row: Row) -> list[dict[str, Any]]:
    """Return every binary of a case."""
    return [b for kernel in row["kernels"] for b in kernel.get("binaries", ())]


def registers(row: Row) -> str:
    """Return the least and the most of its kernels."""
    found = [b["registers"] for b in binaries(row)]
    return f"{min(found)} to {max(found)}" if found else "not compiled"


def wide(row: Row) -> str:
    """Return how many full-size loads and stores are as wide as their block allows."""
    found = binaries(row)
    if not found:
        return "not compiled"
    total = sum(b["full_size"] for b in found)
    return f"{total - sum(b['narrow'] for b in found)} of {total}"


def steps(rows: Iterable[Row]) -> str:
    """Return a table of all cases."""
    head = ["step", "model", "dtype", "graphs", "launches", "over stacks", "loaded",
            "stored", "sum", "floor", "behind a flag", "binaries", "registers",
            "bytes spilled", "wide loads and stores"]  # fmt: skip
    lines = [
        [
            row["name"],
            row["model"],
            row["dtype"],
            f"{len(row['graphs'])}",
            f"{row['launches']}",
            f"{row['stack_launches']}",
            f"{row['loaded']:.2f}",
            f"{row['stored']:.2f}",
            f"{row['loaded'] + row['stored']:.2f}",
            f"{row['floor']:.2f}",
            f"{row['flagged']:.2f}",
            f"{len(binaries(row))}",
            registers(row),
            f"{sum(b['spills'] for b in binaries(row))}",
            wide(row),
        ]
        for row in rows
    ]
    return markdown(head, lines)


def report(made: dict[str, str], rows: list[Row]) -> str:
    """Return the table of these cases, and below it how many faults they have and what
    they were lowered by.
    """
    num = sum(len([*faults(row)]) for row in rows)
    with_what = ", ".join(f"{name} {value}" for name, value in made.items())
    return f"{steps(rows)}\n\n{len(rows)} cases, {num} faults; {with_what}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.rehearsal.tables", description=__doc__
    )
    parser.add_argument("file", type=Path)
    for plural, key in KEYS.items():
        parser.add_argument(
            f"--{plural}", nargs="+", action="extend", dest=key, help="(default: all)"
        )
    args = vars(parser.parse_args())
    found = json.loads(args.pop("file").read_text())
    chosen = [
        row
        for row in found["cases"]
        if all(v is None or (row[key] or NONE) in v for key, v in args.items())
    ]
    print(report(found["made_with"], chosen))


if __name__ == "__main__":
    command(main)
