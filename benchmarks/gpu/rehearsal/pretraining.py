"""The plain loop of ``research.compare`` over fake CUDA tensors: its own functions,
lowered to Triton source, with what crosses between host and device in each step.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch._dynamo.exc import Unsupported

from benchmarks.gpu.rehearsal.crossings import Watch, reads
from benchmarks.gpu.rehearsal.fakes import fake_h100
from benchmarks.gpu.rehearsal.lowering import Graph, launches
from marsopt import REGISTRY
from marsopt.profiling.gpt2 import MODELS, NUM_POSITIONS, VOCAB_SIZE
from research.compare import plain
from research.studies import published
from train.gpt2 import Shape

HEAD_WIDTH = 64
LR = 1e-3  # for which no recipe is asked: no count depends on it
NUM_STEPS = 3  # one that compiles, and two that may not
LIBRARY = re.compile(r"(?:extern_kernels|torch\.ops\.aten)\.[\w.]+\(")
PARTS = ("forward", "backward")  # of the model, in the order of lowering


def shape_of(model: str) -> Shape:
    """Return the shape of a model of ``MODELS``."""
    num_layers, width = MODELS[model]
    heads = width // HEAD_WIDTH
    return Shape(num_layers, heads, width, NUM_POSITIONS, VOCAB_SIZE)


def setting_of(shape: Shape, micro_batch: int, *, compile: bool) -> plain.Setting:
    """Return a setting in bfloat16, two micro-batches a step."""
    return plain.Setting(
        data="none",
        layers=shape.num_layers,
        heads=shape.num_heads,
        width=shape.width,
        vocab_size=shape.vocab_size,
        inverse_layer_scale=shape.inverse_layer_scale,
        seq_len=shape.block_size,
        batch=2 * micro_batch,
        micro_batch=micro_batch,
        steps=10,
        held_out=micro_batch,
        device="cuda",
        dtype="bfloat16",
        compile=compile,
    )


def training(
    setting: plain.Setting, method: str, *, compile: bool | None = None
) -> plain.Training:
    """Return a training of zeros, within ``fake_h100``.

    Args:
        setting: how it goes.
        method: by what, as ``research.studies.published`` takes it.
        compile: whether the optimizer is compiled; None = as the model.
    """
    torch.compiler.reset()  # else methods share the graphs of one model
    plain.compiled.cache_clear()
    text = np.zeros(4 * setting.seq_len, np.uint16)
    recipe = published(method, lr=LR)
    return plain.Training(setting, recipe, 0, (text, text), compile)


def rehearse(setting: plain.Setting, method: str) -> dict[str, Any]:
    """Run three steps.

    Returns:
        method, parameters; ``graphs``: part, function, launches of Triton kernels and
        calls of libraries of each; ``steps``: how many graphs there were after each,
        and what crossed in its gradient and in the optimizer; ``problems``: what is
        not as it should be, in words.
    """
    steps: list[dict[str, Any]] = []
    problems: list[str] = []
    with fake_h100() as graphs, Watch() as watch:
        found = training(setting, method)
        num_params = sum(p.numel() for p in found.task.model.parameters())
        watch.taken()
        try:
            for _ in range(NUM_STEPS):
                found.gradient()
                gradient = watch.taken()
                found.update()
                step = watch.taken()
                problems += reads((*gradient, *step))
                crossed = dict(gradient=gradient, step=step)
                crossed = {k: [asdict(c) for c in v] for k, v in crossed.items()}
                steps.append(dict(num_graphs=len(graphs), **crossed))
        except Unsupported as error:
            problems.append(f"got a graph break, expected none: {_first(error)}")
    done = dict(method=method, num_params=num_params, steps=steps)
    done |= dict(compiled=setting.compile, graphs=described(graphs), problems=problems)
    problems += check(done)
    return done


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def described(graphs: list[Graph]) -> list[dict[str, Any]]:
    """Return part, function, launches and calls of libraries of each graph."""
    found, parts = [], iter(PARTS)
    for graph in graphs:
        is_model = graph.function == plain.mean_loss.__name__
        kernels, log = launches(graph)
        found.append(
            dict(
                part=next(parts, "again") if is_model else "step",
                function=graph.function,
                num_kernels=len(kernels),
                num_launches=len(log),
                num_library_calls=len(LIBRARY.findall(graph.source)),
            )
        )
    return found


def check(found: dict[str, Any]) -> list[str]:
    """Return what is not as it should be in ``rehearse``'s answer."""
    problems = []
    steps = found["steps"]
    counts = [step["num_graphs"] for step in steps]
    if found["compiled"] and len(counts) == NUM_STEPS:
        if len(set(counts)) > 1:
            problems.append(
                f"got {counts} graphs after steps 1 to {NUM_STEPS}, expected as many "
                "after each: something is compiled again"
            )
        rule = found["method"].removesuffix("-transport")
        of_step = 3 if REGISTRY[rule].matrix_only else 2
        parts = [graph["part"] for graph in found["graphs"]]
        if parts[: counts[0]] != [*PARTS, *["step"] * of_step]:
            problems.append(
                f"got graphs {parts}, expected {list(PARTS)} and {of_step} of the step"
            )
    for number, step in enumerate(steps[1:], 2):
        if step["step"]:
            problems.append(f"step {number}: got {step['step']} in the optimizer")
        waiting = [c for c in step["gradient"] if c["waits"]]
        if waiting or len(step["gradient"]) != 2:
            problems.append(
                f"step {number}: got {step['gradient']} in the gradient, expected the "
                "copies of inputs and labels from pinned memory alone"
            )
    return problems


def table(found: dict[str, Any]) -> str:
    """Return the answers of ``rehearse`` as text."""
    lines = [
        f"{found['method']}, {found['num_params']:,} parameters",
        f"  {'part':9} {'function':10} {'kernels':>8} {'launches':>9} {'library':>10}",
    ]
    for graph in found["graphs"]:
        lines.append(
            f"  {graph['part']:9} {graph['function']:10} {graph['num_kernels']:8}"
            f" {graph['num_launches']:9} {graph['num_library_calls']:10}"
        )
    for number, step in enumerate(found["steps"], 1):
        free = sum(not c["waits"] for c in step["gradient"])
        waits = sum(c["waits"] for c in (*step["gradient"], *step["step"]))
        lines.append(
            f"  step {number}: {step['num_graphs']} graphs; {free} copies that nobody "
            f"waits for, {waits} that the host waits for"
        )
    return "\n".join([*lines, *(f"  PROBLEM {p}" for p in found["problems"])])
