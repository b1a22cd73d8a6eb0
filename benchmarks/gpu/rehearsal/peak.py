"""Memory of the loop of ``research.compare`` on one GPU, counted over fake tensors
as the caching allocator counts it, beside the forecast of ``train.plan``.
"""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

from torch import fx

from benchmarks.gpu.rehearsal.allocations import Allocations, held
from benchmarks.gpu.rehearsal.crossings import Watch
from benchmarks.gpu.rehearsal.device import H100
from benchmarks.gpu.rehearsal.fakes import fake_h100
from benchmarks.gpu.rehearsal.lowering import Graph, Runner, load
from benchmarks.gpu.rehearsal.pretraining import training
from research.compare.plain import Setting
from train.forecast import forecast, models

TOLERANCE = 0.05  # of the forecast
NUM_STEPS = 2  # the first makes what stays
GIB = 2**30
# what ``train.plan`` forecasts, in the words of both
FORECAST = ("parameters", "gradients", "state", "step_peak")


def _allocating(graph: Graph, _: fx.GraphModule) -> Runner:
    """Run a graph's wrapper, which allocates and frees as on a GPU; kernels do not run,
    and nothing keeps what they are called with.
    """
    return load(graph.source, device="cuda", log=deque(maxlen=0)).call


def measure(setting: Setting, method: str) -> dict[str, Any]:
    """Return bytes of the second step: ``parameters``, ``gradients``, ``state``;
    ``lives``, all that lives after the step; ``gradient_peak`` and ``step_peak``, the
    most that lived at once in forward and backward passes, and in the optimizer.

    The optimizer is compiled, as on a GPU, the model where the setting says so.
    """
    with fake_h100(_allocating, boxed=True), Watch(), Allocations() as allocated:
        found = training(setting, method, compile=True)
        params = [*found.task.model.parameters()]
        for _ in range(NUM_STEPS):
            gc.collect()  # compiling leaves frames, and their tensors, in cycles
            allocated.reset()
            found.gradient()
            gradient_peak, gradients = allocated.peak, held(p.grad for p in params)
            gc.collect()
            allocated.reset()
            found.update()
            step_peak = allocated.peak
        rows = (x for entry in found.optimizer.state.values() for x in entry.values())
        return dict(
            method=method,
            micro_batch=setting.micro_batch,
            compiled=setting.compile,
            parameters=held(params),
            gradients=gradients,
            state=held(rows),
            lives=allocated.now,
            gradient_peak=gradient_peak,
            step_peak=step_peak,
            peak=max(gradient_peak, step_peak),
        )


def beside(found: dict[str, Any], model: str) -> dict[str, Any]:
    """Return ``measure``'s answer with the forecast for one GPU and what disagrees.

    Args:
        found: the answer.
        model: one of ``train.forecast.models.MODELS``.
    """
    (job,) = models.jobs(model, [found["method"]])
    memory = forecast(job, 1).memory
    told = dict(
        parameters=memory.parameters,
        gradients=memory.gradients,
        state=memory.state,
        step_peak=memory.peak,
    )
    problems = [
        f"{found['method']}, {name}: got {told[name] / GIB:.2f} GiB forecast, expected "
        f"{found[name] / GIB:.2f} GiB to {TOLERANCE:.0%}, as counted"
        for name in FORECAST
        if abs(told[name] - found[name]) > TOLERANCE * found[name]
    ]
    kept = sum(found[name] for name in ("parameters", "state"))
    if abs(found["lives"] - kept) > TOLERANCE * kept:
        problems.append(
            f"{found['method']}: got {found['lives'] / GIB:.2f} GiB that live after a "
            f"step, expected {kept / GIB:.2f} GiB of parameters and state: something "
            "is kept"
        )
    return dict(model=model, **found, forecast=told, problems=problems)


HEAD = (
    f"{'method':22} {'micro':>5} {'':9} {'param':>6} {'grad':>6} {'state':>6}"
    f" {'step':>6} {'passes':>6} {'after':>6} {'of H100':>7}"
)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table of ``beside``'s answers, in GiB."""
    lines = [HEAD]
    for row in rows:
        counted = [*(row[name] for name in FORECAST), row["gradient_peak"]]
        shown = " ".join(f"{x / GIB:6.2f}" for x in (*counted, row["lives"]))
        share = row["peak"] / H100.total_memory
        lines.append(
            f"{row['method']:22} {row['micro_batch']:5} counted   {shown} {share:7.1%}"
        )
        told = " ".join(f"{row['forecast'][name] / GIB:6.2f}" for name in FORECAST)
        lines.append(f"{'':28} forecast  {told}")
        lines += [f"  PROBLEM {problem}" for problem in row["problems"]]
    return "\n".join(lines)
