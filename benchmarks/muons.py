"""Muon of several libraries over the same sharded matrices, and what keeps a library
from being measured here.

All with momentum, Nesterov, five iterations of the same polynomial in bfloat16, steps
scaled by sqrt(max(1, rows / columns)), and no weight decay, which libraries scale
differently.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from benchmarks.peers import INSTALL, version
from marsopt import MARS
from marsopt.parallel import DataParallel, MeshCollectives

LR = 0.02
MOMENTUM = 0.95  # everybody's default but HeavyBall's
AXIS = "dp_shard"  # what torchtitan calls the axis that FSDP shards over
NUM_BUCKETS = 2  # as MeshCollectives has by default; DistMuon is told

Params = Mapping[str, nn.Parameter]
Build = Callable[[Params, DeviceMesh], Optimizer]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row.

    Args:
        title: its name in the table.
        build: an optimizer over all parameters; None: it is only named.
        package: whose version is told, and which has to be installed.
        lacks: what keeps it from running here.
        sharded: whether its matrices are cut; else every rank has them whole.
        same: whether it means to make torch's steps.
        note: what has to be known of its row.
        state: returns what an optimizer keeps, by parameter.
    """

    title: str
    build: Build | None = None
    package: str | None = None
    lacks: str = ""
    sharded: bool = True
    same: bool = True
    note: str = ""
    state: Callable[[Any], Mapping[Any, Mapping[str, Any]]] = attrgetter("state")

    @property
    def missing(self) -> str:
        """What keeps it from running here; empty if nothing does."""
        if not self.lacks and self.package and version(self.package) is None:
            return f"not installed: {INSTALL}"
        return self.lacks


def ours(mars_type: str, **options: float) -> Build:
    """Build ``marsopt.MARS``, compiled where the machine can."""

    def build(params: Params, mesh: DeviceMesh) -> Optimizer:
        return MARS(
            params.values(),
            lr=LR,
            weight_decay=0.0,
            mars_type=mars_type,
            ns_dtype=torch.bfloat16,
            collectives=MeshCollectives(mesh),
            **options,
        )

    return build


def data_parallel(params: Params, mesh: DeviceMesh) -> Optimizer:
    """Build ours over matrices that every rank holds."""
    collectives = DataParallel(mesh.get_group())
    return MARS(
        params.values(), lr=LR, weight_decay=0.0, mars_type="muon",
        ns_dtype=torch.bfloat16, collectives=collectives,
    )  # fmt: skip


def zero_redundancy(params: Params, mesh: DeviceMesh) -> Optimizer:
    """Build torch's wrapper around ours."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit

    return ZeroRedundancyOptimizer(
        list(params.values()), optimizer_class=MARS, lr=LR, weight_decay=0.0,
        mars_type="muon", ns_dtype=torch.bfloat16,
    )  # fmt: skip


def torch_muon(params: Params, mesh: DeviceMesh) -> Optimizer:
    """Build torch.optim's, which takes tensors as they are."""
    return torch.optim.Muon(params.values(), lr=LR, weight_decay=0.0)


def pytorch_optimizer(params: Params, mesh: DeviceMesh) -> Optimizer:
    """Build pytorch_optimizer's in its default (foreach) mode."""
    library = importlib.import_module("pytorch_optimizer")
    return library.Muon([dict(params=list(params.values()), use_muon=True)], lr=LR)


def heavyball(params: Params, mesh: DeviceMesh) -> Optimizer:
    """Build HeavyBall's."""
    library = importlib.import_module("heavyball")
    return library.Muon(list(params.values()), lr=LR, betas=(MOMENTUM, 0.99))


def dist_muon(params: Params, mesh: DeviceMesh) -> Optimizer:
    """Build torchtitan's with whole matrices on owners, as its Kimi recipe does, but in
    as many buckets as ours.

    It refuses every device but CUDA, for whose streams torch.cpu has stand-ins with
    other arguments. Beyond that it runs as it is.
    """
    from train.engine import titan_cpu

    titan_cpu.prepare()
    from torchtitan.distributed.flex_shard import dist_muon as library
    from torchtitan.distributed.flex_shard import optimizer_reshard as layouts

    names = list(params)
    cut = -(-len(names) // NUM_BUCKETS)
    buckets = [names[i : i + cut] for i in range(0, len(names), cut)]
    owned = layouts.ComputeLayout(shardings_by_mesh_axis={AXIS: layouts.Owned()})

    def stream(device: torch.device, priority: int) -> torch.Stream:
        return torch.cpu.current_stream()

    with (
        mock.patch.object(torch.cpu, "Stream", stream),
        mock.patch.object(
            library.DistMuon,
            "_validate_parameter_storage",
            lambda self: torch.device("cpu"),
        ),
    ):
        return library.build_dist_muon(
            [dict(params=params.values(), param_names=names)],
            compute_sharding_by_fqn=dict.fromkeys(names, owned),
            bucket_configs=[layouts.BucketConfig(patterns=part) for part in buckets],
            lr=LR,
            weight_decay=0.0,
        )


OURS = Contender(
    title="marsopt Muon",
    build=ours("muon"),
    note="the all-reduce lets all ranks skip a step that is not finite; no other looks",
)
WHOLE = Contender(
    title="torch.optim Muon, whole",
    build=torch_muon,
    sharded=False,
    note="not sharded: every rank holds and iterates everything; what all others are "
    "compared with",
)
CONTENDERS = [
    OURS,
    Contender(
        title="marsopt MARS-M, both clips",
        build=ours("mars-m", max_norm=1.0),
        same=False,
        note="all clip norms are in the same all-reduce; another rule, so not compared",
    ),
    Contender(
        title="torchtitan DistMuon",
        build=dist_muon,
        package="torchtitan",
        note="refuses a CPU; measured with that check and its streams put aside",
    ),
    Contender(
        title="pytorch_optimizer Muon",
        build=pytorch_optimizer,
        package="pytorch_optimizer",
        note="every rank iterates every matrix",
    ),
    Contender(
        title="HeavyBall Muon",
        build=heavyball,
        package="heavyball",
        same=False,
        note="iterates with other coefficients, so not compared; gathers update, "
        "gradient and parameter of each matrix",
    ),
    Contender(
        title="torch.optim Muon",
        build=torch_muon,
        note="DTensor's own propagation, product by product",
    ),
    WHOLE,
    Contender(
        title="marsopt Muon, DataParallel",
        build=data_parallel,
        sharded=False,
        note="not sharded: plain DDP, whose gradients every rank has whole; results of "
        "Newton-Schulz are all-gathered in bfloat16",
    ),
    Contender(
        title="ZeroRedundancyOptimizer(MARS)",
        build=zero_redundancy,
        sharded=False,
        note="not sharded: torch's wrapper deals whole parameters to ranks by their "
        "size, and broadcasts them",
        state=attrgetter("optim.state"),
    ),
    Contender(
        title="muonium",
        lacks="does not run on a CPU: imports Triton, and iterates in a kernel of it",
    ),
    Contender(
        title="dion",
        lacks="not on the package index; by its code, under DDP: momentum on every "
        "rank, an all-gather of updates in bfloat16, 2 mn (p - 1)/p bytes a matrix",
    ),
]
