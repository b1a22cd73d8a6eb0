"""What is rehearsed: the step of every rule under every correction, over the tensors of
GPT-2 and of a layer of Llama 7B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.rehearsal.device import h100
from benchmarks.gpu.rehearsal.lowering import Graph, lowering
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
NONE = "none"  # what options call no correction
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def tensors(model: str) -> dict[str, tuple[int, ...]]:
    """Return a model's tensors, by name."""
    return LLAMA_LAYER if model == "llama-7b-layer" else shapes(*MODELS[model])


ALL_MODELS = (*MODELS, "llama-7b-layer")


@dataclass(frozen=True)
class Case:
    """One optimizer over one model.

    Args:
        rule: of the registry.
        correction: None for a rule that corrects nothing.
        model: of ``ALL_MODELS``.
        dtype: of parameters and gradients.
        state: dtype of the state; bfloat16 is rounded stochastically.
    """

    rule: str
    correction: str | None = None
    model: str = "gpt2-small"
    dtype: str = "float32"
    state: str = "float32"

    @property
    def name(self) -> str:
        """Return what tables call it."""
        narrow = ", state in bfloat16" if self.state == "bfloat16" else ""
        return self.rule + (f" {self.correction}" if self.correction else "") + narrow


def corrections(rule: str) -> tuple[str | None, ...]:
    """Return the corrections that a rule can have."""
    own = ("approximate", "exact") if REGISTRY[rule].is_mars else (None,)
    return (*own, "transport")


def cases(models: tuple[str, ...], dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Yield every rule under every correction over these."""
    for model in models:
        for dtype in dtypes:
            for rule in REGISTRY:
                for correction in corrections(rule):
                    yield Case(rule, correction, model, dtype)


@dataclass(frozen=True)
class Lowered:
    """The graphs of a step.

    Args:
        case: what was stepped.
        graphs: in the order of the first step.
        num_recompiled: graphs that later steps compiled anew, while every number moved
            and a gradient was missing.
        num_params: of the case.
        stack_sizes: elements of each stack.
        floor: bytes that no step can go below.
    """

    case: Case
    graphs: list[Graph]
    num_recompiled: int
    num_params: int
    stack_sizes: list[int]
    floor: int


def lower(case: Case) -> Lowered:
    """Take steps over fake CUDA tensors, and keep the graphs that they compile."""
    dtype, sizes = DTYPES[case.dtype], tensors(case.model)
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
            correction=case.correction,
            lr=1e-4,
            max_norm=1.0,
            compile=True,
            state_dtype=DTYPES[case.state],
            stochastic_rounding=case.state == "bfloat16",
        )
        step(optimizer, case)
        num_graphs = len(graphs)
        floor = floor_of(optimizer.describe().buckets).num_bytes
        for group in optimizer.param_groups:
            move(group)
        optimizer.max_norm = 2.0
        step(optimizer, case)
        next(iter(params.values())).grad = None
        step(optimizer, case)
        num_recompiled = len(graphs) - num_graphs
    return Lowered(
        case,
        graphs[:num_graphs],
        num_recompiled,
        sum(map(prod, sizes.values())),
        [sum(p.numel() for p in b.params) for b in optimizer.describe().buckets],
        floor,
    )


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
    """Give every number of a group another value."""
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
