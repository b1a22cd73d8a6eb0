"""Steps of a rule over fake CUDA tensors of GPT-2 or of a layer of Llama 7B: their
graphs, launches and bytes, and faults among these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.rehearsal.binaries import binaries
from benchmarks.gpu.rehearsal.device import h100
from benchmarks.gpu.rehearsal.lowering import Graph, launches, lowering
from benchmarks.gpu.rehearsal.traffic import accesses
from marsopt import MARS
from marsopt.profiling.gpt2 import MODELS, param_groups, shapes
from marsopt.profiling.optimizer import floor_of
from marsopt.rules.registry import REGISTRY

# Touvron et al., arXiv 2302.13971: one layer of 7B, width 4096
WIDTH, HIDDEN = 4096, 11008
LLAMA_LAYER = {
    **{f"attention.{name}": (WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")},
    "feed_forward.w1": (HIDDEN, WIDTH),
    "feed_forward.w2": (WIDTH, HIDDEN),
    "feed_forward.w3": (HIDDEN, WIDTH),
    "attention_norm": (WIDTH,),
    "ffn_norm": (WIDTH,),
}
ALL_MODELS = {name: shapes(*size) for name, size in MODELS.items()}
ALL_MODELS["llama-7b-layer"] = LLAMA_LAYER
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# by which bytes may differ from the floor: sums of rows, written and read, are the most
EXACT = 2e-3
# of the 65536 of an H100's processor: 12 warps of 32 threads then run at once
MOST_REGISTERS = 168
# elements of the smallest stack of a model; tables of numbers are smaller
STACK = 2**12


@dataclass(frozen=True)
class Case:
    """One optimizer over one model; ``correction`` "none" corrects nothing, and
    ``compiles`` says whether kernels over stacks are compiled, too.
    """

    rule: str
    correction: str
    model: str
    dtype: str
    compiles: bool = True

    @property
    def name(self) -> str:
        """Return rule/correction/model/dtype, with /lowered if none is compiled."""
        words = [self.rule, self.correction, self.model, self.dtype]
        words += ["lowered"] * (not self.compiles)
        return "/".join(words)


def _corrections(rule: str) -> tuple[str, ...]:
    return ("approximate", "exact") if REGISTRY[rule].is_mars else ("none",)


CASES = {
    case.name: case
    for case in (
        Case(rule, correction, model, dtype, compiles)
        for compiles in (True, False)
        for model in ALL_MODELS
        for dtype in DTYPES
        for rule in REGISTRY
        for correction in _corrections(rule)
    )
}


def _step(optimizer: MARS, params: list[nn.Parameter], is_exact: bool) -> None:
    """Take a step; exact MARS is given the current gradients as those of before."""
    for p in params:
        p.grad = torch.empty_like(p)
    if is_exact:
        optimizer.update_previous_grad()
    optimizer.step()
    if is_exact:
        optimizer.update_last_grad()


def _move(optimizer: MARS) -> None:
    """Give the hyperparameters that a schedule moves other values."""
    for group in optimizer.param_groups:
        group.update(lr=2e-4, betas=(0.85, 0.97), weight_decay=0.2, eps=2e-8)
    optimizer.max_norm = 2.0


def play(name: str) -> dict[str, Any]:
    """Take steps over fake CUDA tensors; return the kernels of a warm step."""
    case = CASES[name]
    torch.compiler.reset()  # or sizes that another case had before become dynamic
    sizes, dtype = ALL_MODELS[case.model], DTYPES[case.dtype]
    is_exact = case.correction == "exact"
    with h100(), lowering() as graphs, FakeTensorMode():
        params = {
            name: nn.Parameter(torch.empty(size, device="cuda", dtype=dtype))
            for name, size in sizes.items()
        }
        optimizer = MARS(
            param_groups(params, case.rule),
            mars_type=case.rule,
            correction=None if case.correction == "none" else case.correction,
            lr=1e-4,
            max_norm=1.0,
            compile=True,
            state_dtype=torch.float32,
        )
        _step(optimizer, [*params.values()], is_exact)
        num_graphs = len(graphs)
        for graph in graphs:
            graph.num_calls = 0
        _move(optimizer)
        _step(optimizer, [*params.values()], is_exact)
        floor = floor_of(optimizer.describe().buckets).num_bytes
    with h100():
        kernels = [k for graph in graphs for k in kernels_of(graph, case.compiles)]
    num_params = sum(map(prod, sizes.values()))
    row = dict(
        name=name,
        graphs=num_graphs,
        calls=sum(graph.num_calls for graph in graphs),
        recompiled=len(graphs) - num_graphs,
        launches=sum(k["launches"] for k in kernels),
        stack_launches=sum(k["launches"] for k in kernels if k["over_stack"]),
        floor=floor / num_params,
        kernels=kernels,
    )
    for kind in ("loaded", "stored"):
        row[kind] = sum(kernel[kind] for kernel in kernels) / num_params
    return row | dict(faults=[*faults(row)])


def kernels_of(graph: Graph, compiles: bool) -> Iterator[dict[str, Any]]:
    """Yield the kernels of a graph: launches and bytes of all its calls, whether a
    kernel goes over stacks, and then its binaries.
    """
    sources, log = launches(graph)
    for name, source in sources.items():
        runs = [[*accesses(source, run)] for run in log if run.kernel == name]
        moved: Counter[str] = Counter()
        for access in (access for run in runs for access in run):
            moved[access.kind] += access.num_elements * access.size
        over_stack = any(a.full and a.num_elements >= STACK for a in runs[0])
        yield dict(
            name=name,
            launches=graph.num_calls * len(runs),
            over_stack=over_stack,
            binaries=[*binaries(name, source, runs[0])]
            if compiles and over_stack
            else [],
            **{kind: graph.num_calls * moved[kind] for kind in ("loaded", "stored")},
        )


def faults(row: dict[str, Any]) -> Iterator[str]:
    """Yield each fault of a case."""
    moved, floor = row["loaded"] + row["stored"], row["floor"]
    if abs(moved / floor - 1) > EXACT:
        yield f"{moved:.2f} bytes a parameter, floor {floor:.2f}"
    if row["recompiled"]:
        yield f"{row['recompiled']} recompiles while numbers moved"
    for kernel in row["kernels"]:
        for binary in kernel["binaries"]:
            where = f"{kernel['name']} with {binary['config']}"
            if binary["spills"]:
                yield f"{where} spills {binary['spills']} bytes"
            if binary["registers"] > MOST_REGISTERS:
                yield f"{where} has {binary['registers']} registers"
            if binary["narrow"]:
                yield f"{where} lacks {binary['narrow']} wide loads or stores"


def line(row: dict[str, Any]) -> str:
    """Return a case's figures; bytes are those of a parameter."""
    tried = [b for kernel in row["kernels"] for b in kernel["binaries"]]
    registers = max((b["registers"] for b in tried), default=0)
    return (
        f"{row['name']}: {row['graphs']} graphs, {row['calls']} calls, "
        f"{row['launches']} launches, {row['stack_launches']} of them over stacks, "
        f"{row['loaded'] + row['stored']:.2f} bytes, floor {row['floor']:.2f}, "
        f"{len(tried)} binaries, at most {registers} registers: "
        f"{'; '.join(row['faults']) or 'no fault'}"
    )
