"""The report: every figure as a field, and a table that is taken in at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from marsopt.profiling.compile_log import Break, Graph, Recompile
from marsopt.profiling.machine import counted

NOT_COUNTED = "not counted: nothing is compiled"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The cost of a step function on this machine. ``str(report)`` is a table."""

    CALL: ClassVar[str] = "call"
    DERIVED: ClassVar[tuple[str, ...]] = ("num_kernels", "num_bytes", "allowed_seconds")

    machine: str
    num_calls: int  # that were watched, the first and the traced one included
    graphs: list[Graph]
    breaks: list[Break]
    recompiles: list[Recompile]  # and all else that the first call did not compile
    first_call_seconds: float  # compiling included
    seconds: float  # of a call, median; on a GPU without waiting for the host
    all_seconds: list[float]
    host_seconds: float  # until a call returns, median
    copy_bandwidth: float  # bytes a second, read and written
    peak_bytes: int  # that a warm call allocates at most, beyond what lived before
    num_launches: int | None  # GPU kernels in a call, of graphs or not; None on a CPU
    kernel_seconds: float | None  # that they take
    num_eager_ops: int  # operators called outside of graphs, in one call

    @property
    def num_kernels(self) -> int | None:
        """Return the kernels of all graphs in one call; None = nothing is compiled."""
        if not self.graphs:
            return None
        return sum(graph.num_runs * len(graph.kernels) for graph in self.graphs)

    @property
    def num_bytes(self) -> int | None:
        """Return the bytes that all graphs read and write in one call, as inductor
        counts; None = nothing is compiled.
        """
        if not self.graphs:
            return None
        return round(sum(graph.work * graph.num_bytes for graph in self.graphs))

    @property
    def allowed_seconds(self) -> float | None:
        """Return the seconds of ``num_bytes`` at the copy bandwidth; None as there."""
        return None if self.num_bytes is None else self.num_bytes / self.copy_bandwidth

    def to_dict(self) -> dict[str, Any]:
        """Return everything, as JSON can hold it."""
        return asdict(self) | {name: getattr(self, name) for name in self.DERIVED}

    def __str__(self) -> str:
        return "\n".join(f"{name:14}{text}" for name, text in self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Return the table, as name and text."""
        kernels, moved = NOT_COUNTED, [NOT_COUNTED]
        if self.num_bytes is not None:
            kernels, moved = self._kernels(), self._bytes()
        if self.num_launches is not None:
            took = 1e3 * (self.kernel_seconds or 0.0)
            kernels += f"; {self.num_launches} launched on the GPU, {took:.2f} ms"
        compiling = " with compiling" if self.graphs else ""
        rows = {
            "machine": [self.machine],
            "graphs": [f"{len(self.graphs)}"],
            **{f"  {graph.compile_id}": [_graph(graph)] for graph in self.graphs},
            **self._printed(),
            "breaks": [
                f"{len(self.breaks)}",
                *(f"{shorter(b.where)}: {b.reason}" for b in self.breaks),
            ],
            "recompiles": [
                f"{len(self.recompiles)} in {self.num_calls} calls",
                *_recompiles(self.recompiles),
            ],
            "kernels": [kernels],
            "bytes": moved,
            "eager": self._eager(),
            "time": self._time(),
            "first call": [f"{self.first_call_seconds:.1f} s{compiling}"],
            "peak memory": [f"{size(self.peak_bytes)} beyond what lived before"],
        }
        return [
            ("" if i else name, text)
            for name, texts in rows.items()
            for i, text in enumerate(texts)
        ]

    def _printed(self) -> dict[str, list[str]]:
        """Return rows on kernels that the step has beside its graphs."""
        return {}

    def _kernels(self) -> str:
        return f"{self.num_kernels} a {self.CALL}"

    def _bytes(self) -> list[str]:
        return [f"{size(self.num_bytes)} moved (read and written) a {self.CALL}"]

    def _eager(self) -> list[str]:
        if not self.num_eager_ops:
            return []
        beside = " beside these graphs" if self.graphs else ""
        return [
            f"{self.num_eager_ops} operators a {self.CALL}{beside}; their kernels and "
            "bytes are not counted"
        ]

    def _rates(self) -> str:
        return f"{self.copy_bandwidth / 1e9:.1f} GB/s of a copy"

    def _time(self) -> list[str]:
        count, allowed = len(self.all_seconds), self.allowed_seconds
        texts = [f"{1e3 * self.seconds:.2f} ms a {self.CALL} (median of {count})"]
        if self.num_launches is not None:
            texts[0] += f", {1e3 * self.host_seconds:.2f} ms of the host"
        if allowed:
            texts.append(
                f"{self.seconds / allowed:.2f} times the {1e3 * allowed:.2f} ms of as "
                f"many bytes at {self._rates()}"
            )
        return texts


def _graph(graph: Graph) -> str:
    runs = "" if graph.num_runs == 1 else f", {graph.num_runs} runs a call"
    return (
        f"{graph.name}: {counted(len(graph.kernels), 'kernel')}, "
        f"{size(graph.num_bytes)} moved, "
        f"{size(graph.peak_bytes)} allocated, compiled in {graph.seconds:.1f} s"
        f"{runs} ({shorter(graph.where)})"
    )


def _recompiles(recompiles: Sequence[Recompile]) -> list[str]:
    """Return a line for each function and reason."""
    calls: dict[str, list[int]] = {}
    for r in recompiles:
        calls.setdefault(f"{r.name}: {_first_line(r.reason)}", []).append(r.call)
    return [
        f"{text} (call {first}{f', {1 + len(more)} times from there' if more else ''})"
        for text, (first, *more) in calls.items()
    ]


def _first_line(text: str) -> str:
    """Return the line of the guard that failed, without the list and the comment."""
    line = next((s for s in text.splitlines() if s.strip(' "[]')), text)
    return line.partition("  #")[0].strip(' "[]')


def shorter(where: str) -> str:
    """Return a path:line relative to the working directory, if it lies there."""
    return where.removeprefix(f"{Path.cwd()}/")


def size(num_bytes: float) -> str:
    """Return bytes in decimal units, three digits."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1e3
    return f"{num_bytes:.3g} GB"
