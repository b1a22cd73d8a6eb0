"""The messages of torch while it compiles: graphs with their kernels, breaks,
recompiles.

Two logs of torch are listened to: the structured compile log (the one that TORCH_TRACE
writes and tlparse reads), and inductor's metrics of a graph
(``torch._logging.set_logs(inductor_metrics=True)``), which name every kernel of its
scheduler and the bytes that it reads and writes. The third log is MARS's own, which
says why it makes new functions: to torch their graphs are no recompiles.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from marsopt.optim import mars
from marsopt.step.graphs import LINES

PACKAGE = str(Path(mars.__file__).parents[1])  # where the functions of MARS lie


@dataclass(frozen=True)
class Kernel:
    """One kernel of inductor's scheduler: a loop nest on a CPU, a launch on a GPU, or a
    call of a library (``is_extern``: a matrix product).
    """

    name: str
    num_bytes: int  # read and written
    is_extern: bool


@dataclass(frozen=True)
class Break:
    """Where a graph had to end, and why."""

    where: str  # path:line
    reason: str


@dataclass(frozen=True)
class Recompile:
    """A function that was compiled again, or not before the second call; and why: the
    guards that failed, or MARS's own cause.
    """

    name: str
    reason: str
    call: int  # the number of its call, from 1 on


@dataclass
class Graph:
    """One compiled graph; its backward pass, compiled apart, counts into it."""

    compile_id: str  # torch's: frame/how often that frame was compiled before
    name: str = "?"  # of the function
    where: str = "?"  # path:line
    seconds: float = 0.0  # that compiling it took
    source: str = ""  # that inductor generated
    kernels: list[Kernel] = field(default_factory=list)
    num_runs: int = 0  # in one call
    # the elements of these runs over the elements of its first run, if it takes tensors
    # of any size
    work: float = 0.0
    peak_bytes: int = 0  # that one run allocates at most, its results included

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a run reads and writes, as inductor's scheduler counts,
        at the sizes of the first run.
        """
        return sum(kernel.num_bytes for kernel in self.kernels)


@dataclass
class CompileLog:
    """The compiled graphs, in the order of their capture."""

    tell: Callable[[str], None]  # of each graph
    graphs: dict[str, Graph] = field(default_factory=dict)  # by compile id
    breaks: dict[str, Break] = field(default_factory=dict)  # by line of code
    # by compile id, graphs that the first call did not make among them
    recompiles: dict[str, Recompile] = field(default_factory=dict)
    call: int = 1  # that is under way
    cause: str = ""  # why MARS has made new functions, the last time

    def take(self, record: logging.LogRecord) -> None:
        """Note one message of the structured log."""
        data: Mapping[str, Any] = vars(record).get("metadata", {})
        text = vars(record).get("payload") or ""
        if data.get("frame_id") is None:
            return
        key = f"{data['frame_id']}/{data['frame_compile_id']}"
        if data.get("compiled_autograd_id") is not None:
            key = f"!{data['compiled_autograd_id']}/{key}"
        artifact = data.get("artifact", {}).get("name")
        if "dynamo_output_graph" in data:  # a second attempt voids the first
            self.graphs[key] = Graph(key)
        elif "inductor_output_code" in data and key in self.graphs:
            self.graphs[key].source += text
        elif artifact == "dynamo_graph_break_reason":
            graph_break = _parse_break(text)
            self.breaks.setdefault(graph_break.where, graph_break)
        elif artifact == "recompile_reasons":
            self.recompiles[key] = Recompile("?", text, self.call)
        elif "compilation_metrics" in data:
            self._name(key, data["compilation_metrics"])

    def _name(self, key: str, frame: Mapping[str, Any]) -> None:
        name = frame.get("co_name") or "?"
        if key in self.recompiles:
            self.recompiles[key] = replace(self.recompiles[key], name=name)
        if key not in self.graphs:
            return
        path, line = str(frame.get("co_filename")), frame.get("co_firstlineno")
        where = f"{path}:{line % LINES if path.startswith(PACKAGE) else line}"
        if self.call > 1 and key not in self.recompiles:
            reason = "not called before"
            if where in {graph.where for graph in self.graphs.values()}:
                by_mars = self.cause and path.startswith(PACKAGE)
                cause = self.cause if by_mars else "another function of the same code"
                reason = f"compiled again: {cause}"
            self.recompiles[key] = Recompile(name, reason, self.call)
        graph = self.graphs[key]
        graph.name, graph.where = name, where
        graph.seconds = frame.get("entire_frame_compile_time_s") or 0.0
        self.tell(f"graph {key}, {name}, compiled in {graph.seconds:.1f} s")

    def take_cause(self, record: logging.LogRecord) -> None:
        """Note why MARS makes a new binding, from its debug log."""
        if record.msg == mars.NEW_BINDING:
            self.cause = record.msg.removeprefix("marsopt: ")

    def take_metrics(self, record: logging.LogRecord) -> None:
        """Note the kernels of one graph."""
        from torch._guards import CompileContext
        from torch._inductor.scheduler import NopKernelSchedulerNode

        graph = self.graphs.get(str(CompileContext.current_compile_id()))
        if graph is None:
            return
        metrics: Any = record.args
        for node, words in metrics["nodes_num_elem"]:  # of four bytes
            if not isinstance(node, NopKernelSchedulerNode):
                graph.kernels.append(
                    Kernel(
                        name=node.get_name(),
                        num_bytes=4 * words,
                        is_extern=node.is_extern(),
                    )
                )


@contextmanager
def listening(
    folder: Path | None = None, tell: Callable[[str], None] = lambda what: None
) -> Iterator[CompileLog]:
    """Collect the compiled graphs, and ``tell`` of each; torch's own structured log
    goes to ``folder`` too.
    """
    from torch._inductor import metrics
    from torch._inductor.compile_fx import inductor_metrics_log

    log, trace = CompileLog(tell), logging.getLogger("torch.__trace")
    listener = logging.Handler()
    listener.emit = log.take
    handlers = [listener] if folder is None else [listener, _writer(folder)]
    # inductor counts into these while its log is on; they would keep every graph alive
    counts: tuple[list[Any], ...] = (metrics.nodes_num_elem, metrics.node_runtimes)
    lengths, total = [len(part) for part in counts], metrics.num_bytes_accessed
    optimizer = logging.getLogger(mars.__name__)
    for handler in handlers:
        trace.addHandler(handler)
    try:
        with (
            _lowered(inductor_metrics_log, logging.INFO, log.take_metrics),
            _lowered(optimizer, logging.DEBUG, log.take_cause),
        ):
            yield log
    finally:
        for handler in handlers:
            trace.removeHandler(handler)
            handler.close()
        for part, length in zip(counts, lengths, strict=True):
            del part[length:]
        metrics.num_bytes_accessed = total


@contextmanager
def _lowered(
    logger: logging.Logger, level: int, take: Callable[[logging.LogRecord], None]
) -> Iterator[None]:
    """Take a logger's records from this level on; its other handlers get no more than
    before.
    """
    before, usual = logger.level, logger.getEffectiveLevel()

    def caught(record: logging.LogRecord) -> bool:
        take(record)
        return record.levelno >= usual

    logger.setLevel(level)
    logger.addFilter(caught)
    try:
        yield
    finally:
        logger.removeFilter(caught)
        logger.setLevel(before)


def _writer(folder: Path) -> logging.Handler:
    """Return the handler that TORCH_TRACE=folder installs when torch is imported."""
    from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter

    handler = LazyTraceHandler(str(folder))
    handler.setFormatter(TorchLogsFormatter(trace=True))
    return handler


def _parse_break(text: str) -> Break:
    """Return place and headline of torch's explanation. Its first lines are

    Graph break in user code at PATH:LINE
    Graph Break Reason: [Encountered graph break when ...:] HEADLINE
      Explanation: ...
    """
    intro = r"(?:Encountered graph break when[^\n]*\n\n)?"
    patterns = (
        r"^Graph break in user code at (.+)$",
        rf"Graph Break Reason: {intro}(.+)",
        r"Explanation: (.+)",
    )
    matches = [re.search(pattern, text, re.MULTILINE) for pattern in patterns]
    where, *whys = (match[1].strip() if match else "" for match in matches)
    first = text.strip().partition("\n")[0]  # where torch words it otherwise
    return Break(where or first, ": ".join(filter(None, whys)) or first)
