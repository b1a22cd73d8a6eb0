"""Part "models": whole training steps on a GPU that is not there: the bf16 loop of
``research.compare`` over fake CUDA tensors, with its graphs, what crosses between host
and device, and memory counted as the caching allocator counts it.

A case is METHOD/MODEL/SEQUENCES/compiled, or /eager: by what, which GPT-2, sequences of
one of two passes a step, and whether the model is compiled, too. A fault: a graph break
or a recompile, a number that the host waits for, a copy beside the batch from pinned
memory, memory beside what ``train.plan`` forecasts, and memory that outlives a step.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._dynamo.exc import Unsupported

from benchmarks.gpu.rehearsal.allocations import Allocations, held
from benchmarks.gpu.rehearsal.crossings import Crossing, Watch, reads
from benchmarks.gpu.rehearsal.device import H100
from benchmarks.gpu.rehearsal.fakes import fake_h100
from benchmarks.gpu.rehearsal.lowering import Graph, Runner, load
from marsopt import REGISTRY
from marsopt.profiling.gpt2 import EMBEDDINGS, MODELS, NUM_POSITIONS, VOCAB_SIZE
from research.compare import plain
from research.studies import published
from train.forecast import forecast as forecast_of
from train.forecast import models
from train.gpt2 import Shape, tensor_sizes

METHODS = ("mars-adamw-transport", "mars-adamw", "mars-m")
PASSES = (4, 16)  # and 2 in the test suite
TINY = "tiny"  # of the test suite
HEAD_WIDTH = 64
LR = 1e-3  # for which no recipe is asked: no count depends on it
NUM_STEPS = 3  # one that compiles, and two that may not
TOLERANCE = 0.05  # of the forecast
GIB = 2**30
# what ``train.plan`` forecasts
FORECAST = ("parameters", "gradients", "state", "step_peak")


NAMES = [
    f"{method}/{model}/{num}/{form}"
    for method in METHODS
    for model in (*MODELS, TINY)
    for num in (2, *PASSES)
    for form in ("compiled", "eager")
]
DEFAULT = [f"{m}/gpt2-xl/{num}/compiled" for m in METHODS for num in PASSES]


def shape_of(model: str) -> Shape:
    """Return the shape of a model."""
    if model == TINY:
        return Shape(
            num_layers=1, num_heads=2, width=128, block_size=64, vocab_size=512
        )
    num_layers, width = MODELS[model]
    heads = width // HEAD_WIDTH
    return Shape(num_layers, heads, width, NUM_POSITIONS, VOCAB_SIZE)


def training(method: str, shape: Shape, num: int, *, compile: bool) -> plain.Training:
    """Return a training of zeros in bfloat16, two passes of ``num`` sequences a step,
    within ``fake_h100``; the optimizer is compiled.
    """
    setting = plain.Setting(
        data="none",
        layers=shape.num_layers,
        heads=shape.num_heads,
        width=shape.width,
        vocab_size=shape.vocab_size,
        inverse_layer_scale=shape.inverse_layer_scale,
        seq_len=shape.block_size,
        batch=2 * num,
        micro_batch=num,
        steps=10,
        held_out=num,
        device="cuda",
        dtype="bfloat16",
        compile=compile,
    )
    torch.compiler.reset()  # else methods share the graphs of one model
    plain.compiled.cache_clear()
    text = np.zeros(4 * setting.seq_len, np.uint16)
    return plain.Training(setting, published(method, lr=LR), 0, (text, text), True)


def _allocating(graph: Graph, _: fx.GraphModule) -> Runner:
    """Run a graph's wrapper, which allocates and frees as on a GPU; kernels do not run,
    and nothing keeps what they are called with.
    """
    return load(graph.source, device="cuda", log=deque(maxlen=0)).call


def play(name: str) -> dict[str, Any]:
    """Run three steps.

    Returns:
        ``graphs``: how many there were after each step; bytes of the last step:
        ``parameters``, ``gradients``, ``state``, ``lives`` (all that lives after it),
        ``gradient_peak`` and ``step_peak`` (the most that lived at once in forward and
        backward passes, and in the optimizer), ``peak`` of both; ``forecast`` of some
        of them; ``faults``.
    """
    method, model, num, form = name.split("/")
    compiled, shape = form == "compiled", shape_of(model)
    row = dict(name=name, graphs=[], forecast=forecast(method, shape), faults=[])
    faults = row["faults"]
    fake = fake_h100(_allocating, boxed=True)
    with fake as graphs, Watch() as watch, Allocations() as allocated:
        run = training(method, shape, int(num), compile=compiled)
        params = [*run.task.model.parameters()]
        watch.taken()
        try:
            for number in range(1, NUM_STEPS + 1):
                gc.collect()  # compiling leaves frames, and their tensors, in cycles
                allocated.reset()
                run.gradient()
                gradient_peak, gradients = allocated.peak, held(p.grad for p in params)
                passes = watch.taken()
                gc.collect()
                allocated.reset()
                run.update()
                faults += crossed(number, passes, watch.taken())
                row["graphs"].append(len(graphs))
        except Unsupported as error:
            told = str(error).strip().partition("\n")[0]
            faults.append(f"got a graph break, expected none: {told}")
            return row
        step_peak = allocated.peak
        states = run.optimizer.state.values()
        row |= dict(
            parameters=held(params),
            gradients=gradients,
            state=held(x for state in states for x in state.values()),
            lives=allocated.now,
            gradient_peak=gradient_peak,
            step_peak=step_peak,
            peak=max(gradient_peak, step_peak),
        )
    rule = method.removesuffix("-transport")
    num_graphs = 2 * compiled + (3 if REGISTRY[rule].matrix_only else 2)
    if row["graphs"] != [num_graphs] * NUM_STEPS:
        faults.append(
            f"got {row['graphs']} graphs after steps 1 to {NUM_STEPS}, expected "
            f"{num_graphs} after each"
        )
    faults += beside(row)
    return row


def crossed(number: int, passes: list[Crossing], step: list[Crossing]) -> Iterator[str]:
    """Yield what of a step should not have crossed between host and device."""
    yield from reads((*passes, *step))
    if number > 1 and step:
        yield f"step {number}: got {step} in the optimizer, expected nothing to cross"
    if number > 1 and (len(passes) != 2 or any(c.waits for c in passes)):
        yield (
            f"step {number}: got {passes} in the gradient, expected the copies of "
            "inputs and labels from pinned memory alone"
        )


def forecast(method: str, shape: Shape) -> dict[str, int]:
    """Return what ``train.plan`` forecasts of memory on one GPU, in bytes."""
    (job,) = models.jobs("gpt2-small", [method])
    sizes = tensor_sizes(shape)
    beside = [name for name in sizes if name.split(".")[0] in EMBEDDINGS]
    job = replace(job, shapes=sizes, elementwise=beside if job.elementwise else ())
    memory = forecast_of(job, 1).memory
    return dict(
        parameters=memory.parameters,
        gradients=memory.gradients,
        state=memory.state,
        step_peak=memory.peak,
    )


def beside(row: dict[str, Any]) -> Iterator[str]:
    """Yield where the memory of a step is not what is forecast."""
    for key in FORECAST:
        told, counted = row["forecast"][key], row[key]
        if abs(told - counted) > TOLERANCE * counted:
            yield (
                f"{key}: got {told / GIB:.2f} GiB forecast, expected "
                f"{counted / GIB:.2f} GiB to {TOLERANCE:.0%}, as counted"
            )
    kept = row["parameters"] + row["state"]
    if abs(row["lives"] - kept) > TOLERANCE * kept:
        yield (
            f"got {row['lives'] / GIB:.2f} GiB that live after a step, expected "
            f"{kept / GIB:.2f} GiB of parameters and state: something is kept"
        )


def columns(row: dict[str, Any]) -> dict[str, str]:
    """Return a case's figures for the table: memory in GiB."""
    shown = dict.fromkeys((*FORECAST, "gradient_peak", "lives"), "")
    if "peak" in row:
        shown = {key: f"{row[key] / GIB:.2f}" for key in shown}
        shown["of an H100"] = f"{row['peak'] / H100.total_memory:.1%}"
    return {"graphs": f"{row['graphs']}", **shown}
