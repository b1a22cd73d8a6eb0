"""marsopt.profile: the report on one step function, of any optimizer."""

from __future__ import annotations

import gc
import inspect
import json
import math
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.profiler import ProfilerActivity

from marsopt.profiling import machine
from marsopt.profiling.compile_log import Graph, listening
from marsopt.profiling.table import Report
from marsopt.step.graphs import Graphs

DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # c10::DeviceType
REGION = "Torch-Compiled Region: "  # followed by torch's compile id
FILE = inspect.getfile(Graphs)  # of MARS's graphs
# how the spans of compiled graphs begin: all operators in them are the graph's
COMPILED = (REGION, "## Call CompiledFxGraph", "CompiledFunctionBackward")


def profile(
    step_fn: Callable[..., object],
    *args: object,
    steps: int = 10,
    compile: bool | None = None,
    cold: bool = True,
    device: str | None = None,
    trace: str | Path | None = None,
    compile_log: str | Path | None = None,
    progress: bool = True,
) -> Report:
    """Call ``step_fn(*args)`` some ``steps + 2`` times, and return its cost.

    All compiled functions of this process are forgotten (``torch.compiler.reset``), and
    compiled again at their next call: a graph that is not compiled under observation
    cannot be counted. ``step_fn`` may be compiled, call compiled functions (as
    ``optimizer.step`` does), or neither; its side effects happen at every call.

    Args:
        step_fn: the function.
        args: its arguments.
        steps: calls that are timed, after one that compiles. One more is traced.
        compile: None = compile ``step_fn`` itself if its first call compiled nothing
            (which costs that call), True = compile it, False = take it as it is.
        cold: compile with empty caches on disk, as on a new machine. False reuses
            binaries, and makes ``first_call_seconds`` mean little.
        device: "cpu" or "cuda", where it computes; None = "cuda" if this process has
            used it.
        trace: file for the Chrome trace of one call; its folder is made.
        compile_log: folder for torch's structured compile log, which tlparse reads.
        progress: report progress on standard error: compiling takes a while.

    Returns:
        A ``Report``; printed, it is a table.

    Raises:
        TypeError: ``step_fn`` cannot be called.
        ValueError: ``steps`` below 1, an unknown device.

    Example:
        >>> x = torch.ones(1000)
        >>> report = marsopt.profile(
        ...     x.mul, 2.0, steps=3, compile=False, cold=False, progress=False
        ... )
        >>> report.num_calls, report.num_eager_ops, report.num_kernels
        (5, 1, None)
    """
    if not callable(step_fn):
        raise TypeError(
            f"got a {type(step_fn).__name__}, expected a function: pass the step "
            "itself, and its arguments after it"
        )
    if steps < 1:
        raise ValueError(f"got steps={steps}, expected at least 1: time one call")
    device = device or ("cuda" if torch.cuda.is_initialized() else "cpu")
    if device not in DEVICE_TYPES:
        raise ValueError(
            f"got device={device!r}, expected 'cpu' or 'cuda': other devices have no "
            "allocator that tells its peak"
        )

    def timed() -> machine.Timed:
        return machine.timed(lambda: function(*args), device)

    def tell(what: str) -> None:
        if progress:
            print(f"profile: {what}", file=sys.stderr, flush=True)

    function: Callable[..., object] = torch.compile(step_fn) if compile else step_fn
    torch.compiler.reset()
    with (
        _uncached(cold),
        _noted_runs() as runs,
        listening(Path(compile_log) if compile_log else None, tell) as log,
    ):
        caches = "with empty caches on disk" if cold else "with the caches on disk"
        tell(f"the first call, for which all is compiled again, {caches}")
        first = timed().host
        if compile is None and not log.graphs:
            tell("nothing was compiled: now the function itself is")
            function = torch.compile(step_fn)
            first = timed().host
        tell(f"{steps} calls, which are timed")
        times = []
        for log.call in range(2, steps + 2):
            times.append(timed())
        tell("a call under torch.profiler")
        log.call = steps + 2
        measured = traced(
            lambda: function(*args), device, Path(trace) if trace else None
        )
    tell("a copy, to compare with")
    for key, graph in log.graphs.items():
        graph.work = graph.num_runs = measured.runs.count(key)
        graph.peak_bytes = measured.graph_peaks.get(key, 0)
    _weigh(log.graphs, measured.runs, runs)
    return Report(
        machine=machine.one_line(machine.describe(device)),
        num_calls=steps + 2,
        graphs=list(log.graphs.values()),
        breaks=list(log.breaks.values()),
        recompiles=list(log.recompiles.values()),
        first_call_seconds=first,
        seconds=statistics.median(time.seconds for time in times),
        all_seconds=[time.seconds for time in times],
        host_seconds=statistics.median(time.host for time in times),
        copy_bandwidth=machine.copy_bandwidth(device),
        peak_bytes=measured.peak_bytes,
        num_launches=measured.num_launches,
        kernel_seconds=measured.kernel_seconds,
        num_eager_ops=measured.num_eager_ops,
    )


@contextmanager
def _noted_runs() -> Iterator[list[tuple[Hashable, int]]]:
    """Note the runs of MARS's graphs, each with its elements."""
    found: list[tuple[Hashable, int]] = []
    Graphs.runs = found
    try:
        yield found
    finally:
        Graphs.runs = None


def _weigh(
    graphs: Mapping[str, Graph],
    traced_runs: Sequence[str],
    runs: Sequence[tuple[Hashable, int]],
) -> None:
    """Give each of MARS's graphs, which take tensors of any size, the work of its runs
    in the last call, as a multiple of its first run, for which its bytes are counted.

    Args:
        graphs: of all calls, by compile id.
        traced_runs: of all graphs in the last call, by compile id.
        runs: of MARS's graphs in all calls: see ``Graphs.runs``.
    """
    own = {key for key, g in graphs.items() if g.where.startswith(FILE)}
    last = [key for key in traced_runs if key in own]
    first, work = dict(reversed(runs)), Counter[str]()
    sizes = runs[len(runs) - len(last) :]
    for compile_id, (key, num) in zip(last, sizes, strict=True):
        work[compile_id] += num / max(first[key], 1)
    for compile_id in own:
        graphs[compile_id].work = work[compile_id]


@contextmanager
def _uncached(cold: bool) -> Iterator[None]:
    """Take no graph out of a cache, since inductor counts bytes while it compiles; if
    ``cold``, no binary either.
    """
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._inductor.utils import fresh_cache

    with (
        inductor.patch(fx_graph_cache=False),
        functorch.patch(enable_autograd_cache=False),
        fresh_cache() if cold else nullcontext(),
    ):
        yield


@dataclass(frozen=True)
class Trace:
    """The contents of torch.profiler's trace of one call."""

    runs: list[str]  # of graphs, by compile id, in their order
    graph_peaks: dict[str, int]  # the peak bytes of each, its results included
    peak_bytes: int  # allocated at most, beyond what lived before
    num_launches: int | None  # of all kernels on a GPU
    kernel_seconds: float | None  # that they took
    num_eager_ops: int  # called outside of compiled graphs


def traced(call: Callable[[], object], device: str, path: Path | None = None) -> Trace:
    """Run ``call`` once, and keep its Chrome trace at ``path``.

    Scratch that libraries below torch take for themselves is not seen, nor is, on a
    CPU, the freeing of memory that was there before.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its start and stop are no news
    activities, before, on_gpu = [ProfilerActivity.CPU], 0, device == "cuda"
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    # the CPU's allocator warns when memory of unknown size is freed
    kept = [] if on_gpu else _storages()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    del kept
    with tempfile.TemporaryDirectory() as folder:
        path = path or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    calls = [  # of the allocator
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]"
        and event["args"]["Device Type"] == DEVICE_TYPES[device]
    ]
    calls.sort(key=lambda call: call[0])
    regions = [e for e in events if e.get("name", "").startswith(REGION)]
    runs: list[str] = []
    peaks: dict[str, int] = {}
    for span in sorted(regions, key=lambda span: span["ts"]):
        key, start = span["name"].removeprefix(REGION), span["ts"]
        peak = _peak(calls, start, start + span["dur"])
        peaks[key] = max(peak, peaks.get(key, 0))
        runs.append(key)
    num_eager_ops = _num_eager_ops(events)
    if not on_gpu:
        return Trace(runs, peaks, _peak(calls), None, None, num_eager_ops)
    kernels = [event["dur"] for event in events if event.get("cat") == "kernel"]
    most, took = torch.cuda.max_memory_allocated() - before, 1e-6 * sum(kernels)
    return Trace(runs, peaks, most, len(kernels), took, num_eager_ops)


def _storages() -> list[UntypedStorage]:
    """Return the memory of all tensors that Python knows, and of gradients."""
    known = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    params = [p for p in known if type(p) is nn.Parameter]
    known += [p.grad for p in params if type(p.grad) is Tensor]
    strided = [t for t in known if t.layout is torch.strided]
    return [t.untyped_storage() for t in strided if not is_functorch_wrapped_tensor(t)]


def _num_eager_ops(events: Sequence[Mapping[str, Any]]) -> int:
    """Return how many operators of torch were called outside of compiled graphs, those
    left out that operators call themselves.
    """
    spans = [
        span
        for span in events
        if span.get("ph") == "X" and span["name"].startswith(("aten::", *COMPILED))
    ]
    spans.sort(key=lambda span: (span["ts"], -span["dur"]))
    num = 0
    ends: dict[int, float] = {}  # of each thread's last outermost span
    for span in spans:
        if span["ts"] >= ends.get(span["tid"], -math.inf):
            num += span["name"].startswith("aten::")
            ends[span["tid"]] = span["ts"] + span["dur"]
    return num


def _peak(
    calls: Sequence[tuple[float, int]], start: float = 0.0, end: float = math.inf
) -> int:
    changes = (size for time, size in calls if start <= time <= end)
    return max(accumulate(changes, initial=0))
