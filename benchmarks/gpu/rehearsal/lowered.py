"""Part "lowered": the step of every rule under every correction, over the tensors of
GPT-2 and of a layer of Llama 7B, lowered to Triton; kernels over stacks are compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.rehearsal import binaries
from benchmarks.gpu.rehearsal.binaries import Binary
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
ALL_MODELS = (*MODELS, "llama-7b-layer")
NONE = "none"  # what names call no correction
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# by which bytes may differ from the floor: sums of rows, written and read, are the most
EXACT = 2e-3
# of the 65536 of an H100's processor: 12 warps of 32 threads then run at once
MOST_REGISTERS = 168
NAME = "kernel"  # of all that are compiled: equal ones have other names elsewhere


@dataclass(frozen=True)
class Case:
    """One optimizer over one model.

    Args:
        rule: of the registry.
        correction: "none" for a rule that corrects nothing.
        model: of ``ALL_MODELS``.
        dtype: of parameters and gradients.
        state: dtype of the state; bfloat16 is rounded stochastically.
        compiles: whether kernels over stacks are compiled, too.
    """

    rule: str
    correction: str
    model: str
    dtype: str
    state: str = "float32"
    compiles: bool = False

    @property
    def name(self) -> str:
        """Return rule/correction/model/dtype, with /state-bfloat16 and /binaries."""
        words = [self.rule, self.correction, self.model, self.dtype]
        words += ["state-bfloat16"] * (self.state == "bfloat16")
        return "/".join(words + ["binaries"] * self.compiles)


def corrections(rule: str) -> tuple[str, ...]:
    """Return the corrections that a rule can have."""
    first = ("approximate", "exact") if REGISTRY[rule].is_mars else (NONE,)
    return (*first, "transport")


_ALL = [
    Case(rule, correction, model, dtype, state, compiles)
    for model in ALL_MODELS
    for dtype in DTYPES
    for rule in REGISTRY
    for correction in corrections(rule)
    for state in DTYPES
    for compiles in (True, False)
]
CASES = {case.name: case for case in _ALL}
NAMES = tuple(CASES)
DEFAULT = tuple(c.name for c in _ALL if c.compiles and c.state == "float32")


# ---- a step over fake tensors --------------------------------------------------------


def gradient_of(p: Tensor) -> Tensor:
    """Return memory for a gradient, as autograd allocates it."""
    return torch.empty_like(p)


def step(optimizer: MARS, case: Case) -> None:
    """Take a step; exact MARS is given the current gradients as those of before."""
    if case.correction == "exact":
        optimizer.update_previous_grad()
    optimizer.step()
    if case.correction == "exact":
        optimizer.update_last_grad()


def move(group: dict) -> None:
    """Give every hyperparameter of a group another value."""
    moved = dict(
        lr=2e-4,
        gamma=0.03,
        betas=(0.85, 0.97),
        betas_1d=(0.8, 0.96),
        weight_decay=0.2,
        weight_decay_1d=0.15,
        eps=2e-8,
        clip=1.5,
    )
    # what is None follows another: a number would change the formulas
    group.update({name: v for name, v in moved.items() if group[name] is not None})


def play(name: str) -> dict[str, Any]:
    """Take steps over fake CUDA tensors; return what their graphs are made of."""
    case = CASES[name]
    torch.compiler.reset()  # or sizes that another case had before become dynamic
    model, dtype = case.model, DTYPES[case.dtype]
    sizes = LLAMA_LAYER if model == "llama-7b-layer" else shapes(*MODELS[model])
    with h100(), lowering() as graphs, FakeTensorMode():
        params = {
            name: nn.Parameter(torch.empty(size, device="cuda", dtype=dtype))
            for name, size in sizes.items()
        }
        for p in params.values():
            p.grad = gradient_of(p)
        optimizer = MARS(
            param_groups(params, case.rule),
            mars_type=case.rule,
            correction=None if case.correction == NONE else case.correction,
            lr=1e-4,
            max_norm=1.0,
            compile=True,
            state_dtype=DTYPES[case.state],
            stochastic_rounding=case.state == "bfloat16",
        )
        step(optimizer, case)
        num_graphs = len(graphs)
        buckets = optimizer.describe().buckets
        floor = floor_of(buckets).num_bytes
        for group in optimizer.param_groups:
            move(group)
        optimizer.max_norm = 2.0
        step(optimizer, case)
        next(iter(params.values())).grad = None
        step(optimizer, case)
        num_recompiled = len(graphs) - num_graphs
    smallest = min(sum(p.numel() for p in bucket.params) for bucket in buckets)
    num_params = sum(map(prod, sizes.values()))
    kernels = [
        kernel
        for graph in graphs[:num_graphs]
        for kernel in kernels_of(graph, smallest, case.compiles)
    ]

    def each(key: str) -> float:
        return sum(kernel[key] for kernel in kernels) / num_params

    row = dict(
        asdict(case),
        name=name,
        num_params=num_params,
        graphs=[graph.function for graph in graphs[:num_graphs]],
        num_recompiled=num_recompiled,
        launches=sum(k["runs"] for k in kernels),
        stack_launches=sum(k["runs"] for k in kernels if k["over_stack"]),
        loaded=each("loaded"),
        stored=each("stored"),
        flagged=each("flagged"),
        floor=floor / num_params,
        kernels=kernels,
    )
    return row | dict(faults=[*faults(row)])


@cache
def compiled_for_h100(source: str) -> list[Binary]:
    """Return a kernel in each configuration that inductor would try."""
    with h100():
        return list(binaries.compiled(NAME, source))


def kernels_of(graph: Graph, smallest: int, compiles: bool) -> Iterator[dict[str, Any]]:
    """Yield the kernels of a graph: ``runs`` (launches), bytes of all of them, and
    whether a kernel goes over stacks, of which the smallest has so many elements, and
    ``divides`` for every element of one.
    """
    with h100():
        sources, log = launches(graph)
    for name, source in sources.items():
        runs = [accesses(source, launch) for launch in log if launch.kernel == name]
        full = [a for a in runs[0] if a.of_stack and a.num_elements >= smallest]
        moved: Counter[str] = Counter()
        for run in runs:
            for access in run:
                moved[access.way] += access.num_bytes
        kernel = dict(
            name=name,
            graph=graph.function,
            runs=len(runs),
            over_stack=bool(full),
            divides=any(access.divides for access in full),
            **{way: moved[way] for way in ("loaded", "stored", "flagged")},
        )
        if compiles and full:
            kernel["binaries"] = [
                dict(
                    config=binary.config,
                    registers=binary.registers,
                    spills=binary.spills,
                    full_size=binary.wanted(runs[0]).total(),
                    narrow=binary.missing(runs[0]).total(),
                )
                for binary in compiled_for_h100(source.replace(name, NAME))
            ]
        yield kernel


# ---- what of it is not as it was meant to be -----------------------------------------


def faults(row: dict[str, Any]) -> Iterator[str]:
    """Yield each fault of a case."""
    moved, floor = row["loaded"] + row["stored"], row["floor"]
    if abs(moved / floor - 1) > EXACT:
        yield f"{moved:.2f} bytes a parameter, floor {floor:.2f}"
    if row["num_recompiled"]:
        yield f"{row['num_recompiled']} recompiles while numbers moved"
    for kernel in row["kernels"]:
        what = f"{kernel['graph']}: {kernel['name']}"
        if kernel["divides"]:
            yield f"{what} divides for every element"
        for binary in kernel.get("binaries", ()):
            compiled = f"{what} with {binary['config']}"
            if binary["spills"]:
                yield f"{compiled} spills {binary['spills']} bytes"
            if binary["registers"] > MOST_REGISTERS:
                yield f"{compiled} has {binary['registers']} registers"
            if binary["narrow"]:
                yield f"{compiled} lacks {binary['narrow']} wide loads or stores"


def columns(row: dict[str, Any]) -> dict[str, str]:
    """Return a case's figures for the table; bytes are those of a parameter."""
    every = [b for kernel in row["kernels"] for b in kernel.get("binaries", ())]
    num_wide = sum(b["full_size"] - b["narrow"] for b in every)
    return {
        "graphs": f"{len(row['graphs'])}",
        "launches": f"{row['launches']}",
        "over stacks": f"{row['stack_launches']}",
        "bytes": f"{row['loaded'] + row['stored']:.2f}",
        "floor": f"{row['floor']:.2f}",
        "behind a flag": f"{row['flagged']:.2f}",
        "binaries": f"{len(every)}",
        "registers, at most": f"{max((b['registers'] for b in every), default=0)}",
        "bytes spilled": f"{sum(b['spills'] for b in every)}",
        "wide loads and stores": f"{num_wide} of {sum(b['full_size'] for b in every)}",
    }
