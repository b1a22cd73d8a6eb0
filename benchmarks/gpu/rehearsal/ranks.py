"""Part "ranks": steps of one rank among many: FSDP2, HSDP and plain DDP over a process
group that sends nothing, and fake CUDA tensors. Counted are the collectives of a warm
step, beside those that ``train.forecast`` names (of DDP, which it does not know, those
that the size of a bucket makes), and what crosses between host and device.

The tensors are those of GPT-2 small, or of two of its layers; steps are eager.

Not rehearsed is how ranks find out that they were given different lists, which reads
numbers: before the step that is counted it is left out. Nor is the flag that tells the
host, some steps later and without a wait, whether ranks agreed: it is on its way for
ever, as no event of the GPU is ever over here (``marsopt.parallel.agreement``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard

from benchmarks.gpu.rehearsal.crossings import COPY, Watch
from benchmarks.gpu.rehearsal.device import h100
from benchmarks.gpu.rehearsal.lowered import move
from marsopt import MARS, Collectives
from marsopt.parallel import DataParallel, MeshCollectives
from marsopt.parallel.data_parallel import BUCKET
from marsopt.profiling.gpt2 import EMBEDDINGS, MODELS, param_groups, shapes
from marsopt.rules.registry import REGISTRY
from train.errors import counted
from train.forecast import Job, forecast
from train.forecast.record import pretended

LAYERS, WIDTH = MODELS["gpt2-small"]
FEW = 2  # layers, where the test suite plays a case
# where ranks compare numbers, these are sent in the step that first has them
COMPARED = "parallel/agreement.py"


@dataclass(frozen=True)
class Case:
    """One rank's optimizer.

    Args:
        rule: of the registry.
        correction: of the rule.
        sizes: (shards,), or (replicas, shards).
        rank: among all of them.
        ddp: whether every rank has all parameters, and its part of the state.
        num_layers: of the model.
    """

    rule: str
    correction: str
    sizes: tuple[int, ...]
    rank: int
    ddp: bool = False
    num_layers: int = LAYERS

    @property
    def name(self) -> str:
        """Return rule/correction/sizes/rank, with /ddp and /N-layers."""
        words = [self.rule, self.correction, "x".join(map(str, self.sizes))]
        words += [f"{self.rank}", *(["ddp"] * self.ddp)]
        words += [f"{FEW}-layers"] * (self.num_layers == FEW)
        return "/".join(words)


RULES = (
    ("mars-adamw", "approximate"),
    ("mars-m", "transport"),
    ("mars-normuon", "approximate"),
)
MESHES = (((8,), 3), ((512,), 100), ((8, 8), 9), ((8, 64), 100))
_ALL = [
    *(Case(*rule, *mesh) for mesh in MESHES for rule in RULES),
    *(Case(*rule, (8,), 3, ddp=True) for rule in RULES),
    # so few ranks share the owners' work between replicas, with so few layers
    Case("mars-m", "transport", (2, 4), 3, num_layers=FEW),
]
# of each mesh those that differ: without matrices, with, with numbers of rows
_ALL += [
    replace(case, num_layers=FEW)
    for case in _ALL
    if case.sizes == (8,) or case.rule == RULES[1][0]
]
CASES = {case.name: case for case in _ALL}
NAMES = tuple(CASES)
DEFAULT = tuple(case.name for case in CASES.values() if case.num_layers != FEW)


class Parameters(nn.Module):
    """Parameters of these shapes, uninitialized, and modules inside."""

    def __init__(self, made: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.inner = nn.ModuleDict()
        for name, shape in made.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


def model(num_layers: int) -> Parameters:
    """Return the tensors of GPT-2, in a module for each layer as it is sharded."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {"": {}}
    for name, shape in shapes(num_layers, WIDTH).items():
        layer, _, own = name.rpartition(".")
        layers.setdefault(layer, {})[own] = shape
    whole = Parameters(layers.pop(""))
    whole.inner.update({name: Parameters(made) for name, made in layers.items()})
    return whole


def forecast_of(case: Case) -> dict[str, int]:
    """Return the collectives of a step that the forecast names, without zeros."""
    made = shapes(case.num_layers, WIDTH)
    if case.ddp:
        sizes = [4 * prod(shape) for shape in made.values()]
        (ranks,) = case.sizes
        # the largest slice is one of the embedding
        one = max(BUCKET, max(sizes) // ranks)
        return {"all-reduce": 1, "all-gather": max(1, sum(sizes) // ranks // one)}
    *replicas, shards = case.sizes
    beside = EMBEDDINGS if REGISTRY[case.rule].matrix_only else ()
    options = dict(correction=case.correction)
    job = Job(made, case.rule, 1, 1, elementwise=beside, options=options)
    num = prod(replicas)
    found = forecast(job, num * shards, replicas=num).collectives
    return {kind: number for kind, number in found.items() if number}


def play(name: str) -> dict[str, Any]:
    """Take steps as one rank.

    Returns:
        ``collectives`` of a warm step, by kind, and the same of the ``forecast``;
        ``num_operations`` of that step; ``moved``: crossings of a step before which
        every hyperparameter has moved; ``faults``.
    """
    case = CASES[name]
    with (
        h100(triton=False),
        pretended(case.rank, case.sizes, "cuda") as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        with torch.device("cuda"):
            net = model(case.num_layers)
        if case.ddp:
            collectives: Collectives = DataParallel(mesh.get_group())
        else:
            for layer in net.inner.values():
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
            collectives = MeshCollectives(mesh)
        params = {name.removeprefix("inner."): p for name, p in net.named_parameters()}
        # it reads numbers, which fake tensors lack
        with mock.patch.object(MeshCollectives, "agree", lambda self, what: None):
            optimizer = MARS(
                param_groups(params, case.rule),
                mars_type=case.rule,
                correction=case.correction,
                lr=1e-4,
                lr_1d=REGISTRY[case.rule].hyperparameters["lr_1d"],
                max_norm=1.0,
                compile=False,
                collectives=collectives,
            )
            for p in params.values():
                p.grad = torch.empty_like(p)
            optimizer.step()
        with Watch() as warm:
            optimizer.step()
        for group in optimizer.param_groups:
            move(group)
        optimizer.max_norm = 2.0
        with Watch() as moving:
            optimizer.step()
    faults = [str(crossing) for crossing in dict.fromkeys(warm.found)]
    for crossing in dict.fromkeys(moving.found):
        compares = any(COMPARED in line for line in crossing.where)
        if not compares or crossing.kind != COPY:
            faults.append(f"where numbers move: {crossing}")
    sent, expected = dict(warm.collectives), forecast_of(case)
    if sent != expected:
        faults.append(f"got {sent}, expected {expected}")
    return dict(
        asdict(case),
        name=name,
        collectives=sent,
        forecast=expected,
        num_operations=warm.num_operations,
        moved=[asdict(crossing) for crossing in dict.fromkeys(moving.found)],
        faults=faults,
    )


def columns(row: dict[str, Any]) -> dict[str, str]:
    """Return a case's figures for the table."""
    sent = ", ".join(counted(n, kind) for kind, n in row["collectives"].items())
    return {"operations": f"{row['num_operations']}", "collectives": sent}
