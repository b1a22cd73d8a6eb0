"""The tables of the documentation, from what benchmarks.gpu wrote.

python -m benchmarks.gpu.tables [--out runs/gpu]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import PARTS
from benchmarks.newton_schulz_shapes import STANDARD
from benchmarks.table import kernels_of
from marsopt.profiling.machine import one_line
from train.errors import UserError, command

# of the project's budgets
COPY_SHARE, MATMUL_SHARE = 0.85, 0.60
NOT_MEASURED = "not measured"


def read(out: Path) -> dict[str, dict[str, Any]]:
    """Return {part: {job: result}} of what has one: also of tests and trainings that
    were cut, which keep what they have.
    """
    found = {}
    for part in PARTS:
        path = out / f"{part}.json"
        entries = json.loads(path.read_text()) if path.exists() else {}
        found[part] = {
            name: entry["result"]
            for name, entry in entries.items()
            if entry["result"] is not None
        }
    return found


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Return a table; the first column is text, the others are numbers."""
    lines = [head, ["---"] * len(head), *(rows or [[NOT_MEASURED, *head[1:]]])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def correctness(found: dict[str, Any]) -> Iterator[str]:
    """Yield what the tests and the machine's rates say."""
    if "rates" in found:
        rates = found["rates"]
        products = ", ".join(
            f"{rate / 1e12:,.3g} TFLOP/s in {dtype}"
            for dtype, rate in rates["matmul_rate"].items()
        )
        yield one_line(rates["machine"])
        yield f"copy {rates['copy_bandwidth'] / 1e9:,.4g} GB/s; products {products}"
    if "tests" in found:
        counts = found["tests"]["counts"].items()
        told = ", ".join(f"{count} {what}" for what, count in counts)
        failed = [f"failed: {test}" for test in found["tests"]["failed"]]
        yield "\n".join([f"tests: {told}", *failed])


def steps(found: dict[str, Any]) -> str:
    """Return the optimizers' steps."""
    rows = [
        [
            row["title"],
            result["model"],
            result["dtype"],
            f"{1e3 * row['seconds']['median']:.2f}",
            f"{1e3 * row['host_seconds']['median']:.2f}",
            *kernels_of(row),
            f"{row['ratio']['median']:.2f}",
            f"{row['peak_bytes'] / 1e6:,.0f}",
            f"{row['state_bytes_per_parameter']:.0f}",
        ]
        for name, result in found.items()
        if name.startswith("step ")
        for row in result["rows"]
    ]
    head = ["step", "model", "dtype", "ms", "host ms", "kernels' ms", "launches",
            "times clip + fused AdamW",
            "peak MB", "state, bytes a parameter"]  # fmt: skip
    return markdown(head, rows)


def copy_share(result: dict[str, Any]) -> float:
    """Return the least seconds that the bytes of a step's floor, copies included, and
    its products take at this machine's rates, as a share of what it took.
    """
    floor = result["floor"]
    num_bytes = floor["norms"] + floor["update"] + floor["copied"]
    seconds = num_bytes / result["copy_bandwidth"]
    seconds += result["num_flops"] / result["matmul_rate"]
    return seconds / result["seconds"]


def profiles(found: dict[str, Any]) -> str:
    """Return what the profiler says of bytes and of the copy rate."""
    rows = []
    for name, result in found.items():
        if not name.startswith("profile "):
            continue
        _, model, rule = name.split()
        launches = result["num_launches"]
        rows.append(
            [
                rule,
                model,
                f"{result['bytes_per_param']:.2f}",
                f"{1e3 * result['seconds']:.2f}",
                f"{1e3 * result['host_seconds']:.2f}",
                f"{copy_share(result):.0%}",
                f"{sum(kernel['num_launches'] for kernel in result['printed'])}",
                "-" if launches is None else f"{launches}",
                f"{len(result['recompiles'])}",
                f"{result['peak_bytes'] / 1e6:,.1f}",
            ]
        )
    head = ["rule", "model", "bytes a parameter", "ms", "host ms",
            "the floor's share at copy and product rates",
            "launches of printed kernels", "launches", "recompiles",
            "peak MB"]  # fmt: skip
    return markdown(head, rows)


def orthogonal(found: dict[str, Any]) -> str:
    """Return Newton-Schulz by shape."""
    rows = [
        [
            f"{row['count']} x ({row['rows']}, {row['cols']})",
            row["model"],
            row["form"],
            f"{1e3 * row['seconds']['median']:.2f}",
            f"{row['rate'] / 1e12:,.3g}",
            f"{row['rate'] / row['products_rate']:.0%}",
            f"{row['rate'] / result['matmul_rate']:.0%}",
        ]
        for name, result in found.items()
        if name.startswith("newton-schulz ")
        for row in result["rows"]
    ]
    head = ["matrices", "model", "precision", "ms", "TFLOP/s", "of its products alone",
            "of one square product"]  # fmt: skip
    return markdown(head, rows)


def budgets(found: dict[str, Any]) -> str:
    """Return the two budgets, with the worst that was found and where."""
    shares, rates = {}, {}
    for name, result in found.items():
        kind, _, rest = name.partition(" ")
        if kind == "profile" and "mars-adamw" in rest:
            shares[rest] = copy_share(result)
        elif kind == "newton-schulz":
            for row in result["rows"]:
                shape = f"{rest} ({row['rows']}, {row['cols']})"
                if row["form"] == STANDARD:
                    rates[shape] = row["rate"] / result["matmul_rate"]
    rows = []
    for what, limit, values in (
        ("elementwise step, share of the copy rate", COPY_SHARE, shares),
        ("Newton-Schulz, share of the matmul rate", MATMUL_SHARE, rates),
    ):
        where = min(values, key=values.__getitem__) if values else ""
        told = f"{values[where]:.2f} ({where})" if values else NOT_MEASURED
        rows.append([what, f"at least {limit}", told])
    return markdown(["budget", "limit", "the worst found"], rows)


def trained(found: dict[str, Any]) -> str:
    """Return what the methods reached, at the recipes' rates and at searched ones."""
    rows = []
    for name, result in found.items():
        setting = result["setting"]
        per_step = setting["batch"] * setting["seq_len"]
        for title, method in result["methods"].items():
            step = method["step"]
            each, peak, rate = step["seconds"], step["peak_bytes"], step["matmul_rate"]
            lr = method["values"].get("lr")
            rows.append(
                [
                    title,
                    "the recipe's" if lr is None else f"{lr:.2g}",
                    "diverged" if method["mean"] is None else f"{method['mean']:.4f}",
                    f"{per_step * setting['steps'] / 1e6:,.4g}M",
                    f"{setting['steps'] * each:,.0f}",
                    f"{per_step / each:,.0f}",
                    "-" if rate is None else f"{step['flops'] / each / rate:.1%}",
                    f"{step['optimizer_seconds'] / each:.1%}",
                    "-" if peak is None else f"{peak / 2**30:.1f}",
                    name,
                ]
            )
    head = ["method", "lr", "held-out loss", "tokens", "seconds", "tokens/s",
            "of the product rate", "optimizer's share", "peak GiB",
            "study"]  # fmt: skip
    return markdown(head, rows)


def tables(out: Path) -> str:
    """Return everything that is there."""
    found = read(out)
    every = {**found["correctness"], **found["speed"]}
    parts = [
        *correctness({**found["speed"], **found["correctness"]}),
        budgets(every),
        steps(every),
        profiles(every),
        orthogonal(every),
        trained(found["training"]),
    ]
    return "\n\n".join(parts)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tables")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    args = parser.parse_args()
    if not args.out.is_dir():
        raise UserError(
            f"got no folder {args.out}, expected that of benchmarks.gpu: run that first"
        )
    print(tables(args.out))


if __name__ == "__main__":
    command(main)
