"""What torch says while it compiles: graphs with their kernels, breaks, recompiles.

Two logs of torch are listened to: the structured compile log (the one that TORCH_TRACE
writes and tlparse reads), and inductor's metrics of a graph
(``torch._logging.set_logs(inductor_metrics=True)``), which name every kernel of its
scheduler and the bytes that it reads and writes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """One kernel of inductor's scheduler: a loop nest on a CPU, a launch on a GPU, or a
    call of a library (``is_extern``: a matrix product).
    """

    name: str
    num_bytes: int  # read and written
    is_extern: bool


class Break(NamedTuple):
    """Where a graph had to end, and why."""

    where: str  # path:line
    reason: str


class Recompile(NamedTuple):
    """A function that was compiled again, and the guards that failed."""

    name: str
    reason: str


@dataclass
class Graph:
    """One compiled graph; its backward pass, compiled apart, counts into it."""

    compile_id: str  # torch's: frame/how often that frame was compiled before
    name: str = "?"  # of the function
    where: str = "?"  # path:line
    seconds: float = 0.0  # that compiling it took
    code_size: int = 0  # characters that inductor generated
    kernels: list[Kernel] = field(default_factory=list)
    num_runs: int = 0  # in one call
    peak_bytes: int = 0  # that one run allocates at most, its results included

    @property
    def num_bytes(self) -> int:
        """Read and written in one run, counted by inductor's scheduler."""
        return sum(kernel.num_bytes for kernel in self.kernels)


class CompileLog:
    """Collects what is compiled between ``with`` and its end.

    Args:
        folder: where torch's own structured log is written too; None = nowhere.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._graphs: dict[str, Graph] = {}
        self._breaks: dict[str, Break] = {}
        self._recompiles: dict[str, str] = {}
        self._names: dict[str, tuple[str, str]] = {}  # by compile id: name, where
        self._stack = ExitStack()

    def __enter__(self) -> CompileLog:
        with ExitStack() as stack:
            stack.enter_context(_metrics_to(self._take_metrics))
            trace = logging.getLogger("torch.__trace")
            stack.enter_context(_handled(trace, _Listener(self._take)))
            if self._folder is not None:
                stack.enter_context(_handled(trace, _writer(self._folder)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def graphs(self) -> list[Graph]:
        """In the order in which they were captured."""
        for key, graph in self._graphs.items():
            graph.name, graph.where = self._names.get(key, (graph.name, graph.where))
        return list(self._graphs.values())

    @property
    def breaks(self) -> list[Break]:
        """One per line of code."""
        return list(self._breaks.values())

    @property
    def recompiles(self) -> list[Recompile]:
        """One per compilation after a function's first."""
        return [
            Recompile(self._names.get(key, ("?", ""))[0], reason)
            for key, reason in self._recompiles.items()
        ]

    def _take(self, record: logging.LogRecord) -> None:
        data: Mapping[str, Any] = vars(record).get("metadata", {})
        text = vars(record).get("payload") or ""
        if data.get("frame_id") is None:
            return
        key = f"{data['frame_id']}/{data['frame_compile_id']}"
        if data.get("compiled_autograd_id") is not None:
            key = f"!{data['compiled_autograd_id']}/{key}"
        named = data.get("artifact", {}).get("name")
        if "dynamo_output_graph" in data:  # a second attempt voids the first
            self._graphs[key] = Graph(key)
        elif "inductor_output_code" in data and key in self._graphs:
            self._graphs[key].code_size += len(text)
        elif named == "dynamo_graph_break_reason":
            found = _parse_break(text)
            self._breaks.setdefault(found.where, found)
        elif named == "recompile_reasons":
            self._recompiles[key] = text
        elif "compilation_metrics" in data:
            self._finish(key, data["compilation_metrics"])

    def _finish(self, key: str, metrics: Mapping[str, Any]) -> None:
        where = f"{metrics.get('co_filename')}:{metrics.get('co_firstlineno')}"
        self._names[key] = (metrics.get("co_name") or "?", where)
        if key in self._graphs:
            seconds = metrics.get("entire_frame_compile_time_s")
            self._graphs[key].seconds = seconds or 0.0

    def _take_metrics(self, record: logging.LogRecord) -> None:
        from torch._guards import CompileContext
        from torch._inductor.scheduler import NopKernelSchedulerNode

        graph = self._graphs.get(str(CompileContext.current_compile_id()))
        if graph is None:
            return
        for node, words in record.args["nodes_num_elem"]:  # of four bytes
            if not isinstance(node, NopKernelSchedulerNode):
                graph.kernels.append(
                    Kernel(node.get_name(), 4 * words, node.is_extern())
                )


class _Listener(logging.Handler):
    def __init__(self, take: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record)


@contextmanager
def _handled(logger: logging.Logger, handler: logging.Handler):
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


@contextmanager
def _metrics_to(take: Callable[[logging.LogRecord], None]):
    """Inductor counts bytes while its metrics log is on."""
    from torch._inductor import metrics
    from torch._inductor.compile_fx import inductor_metrics_log as logger

    def caught(record: logging.LogRecord) -> bool:
        take(record)
        return False  # nobody prints it

    level = logger.level
    lists: Sequence[list] = (metrics.nodes_num_elem, metrics.node_runtimes)
    lengths, total = [len(part) for part in lists], metrics.num_bytes_accessed
    logger.setLevel(logging.INFO)
    logger.addFilter(caught)
    try:
        yield
    finally:
        logger.removeFilter(caught)
        logger.setLevel(level)
        for part, length in zip(lists, lengths, strict=True):
            del part[length:]  # they would keep every graph alive
        metrics.num_bytes_accessed = total


def _writer(folder: Path) -> logging.Handler:
    """What TORCH_TRACE=folder installs when torch is imported."""
    from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter

    handler = LazyTraceHandler(str(folder))
    handler.setFormatter(TorchLogsFormatter(trace=True))
    return handler


def _parse_break(text: str) -> Break:
    """Place and headline of torch's explanation, whose first lines are

    Graph break in user code at PATH:LINE
    Graph Break Reason: [Encountered graph break when ...:] HEADLINE
      Explanation: ...
    """
    place = re.search(r"^Graph break in user code at (.+)$", text, re.MULTILINE)
    why = re.search(
        r"Graph Break Reason: (?:Encountered graph break when[^\n]*\n\n)?(.+)", text
    )
    more = re.search(r"Explanation: (.+)", text)
    first = text.strip().partition("\n")[0]
    reason = why.group(1).strip() if why else first
    if more:
        reason = f"{reason}: {more.group(1).strip()}"
    return Break(place.group(1).strip() if place else first, reason)
