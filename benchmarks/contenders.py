"""The table of contenders: our rules and torch's own optimizers. Peers: peers.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from marsopt import MARS

Params = Mapping[str, nn.Parameter]

MAX_NORM = 1.0
# The authors' GPT-2 small with MARS-AdamW; the time of a step does not depend on it.
MARS_HYPER: dict[str, Any] = dict(
    lr=6e-3,
    betas=(0.95, 0.99),
    eps=1e-8,
    weight_decay=0.01,
    gamma=0.025,
    lr_1d=3e-3,
    betas_1d=(0.9, 0.95),
    weight_decay_1d=0.1,
)
ADAMW_HYPER: dict[str, Any] = dict(lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
ADAMW_AS_OURS: dict[str, Any] = ADAMW_HYPER | dict(
    lr_1d=ADAMW_HYPER["lr"], weight_decay_1d=ADAMW_HYPER["weight_decay"]
)
MUON_HYPER: dict[str, Any] = dict(lr=2e-2, weight_decay=0.1)


class Entry(NamedTuple):
    """A contender at work.

    ``phases`` are what is timed of a step, in order, each with the zero_grad after it;
    each wants a gradient of its own (exact MARS has two, all others one).
    """

    optimizers: Sequence[Optimizer]
    phases: Sequence[Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row.

    Args:
        key: its name on the command line.
        title: its name in tables and pictures.
        family: "ours", "torch" or "peers".
        build: an ``Entry`` over parameters; told whether our rules are compiled.
        num_buffers: full-size tensors in its state at most.
        matrix: whether it orthogonalizes matrices.
        twin: key of our contender that means to compute the same.
        package: what it needs from the package index.
        lacks: what keeps it from running here.
        note: what it computes differently.
    """

    key: str
    title: str
    family: str
    build: Callable[[Params, bool], Entry]
    num_buffers: int
    matrix: bool = False
    twin: str | None = None
    package: str | None = None
    lacks: str = ""
    note: str = ""


def split(
    params: Params, chosen: Callable[[str, nn.Parameter], bool]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The chosen ones, and the rest."""
    both: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, p in params.items():
        both[0 if chosen(name, p) else 1].append(p)
    return both


def by_ndim(params: Params) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and the rest."""
    return split(params, lambda _, p: p.ndim == 2)


def entry_of(
    params: Params, *optimizers: Optimizer, clip: bool = False, exact: bool = False
) -> Entry:
    """The step of one or more optimizers, after clip_grad_norm_ if ``clip``; if
    ``exact``, in the two phases of the authors' protocol for exact MARS.
    """
    every = list(params.values())

    def keep() -> None:
        if clip:
            clip_grad_norm_(every, MAX_NORM)
        for optimizer in optimizers:
            optimizer.update_previous_grad()

    def step() -> None:
        if clip:
            clip_grad_norm_(every, MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
            if exact:
                optimizer.update_last_grad()

    return Entry(optimizers, (keep, step) if exact else (step,))


def ours(mars_type: str, **options: Any) -> Callable[[Params, bool], Entry]:
    """``marsopt.MARS`` with the global clip inside, unless ``options`` say else."""

    def build(params: Params, compile: bool) -> Entry:
        groups = [{"params": list(params.values())}]
        if mars_type == "mars-m":  # as its authors: embeddings to AdamW
            tables = [p for n, p in params.items() if n.startswith(("wte.", "wpe."))]
            others = [
                p for n, p in params.items() if not n.startswith(("wte.", "wpe."))
            ]
            groups = [
                {"params": others},
                {"params": tables, "mars_type": "adamw", "betas": (0.9, 0.95)},
            ]
        arguments = dict(MARS_HYPER, max_norm=MAX_NORM) | options
        optimizer = MARS(groups, mars_type=mars_type, compile=compile, **arguments)
        exact = not arguments.get("is_approx", True)
        return entry_of(params, optimizer, exact=exact)

    return build


def torch_adamw(*, clip: bool, **mode: bool) -> Callable[[Params, bool], Entry]:
    """``torch.optim.AdamW`` in one of its modes."""

    def build(params: Params, compile: bool) -> Entry:
        optimizer = torch.optim.AdamW(list(params.values()), **ADAMW_HYPER, **mode)
        return entry_of(params, optimizer, clip=clip)

    return build


def torch_muon(params: Params, compile: bool) -> Entry:
    """``torch.optim.Muon`` on all matrices, fused AdamW on the rest."""
    matrices, others = by_ndim(params)
    muon = torch.optim.Muon(matrices, **MUON_HYPER)
    rest = ADAMW_HYPER | dict(lr=MARS_HYPER["lr_1d"])
    adamw = torch.optim.AdamW(others, fused=True, **rest)
    return entry_of(params, muon, adamw, clip=True)


REFERENCE = Contender(
    key="clip-adamw-fused",
    title="clip_grad_norm_ + torch AdamW fused",
    family="torch",
    build=torch_adamw(clip=True, fused=True),
    num_buffers=2,
    twin="adamw",
)


def _row(key: str, title: str, num_buffers: int, build, **more: Any) -> Contender:
    return Contender(
        key=key,
        title=f"marsopt {title}",
        family="ours",
        build=build,
        num_buffers=num_buffers,
        **more,
    )


OURS = [
    _row("mars-adamw", "MARS-AdamW, both clips", 3, ours("mars-adamw")),
    _row(
        "mars-adamw-bf16-h",
        "MARS-AdamW, both clips, h in bf16",
        3,
        ours("mars-adamw", h_dtype=torch.bfloat16),
    ),
    _row(
        "mars-adamw-local-clip",
        "MARS-AdamW, per-tensor clip alone",
        3,
        ours("mars-adamw", max_norm=None),
    ),
    _row(
        "mars-adamw-exact",
        "MARS-AdamW exact, both clips",
        4,
        ours("mars-adamw", is_approx=False),
        note="the whole protocol: update_previous_grad, step, update_last_grad; the "
        "second backward pass is not in it",
    ),
    _row("mars-lion", "MARS-Lion, both clips", 2, ours("mars-lion")),
    _row(
        "mars-shampoo", "MARS-Shampoo, both clips", 2, ours("mars-shampoo"), matrix=True
    ),
    _row(
        "mars-m",
        "MARS-M, both clips",
        2,
        ours("mars-m"),
        note="embeddings by AdamW, as its authors do",
        matrix=True,
    ),
    _row("adamw", "AdamW, global clip", 2, ours("adamw", **ADAMW_AS_OURS)),
    _row("lion", "Lion, global clip", 1, ours("lion")),
    _row("muon", "Muon, global clip", 1, ours("muon", **MUON_HYPER), matrix=True),
]

TORCH = [
    Contender(
        key="adamw-fused",
        title="torch AdamW fused, no clip",
        family="torch",
        build=torch_adamw(clip=False, fused=True),
        num_buffers=2,
    ),
    Contender(
        key="clip-adamw-foreach",
        title="clip_grad_norm_ + torch AdamW foreach",
        family="torch",
        build=torch_adamw(clip=True, foreach=True),
        num_buffers=2,
        twin="adamw",
    ),
    Contender(
        key="adamw-foreach",
        title="torch AdamW foreach, no clip",
        family="torch",
        build=torch_adamw(clip=False, foreach=True),
        num_buffers=2,
    ),
    Contender(
        key="torch-muon",
        title="clip_grad_norm_ + torch Muon",
        family="torch",
        build=torch_muon,
        num_buffers=1,
        matrix=True,
        twin="muon",
        note="all matrices, as ours; fused AdamW for the rest",
    ),
]
