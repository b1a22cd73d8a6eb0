"""Contenders from the package index."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from benchmarks.contenders import (
    MARS_HYPER,
    SOAP_HYPER,
    Contender,
    Entry,
    Params,
    by_ndim,
    entry_of,
)

INSTALL = "pip install --group peers -c constraints.txt"


def version(package: str) -> str | None:
    """The installed one, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_alone(file: Path, alias: str) -> ModuleType:
    """Import one file of a package without the package's own ``__init__``.

    Its folder becomes a package named ``alias``, so that the file may import its
    siblings relatively.
    """
    spec = ModuleSpec(alias, loader=None, is_package=True)
    spec.submodule_search_locations = [str(file.parent)]
    sys.modules[alias] = module_from_spec(spec)
    sys.modules.pop(f"{alias}.{file.stem}", None)  # of another checkout
    return importlib.import_module(f"{alias}.{file.stem}")


def pytorch_optimizer(params: Params, _: bool) -> Entry:
    """pytorch_optimizer's MARS, through its factory."""
    library = importlib.import_module("pytorch_optimizer")
    optimizer = library.create_optimizer(
        nn.ParameterList(params.values()),
        "mars",
        wd_ban_list=(),
        compile=True,
        foreach=True,
        **MARS_HYPER,
    )
    return entry_of(params, optimizer, clip=True)


def heavyball(params: Params, _: bool) -> Entry:
    """HeavyBall's AdamW with mars=True, the whole chain compiled."""
    library = importlib.import_module("heavyball")
    matrices, others = by_ndim(params)
    h = MARS_HYPER
    optimizer = library.AdamW(
        [
            {"params": matrices},
            {
                "params": others,
                "lr": h["lr_1d"],
                "betas": h["betas_1d"],
                "weight_decay": h["weight_decay_1d"],
            },
        ],
        lr=h["lr"],
        betas=h["betas"],
        eps=h["eps"],
        weight_decay=h["weight_decay"],
        mars=True,
        mars_gamma=h["gamma"],
        compile_step=True,
    )
    return entry_of(params, optimizer, clip=True)


def timm(params: Params, _: bool) -> Entry:
    """timm's Mars. Its file alone: importing timm wants a torchvision that fits torch
    to the bit, which CPU builds of torch do not find on the package index.
    """
    (folder,) = find_spec("timm").submodule_search_locations
    library = import_alone(Path(folder, "optim", "mars.py"), "_benchmarks_timm_optim")
    matrices, others = by_ndim(params)
    h = MARS_HYPER
    optimizer = library.Mars(
        [
            {"params": matrices},
            {"params": others, "weight_decay": h["weight_decay_1d"]},
        ],
        lr=h["lr"],
        betas=h["betas"],
        eps=h["eps"],
        weight_decay=h["weight_decay"],
        gamma=h["gamma"],
        lr_1d_factor=h["lr_1d"] / h["lr"],
        betas_1d=h["betas_1d"],
    )
    return entry_of(params, optimizer, clip=True)


# what makes a package's SOAP take the authors' defaults
SOAP_OPTIONS: dict[str, dict[str, Any]] = {
    "pytorch_optimizer": {},
    "heavyball": dict(
        shampoo_beta=SOAP_HYPER["betas"][1], max_precond_dim=10_000, merge_dims=False
    ),
}


FROM_INDEX = [
    Contender(
        key="pytorch-optimizer-compiled",
        title="clip_grad_norm_ + pytorch_optimizer MARS, compiled",
        family="peers",
        build=pytorch_optimizer,
        num_buffers=3,
        twin="mars-adamw",
        package="pytorch_optimizer",
        note="adds 1e-15 to v, and eps before debiasing; any tensor of two or more "
        "dims is a matrix",
    ),
    Contender(
        key="heavyball",
        title="clip_grad_norm_ + HeavyBall AdamW(mars=True), compiled",
        family="peers",
        build=heavyball,
        num_buffers=3,
        twin="mars-adamw",
        package="heavyball",
        note="gamma and beta1 swapped (g - h times 0.024 instead of 0.475); no "
        "per-tensor clip; corrects LayerNorm weights too; eps is a bound from below",
    ),
    Contender(
        key="timm",
        title="clip_grad_norm_ + timm Mars, eager",
        family="peers",
        build=timm,
        num_buffers=3,
        twin="mars-adamw",
        package="timm",
        note="no correction at step 1; any tensor of two or more dims is a matrix; has "
        "neither a foreach nor a compiled mode",
    ),
]


def table() -> list[Contender]:
    """Return all peers; the reason that one cannot run here is its ``lacks``."""
    return [
        row
        if version(row.package) is not None
        else replace(row, lacks=f"not installed: {INSTALL}")
        for row in FROM_INDEX
    ]
