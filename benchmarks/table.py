"""What was measured, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import WARM_UP, Row
from benchmarks.peers import version
from benchmarks.timing import spread
from marsopt.profiling.machine import counted, one_line

EXPLAINED = f"""\
ms, quartiles    time of the optimizer's step and zero_grad, the global clip in it where
                 named; gradients are handed over ahead, new ones each round. On a GPU
                 its own time, when the host is ahead of it
host             ms until the step has returned, on a CPU its whole time
kernels          ms of all kernels of one step on a GPU, and how many are launched
x                the same over the reference's step of the same round (paired), median
                 and quartiles. Contenders ran in groups that fit into memory, matrix
                 rules apart; each group holds the reference
peak             MB that torch held at once during a step, beyond those at its start
state            bytes a parameter in tensors that the optimizer holds between steps
compile          what the first {WARM_UP} steps took beyond as many median ones, in
                 seconds: compilation (from an empty cache), and making the state
off by           how far its parameters end from those of our rule of the same name,
                 relative to the way that these have come; all saw the same gradients"""


def values(row: Row, num_params: int) -> dict[str, Any]:
    """Return one row for JSON; times in seconds."""
    c = row.contender
    return dict(
        key=c.key,
        title=c.title,
        family=c.family,
        matrix=c.matrix,
        version=None if c.package is None else version(c.package),
        twin=c.twin,
        note=c.note,
        group=row.group,
        seconds=spread(row.times)._asdict(),
        host_seconds=spread(row.host_times)._asdict(),
        ratio=spread(row.ratios)._asdict(),
        num_launches=row.num_launches,
        kernel_seconds=row.kernel_seconds,
        peak_bytes=row.peak_bytes,
        state_bytes=row.state_bytes,
        state_bytes_per_parameter=row.state_bytes / num_params,
        compile_seconds=row.compile_seconds,
        distance=row.distance,
        times=row.times,
        host_times=row.host_times,
        ratios=row.ratios,
        warm_up=row.warm_up,
    )


def kernels_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return milliseconds and number of a step's kernels on a GPU."""
    if row["num_launches"] is None:
        return "-", "-"
    return f"{1e3 * row['kernel_seconds']:.2f}", f"{row['num_launches']}"


def line(row: Mapping[str, Any]) -> str:
    """Return one row of the table."""
    ms = {key: 1e3 * value for key, value in row["seconds"].items()}
    x = row["ratio"]
    off = "" if row["distance"] is None else f"{row['distance']:.1e}"
    kernels, launches = kernels_of(row)
    return (
        f"{row['title']:54} {ms['median']:8.1f} {ms['low']:8.1f} {ms['high']:8.1f}"
        f" {1e3 * row['host_seconds']['median']:8.1f} {kernels:>8} {launches:>8}"
        f" {x['median']:7.2f} {x['low']:6.2f} {x['high']:6.2f}"
        f" {row['peak_bytes'] / 1e6:8.1f} {row['state_bytes_per_parameter']:6.1f}"
        f" {row['compile_seconds']:8.1f} {off:>8}"
    )


def table(report: Mapping[str, Any]) -> str:
    """Return the whole report as text."""
    head = (
        f"{'':54} {'ms':>8} {'quartiles':>17} {'host':>8} {'kernels':>8}"
        f" {'launches':>8} {'x':>7} {'quartiles':>13} {'peak MB':>8} {'state':>6}"
        f" {'compile':>8} {'off by':>8}"
    )
    rows: Sequence[Mapping[str, Any]] = report["rows"]
    lines = [
        f"{report['model']}: {report['num_params']:,} parameters in "
        f"{report['num_tensors']} tensors, {report['dtype']}, "
        f"{report['num_rounds']} rounds, "
        f"{counted(report['num_groups'], 'group')}, our rules "
        f"{'compiled' if report['compiled'] else 'eager'}",
        one_line(report["machine"]),
        "",
        head,
        *map(line, rows),
        *(f"{title:54} {what}" for title, what in report["missing"].items()),
        "",
        EXPLAINED,
    ]
    noted = [row for row in rows if row["note"]]
    if noted:
        lines += ["", "What is computed differently:"]
    for row in noted:
        of = "" if row["version"] is None else f" ({row['version']})"
        lines.append(f"- {row['title']}{of}: {row['note']}")
    return "\n".join(lines)
