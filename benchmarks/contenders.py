"""The table of contenders: our rules and torch's own optimizers. Peers: peers.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from marsopt import MARS, REGISTRY
from marsopt.profiling.gpt2 import EMBEDDINGS, param_groups

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
# The authors' defaults (nikhilvyas/SOAP).
SOAP_HYPER: dict[str, Any] = dict(
    lr=3e-3, betas=(0.95, 0.95), eps=1e-8, weight_decay=0.01
)


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


def by_ndim(params: Params) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices, and the rest."""
    every = params.values()
    return [p for p in every if p.ndim == 2], [p for p in every if p.ndim != 2]


def entry_of(
    params: Params, *optimizers: Optimizer, clip: bool = False, exact: bool = False
) -> Entry:
    """Return the step of one or more optimizers, after clip_grad_norm_ if ``clip``; if
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
    """Build ``marsopt.MARS``, the global clip inside unless ``options`` say else."""

    def build(params: Params, compile: bool) -> Entry:
        arguments = dict(MARS_HYPER, max_norm=MAX_NORM, ns_dtype=torch.bfloat16)
        arguments |= options  # Newton-Schulz as torch's Muon, on a CPU too
        groups = param_groups(params, mars_type)
        if any(p.dtype != torch.float32 for p in params.values()):
            arguments.setdefault("state_dtype", torch.float32)
        optimizer = MARS(groups, mars_type=mars_type, compile=compile, **arguments)
        exact = not arguments.get("is_approx", True)
        return entry_of(params, optimizer, exact=exact)

    return build


def torch_adamw(*, clip: bool) -> Callable[[Params, bool], Entry]:
    """Build ``torch.optim.AdamW``, fused."""

    def build(params: Params, compile: bool) -> Entry:
        optimizer = torch.optim.AdamW(list(params.values()), **ADAMW_HYPER, fused=True)
        return entry_of(params, optimizer, clip=clip)

    return build


def torch_muon(*, beside: Collection[str] = ()) -> Callable[[Params, bool], Entry]:
    """Build ``torch.optim.Muon`` on all matrices but those that are named, fused AdamW
    on the rest.
    """

    def build(params: Params, compile: bool) -> Entry:
        return beside_adamw(params, beside, torch.optim.Muon, **MUON_HYPER)

    return build


def beside_adamw(
    params: Params,
    beside: Collection[str],
    kind: Callable[..., Optimizer],
    **options: Any,
) -> Entry:
    """Return the step of an optimizer of all matrices but those that are named, and of
    fused AdamW for the rest.
    """
    matrices, others = by_ndim({n: p for n, p in params.items() if n not in beside})
    rest = ADAMW_HYPER | dict(lr=MARS_HYPER["lr_1d"])
    others += [params[name] for name in beside]
    adamw = torch.optim.AdamW(others, fused=True, **rest)
    return entry_of(params, kind(matrices, **options), adamw, clip=True)


REFERENCE = Contender(
    key="clip-adamw-fused",
    title="clip_grad_norm_ + torch AdamW fused",
    family="torch",
    build=torch_adamw(clip=True),
    num_buffers=2,
    twin="adamw",
)


WORDS = {"mars": "MARS", "adamw": "AdamW", "nadamw": "NAdamW", "normuon": "NorMuon"}
# for those that are compared with torch's own; the others take MARS_HYPER
HYPER: dict[str, dict[str, Any]] = {
    "adamw": ADAMW_AS_OURS,
    "muon": MUON_HYPER,
    "moonlight": MUON_HYPER,
    "soap": SOAP_HYPER,
    "soap-muon": SOAP_HYPER,
}


def _ours(name: str, title: str = "", **changed: Any) -> Contender:
    """Return the row of a rule, with what is ``changed`` in a variant of it."""
    rule, embeddings = REGISTRY[name], ""
    num_buffers = rule.num_buffers()
    if rule.fallback == "adamw":
        num_buffers = max(num_buffers, REGISTRY["adamw"].num_buffers())
        embeddings = "embeddings by AdamW, as its authors do"
    written = "-".join(WORDS.get(word, word.title()) for word in name.split("-"))
    clips = "both clips" if rule.is_mars else "global clip"
    row = Contender(
        key=name,
        title=f"marsopt {title or f'{written}, {clips}'}",
        family="ours",
        build=ours(name, **HYPER.get(name, {})),
        num_buffers=num_buffers,
        matrix=rule.matrix_only,
        note=embeddings,
    )
    return replace(row, **changed)


OURS = [
    *map(_ours, REGISTRY),
    _ours(
        "moonlight",
        "Moonlight, global clip, Newton-Schulz in fp16",
        key="moonlight-fp16",
        build=ours("moonlight", **MUON_HYPER, ns_dtype=torch.float16),
    ),
    _ours(
        "soap-muon",
        "SOAP-Muon of short sides, global clip, refreshes spread over the steps",
        key="soap-muon-short",
        build=ours("soap-muon", **SOAP_HYPER, sides="short", stagger=True),
    ),
    _ours(
        "mars-adamw",
        "MARS-AdamW exact, both clips",
        key="mars-adamw-exact",
        build=ours("mars-adamw", is_approx=False),
        num_buffers=4,
        note="the whole protocol: update_previous_grad, step, update_last_grad; the "
        "second backward pass is not in it",
    ),
]

TORCH = [
    Contender(
        key="adamw-fused",
        title="torch AdamW fused, no clip",
        family="torch",
        build=torch_adamw(clip=False),
        num_buffers=2,
    ),
    Contender(
        key="torch-muon",
        title="clip_grad_norm_ + torch Muon",
        family="torch",
        build=torch_muon(),
        num_buffers=1,
        matrix=True,
        twin="muon",
        note="all matrices, as ours; fused AdamW for the rest",
    ),
    Contender(
        key="torch-muon-blocks",
        title="clip_grad_norm_ + torch Muon of blocks",
        family="torch",
        build=torch_muon(beside=EMBEDDINGS),
        num_buffers=2,
        matrix=True,
        note="the matrices of blocks, as our MARS-M and Moonlight; fused AdamW for "
        "the rest",
    ),
]
