"""marsopt.profile: the report on one step function, whoever wrote it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from marsopt.profile import machine
from marsopt.profile.compile_log import listening
from marsopt.profile.table import Report
from marsopt.profile.trace import traced


def profile(
    step_fn: Callable[..., object],
    *args: object,
    steps: int = 10,
    compile: bool | None = None,
    cold: bool = True,
    device: str | None = None,
    trace: str | Path | None = None,
    compile_log: str | Path | None = None,
) -> Report:
    """Call ``step_fn(*args)`` some ``steps + 2`` times, and tell what it costs.

    Whatever was compiled in this process before is forgotten (``torch.compiler.reset``)
    and compiled anew when it is called again: what is not compiled under observation
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
        trace: file for the Chrome trace of one call.
        compile_log: folder for torch's structured compile log, which tlparse reads.

    Returns:
        A ``Report``; printed, it is a table.

    Raises:
        TypeError: ``step_fn`` cannot be called.
        ValueError: ``steps`` below 1, an unknown device.
    """
    if not callable(step_fn):
        raise TypeError(
            f"got a {type(step_fn).__name__}, expected a function: pass the step "
            "itself, and its arguments after it"
        )
    if steps < 1:
        raise ValueError(f"got steps={steps}, expected at least 1: time one call")
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(
            f"got device={device!r}, expected 'cpu' or 'cuda': others have no "
            "allocator that tells its peak"
        )
    path = None if trace is None else Path(trace)
    folder = None if compile_log is None else Path(compile_log)

    def call() -> object:
        return function(*args)

    function = torch.compile(step_fn) if compile else step_fn
    torch.compiler.reset()
    with _uncached(cold), listening(folder) as log:
        first = machine.seconds(call, device)
        if compile is None and not log.graphs:
            function = torch.compile(step_fn)
            first = machine.seconds(call, device)
        seconds = [machine.seconds(call, device) for _ in range(steps)]
        found = traced(call, device, path)
    graphs = log.graphs
    for graph in graphs:
        graph.num_runs = found.num_runs[graph.compile_id]
        graph.peak_bytes = found.graph_peaks.get(graph.compile_id, 0)
    return Report(
        machine=machine.one_line(machine.describe(device)),
        num_calls=steps + 2,
        graphs=graphs,
        breaks=log.breaks,
        recompiles=log.recompiles,
        first_call_seconds=first,
        seconds=statistics.median(seconds),
        all_seconds=seconds,
        copy_bandwidth=machine.copy_bandwidth(device),
        peak_bytes=found.peak_bytes,
        num_launches=found.num_launches,
    )


def _uncached(cold: bool) -> ExitStack:
    """Take no graph out of a cache, since inductor counts bytes while it compiles; if
    ``cold``, no binary either.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.utils import fresh_cache

    with ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        if cold:
            stack.enter_context(fresh_cache())
        return stack.pop_all()
