"""Contenders from the package index, and from a checkout of the authors' code."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from benchmarks.contenders import (
    EVERY,
    MARS_HYPER,
    SOAP_HYPER,
    Contender,
    Entry,
    Params,
    beside_adamw,
    by_ndim,
    entry_of,
)
from marsopt.profiling.gpt2 import EMBEDDINGS
from train.errors import UserError

INSTALL = "pip install --group peers -c constraints.txt"
AUTHORS_FILE = Path("MARS", "optimizers", "mars.py")


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


def pytorch_optimizer(*, compile: bool) -> Callable[[Params, bool], Entry]:
    """pytorch_optimizer's MARS, through its factory: compiled, or foreach."""

    def build(params: Params, _: bool) -> Entry:
        library = importlib.import_module("pytorch_optimizer")
        optimizer = library.create_optimizer(
            nn.ParameterList(params.values()),
            "mars",
            wd_ban_list=(),
            compile=compile,
            foreach=True,
            **MARS_HYPER,
        )
        return entry_of(params, optimizer, clip=True)

    return build


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


def soap(package: str, **options: Any) -> Callable[[Params, bool], Entry]:
    """SOAP of a package, on the matrices of blocks."""

    def build(params: Params, _: bool) -> Entry:
        kind = importlib.import_module(package).SOAP
        return beside_adamw(params, EMBEDDINGS, kind, **SOAP_HYPER, **options)

    return build


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


def authors(checkout: Path | None, **options: Any) -> Callable[[Params, bool], Entry]:
    """The authors' class from a checkout of their repository."""

    def build(params: Params, _: bool) -> Entry:
        library = import_alone(checkout / AUTHORS_FILE, "_benchmarks_authors")
        every = list(params.values())
        optimizer = library.MARS(every, **MARS_HYPER, **options)
        exact = not options.get("is_approx", True)
        return entry_of(params, optimizer, clip=True, exact=exact)

    return build


# what makes a package's SOAP take the authors' defaults
SOAP_OPTIONS: dict[str, dict[str, Any]] = {
    "pytorch_optimizer": {},
    "heavyball": dict(
        shampoo_beta=SOAP_HYPER["betas"][1], max_precond_dim=10_000, merge_dims=False
    ),
}


def _soaps(package: str, title: str, note: str) -> list[Contender]:
    """Return the rows of a package's SOAP, with a refresh every ten steps, as by
    default, and in every one.
    """
    refreshes = {"": dict(precondition_frequency=10), "-every": EVERY}
    return [
        Contender(
            key=f"{package.replace('_', '-')}-soap{end}",
            title=f"clip_grad_norm_ + {title} SOAP"
            + (", a refresh in every step" if end else ""),
            family="peers",
            build=soap(package, **often, **SOAP_OPTIONS[package]),
            num_buffers=7,
            matrix=True,
            twin=f"soap{end}",
            package=package,
            note=note,
        )
        for end, often in refreshes.items()
    ]


FROM_INDEX = [
    Contender(
        key="pytorch-optimizer-compiled",
        title="clip_grad_norm_ + pytorch_optimizer MARS, compiled",
        family="peers",
        build=pytorch_optimizer(compile=True),
        num_buffers=3,
        twin="mars-adamw",
        package="pytorch_optimizer",
        note="adds 1e-15 to v, and eps before debiasing; any tensor of two or more "
        "dims is a matrix",
    ),
    Contender(
        key="pytorch-optimizer",
        title="clip_grad_norm_ + pytorch_optimizer MARS, foreach",
        family="peers",
        build=pytorch_optimizer(compile=False),
        num_buffers=3,
        twin="mars-adamw",
        package="pytorch_optimizer",
        note="as its compiled form",
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
    *_soaps("pytorch_optimizer", "pytorch_optimizer", "m in the parameter's own basis"),
    *_soaps(
        "heavyball",
        "HeavyBall",
        "refreshes a call earlier; lifts small eigenvalues; eps bounds from below",
    ),
]


AUTHORS = {
    "mars-adamw": ("MARS-AdamW", dict(mars_type="mars-adamw")),
    "mars-adamw-exact": (
        "MARS-AdamW exact",
        dict(mars_type="mars-adamw", is_approx=False),
    ),
    "mars-lion": ("MARS-Lion", dict(mars_type="mars-lion")),
    "mars-shampoo": ("MARS-Shampoo", dict(mars_type="mars-shampoo")),
}


def from_authors(checkout: Path | None) -> list[Contender]:
    """One row for each type of theirs."""
    lacks = "not here: --authors CHECKOUT of AGI-Arena/MARS" if checkout is None else ""
    return [
        Contender(
            key=f"authors-{twin}",
            title=f"clip_grad_norm_ + authors' {title}, eager",
            family="peers",
            build=authors(checkout, **options),
            num_buffers=4,
            matrix=twin == "mars-shampoo",
            twin=twin,
            lacks=lacks,
            note="the same buffers for every tensor and type; synchronises with the "
            "host once a matrix",
        )
        for twin, (title, options) in AUTHORS.items()
    ]


def table(checkout: Path | None) -> list[Contender]:
    """All peers; what keeps one from running here is its ``lacks``.

    Args:
        checkout: top folder of the authors' repository.

    Raises:
        UserError: their file is not in it.
    """
    if checkout is not None and not (checkout / AUTHORS_FILE).is_file():
        raise UserError(
            f"got --authors {checkout}, expected a checkout of AGI-Arena/MARS with "
            f"{AUTHORS_FILE} in it: give its top folder"
        )
    here = [
        row
        if version(row.package) is not None
        else replace(row, lacks=f"not installed: {INSTALL}")
        for row in FROM_INDEX
    ]
    return here + from_authors(checkout)
