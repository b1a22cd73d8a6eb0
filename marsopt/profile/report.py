"""The report: every figure as a field, and a table that is taken in at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marsopt.profile.compile_log import Break, Graph, Recompile


@dataclass(frozen=True)
class Report:
    """What a step function costs on this machine. ``str(report)`` is a table."""

    machine: str
    num_calls: int  # that were watched, the first and the traced one included
    graphs: list[Graph]
    breaks: list[Break]
    recompiles: list[Recompile]
    first_call_seconds: float  # compiling included
    seconds: float  # of a call, median
    all_seconds: list[float]
    copy_bandwidth: float  # bytes a second, read and written
    peak_bytes: int  # that a warm call allocates at most, beyond what lived before
    num_launches: int | None  # GPU kernels in a call, of graphs or not; None on a CPU

    @property
    def num_kernels(self) -> int:
        """Of all graphs, in one call."""
        return sum(graph.num_runs * len(graph.kernels) for graph in self.graphs)

    @property
    def num_bytes(self) -> int:
        """Read and written by all graphs in one call, as inductor counts."""
        return sum(graph.num_runs * graph.num_bytes for graph in self.graphs)

    @property
    def allowed_seconds(self) -> float:
        """What ``num_bytes`` take at the copy bandwidth."""
        return self.num_bytes / self.copy_bandwidth

    def num_kernels_over(self, num_bytes: int) -> int:
        """Kernels of one call that read and write at least ``num_bytes``."""
        return sum(
            graph.num_runs
            for graph in self.graphs
            for kernel in graph.kernels
            if kernel.num_bytes >= num_bytes
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, in what JSON can hold."""
        names = ("num_kernels", "num_bytes", "allowed_seconds")
        found = asdict(self) | {name: getattr(self, name) for name in names}
        for key in ("breaks", "recompiles"):
            found[key] = [part._asdict() for part in found[key]]
        for graph in found["graphs"]:
            graph["kernels"] = [kernel._asdict() for kernel in graph["kernels"]]
        return found

    def __str__(self) -> str:
        return "\n".join(f"{name:14}{text}" for name, text in self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """The table, as name and text."""
        rows = [("machine", self.machine), ("graphs", f"{len(self.graphs)}")]
        rows += [(f"  {graph.name}", _graph(graph)) for graph in self.graphs]
        rows.append(("breaks", f"{len(self.breaks)}"))
        rows += [("", f"{shorter(b.where)}: {b.reason}") for b in self.breaks]
        rows.append(("recompiles", f"{len(self.recompiles)} in {self.num_calls} calls"))
        rows += [("", f"{r.name}: {_first_line(r.reason)}") for r in self.recompiles]
        kernels = f"{self.num_kernels} a call"
        if self.num_kernels:
            main = self.num_kernels_over(self.num_bytes // 100)
            kernels += f"; {main} of them move 1% of the bytes or more"
        if self.num_launches is not None:
            kernels += f"; {self.num_launches} launched on the GPU in all"
        rows.append(("kernels", kernels))
        rows.append(
            ("bytes", f"{size(self.num_bytes)} moved (read and written) a call")
        )
        rows.append(("time", self._time()))
        rows.append(("first call", f"{self.first_call_seconds:.1f} s with compiling"))
        rows.append(
            ("peak memory", f"{size(self.peak_bytes)} beyond what lived before")
        )
        return rows

    def _time(self) -> str:
        text = f"{1e3 * self.seconds:.2f} ms a call (median of {len(self.all_seconds)})"
        if not self.num_bytes:
            return text
        return (
            f"{text}; {1e3 * self.allowed_seconds:.2f} ms at the copy bandwidth of "
            f"{self.copy_bandwidth / 1e9:.1f} GB/s: "
            f"{self.seconds / self.allowed_seconds:.2f}x"
        )


def _graph(graph: Graph) -> str:
    runs = "" if graph.num_runs == 1 else f", {graph.num_runs} runs a call"
    return (
        f"{len(graph.kernels)} kernels, {size(graph.num_bytes)} moved, "
        f"{size(graph.peak_bytes)} allocated, compiled in {graph.seconds:.1f} s"
        f"{runs} ({shorter(graph.where)})"
    )


def _first_line(text: str) -> str:
    """Of the guard that failed, without the list's and the comment's noise."""
    line = next((s for s in text.splitlines() if s.strip(' "[]')), text)
    return line.partition("  #")[0].strip(' "[]')


def shorter(where: str) -> str:
    """A path:line relative to the working directory, if it lies there."""
    return where.removeprefix(f"{Path.cwd()}/")


def size(num_bytes: float) -> str:
    """Bytes in decimal units, three digits."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1e3
    return f"{num_bytes:.3g} GB"
