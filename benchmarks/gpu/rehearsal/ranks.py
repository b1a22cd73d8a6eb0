"""Steps of one rank among many: FSDP2, HSDP and plain DDP over a process group that
sends nothing, and fake CUDA tensors. Counted are the collectives of a warm step, beside
those that ``train.forecast`` names (of DDP, which it does not know, those that the size
of a bucket makes), and what crosses between host and device.

    python -m benchmarks.gpu.rehearsal.ranks [--layers N] [--json FILE]

The tensors are those of GPT-2 small, with so many layers as are given. No GPU and no
Triton is needed; steps are eager. An exit status of 1 says that something is not as
forecast.

Not rehearsed is how ranks find out that they were given different lists, which reads
numbers: before the step that is counted it is left out. Nor is the flag that tells the
host, some steps later and without a wait, whether ranks agreed: it is on its way for
ever, as no event of the GPU is ever over here (``marsopt.parallel.agreement``).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard

from benchmarks.gpu.rehearsal.cases import move
from benchmarks.gpu.rehearsal.crossings import COPY, Crossing, Watch
from benchmarks.gpu.rehearsal.device import h100
from marsopt import MARS, Collectives
from marsopt.parallel import DataParallel, MeshCollectives
from marsopt.parallel.data_parallel import BUCKET
from marsopt.profiling.gpt2 import EMBEDDINGS, MODELS, param_groups, shapes
from marsopt.rules.registry import REGISTRY
from train.errors import check_least, command, counted
from train.files import write_json
from train.forecast import Job, forecast
from train.forecast.record import pretended

LAYERS, WIDTH = MODELS["gpt2-small"]
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
    """

    rule: str
    correction: str
    sizes: tuple[int, ...]
    rank: int
    ddp: bool = False

    @property
    def name(self) -> str:
        """Return what the table calls it."""
        ranks = " x ".join(map(str, self.sizes))
        way = ", DDP" if self.ddp else ""
        return f"{self.rule} {self.correction}, {ranks} ranks, rank {self.rank}{way}"


RULES = (
    ("mars-adamw", "approximate"),
    ("mars-m", "transport"),
    ("mars-normuon", "approximate"),
)
MESHES = (((8,), 3), ((512,), 100), ((8, 8), 9), ((8, 64), 100))
CASES = tuple(Case(*rule, *mesh) for mesh in MESHES for rule in RULES)
CASES += tuple(Case(*rule, (8,), 3, ddp=True) for rule in RULES)


@dataclass(frozen=True)
class Found:
    """What a case has shown.

    Args:
        case: which.
        collectives: of a warm step, by kind.
        forecast: the same, as ``train.forecast`` has it.
        crossings: of that step.
        moved: crossings of a step before which every number has moved.
        num_operations: of the warm step.
        construct_seconds: of the sharded model and its optimizer, on this machine.
        step_seconds: of the first step, with all that is planned in it.
    """

    case: Case
    collectives: dict[str, int]
    forecast: dict[str, int]
    crossings: tuple[Crossing, ...]
    moved: tuple[Crossing, ...]
    num_operations: int
    construct_seconds: float
    step_seconds: float

    @property
    def faults(self) -> list[str]:
        """Return what is not as it was meant to be."""
        found = [str(crossing) for crossing in self.crossings]
        for crossing in self.moved:
            compares = any(COMPARED in line for line in crossing.where)
            if not compares or crossing.kind != COPY:
                found.append(f"where numbers move: {crossing}")
        if self.collectives != self.forecast:
            found.append(f"got {self.collectives}, expected {self.forecast}")
        return found


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


def forecast_of(case: Case, num_layers: int) -> dict[str, int]:
    """Return the collectives of a step that the forecast names, without zeros."""
    if case.ddp:
        sizes = [4 * prod(shape) for shape in shapes(num_layers, WIDTH).values()]
        (ranks,) = case.sizes
        # the largest slice is one of the embedding
        one = max(BUCKET, max(sizes) // ranks)
        return {"all-reduce": 1, "all-gather": max(1, sum(sizes) // ranks // one)}
    *replicas, shards = case.sizes
    beside = EMBEDDINGS if REGISTRY[case.rule].matrix_only else ()
    made = shapes(num_layers, WIDTH)
    options = dict(correction=case.correction)
    job = Job(made, case.rule, 1, 1, elementwise=beside, options=options)
    num = prod(replicas)
    found = forecast(job, num * shards, replicas=num).collectives
    return {kind: number for kind, number in found.items() if number}


def play(case: Case, num_layers: int = LAYERS) -> Found:
    """Take steps as one rank, and count in the second."""
    began = time.perf_counter()
    with (
        h100(triton=False),
        pretended(case.rank, case.sizes, "cuda") as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        with torch.device("cuda"):
            net = model(num_layers)
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
            built = time.perf_counter()
            for p in params.values():
                p.grad = torch.empty_like(p)
            optimizer.step()
        stepped = time.perf_counter()
        with Watch() as warm:
            optimizer.step()
        for group in optimizer.param_groups:
            move(group)
        optimizer.max_norm = 2.0
        with Watch() as moving:
            optimizer.step()
    return Found(
        case=case,
        collectives=dict(warm.collectives),
        forecast=forecast_of(case, num_layers),
        crossings=tuple(dict.fromkeys(warm.found)),
        moved=tuple(dict.fromkeys(moving.found)),
        num_operations=warm.num_operations,
        construct_seconds=built - began,
        step_seconds=stepped - built,
    )


def play_all(cases: tuple[Case, ...] = CASES, num_layers: int = LAYERS) -> list[Found]:
    """Play every case."""
    return [play(case, num_layers) for case in cases]


def table(found: list[Found]) -> str:
    """Return a line for each case."""
    width = max(len(f.case.name) for f in found)
    head = "operations  construct  first step  collectives of a warm step"
    lines = [f"{'case':{width}}  {head}"]
    for f in found:
        sent = ", ".join(counted(n, kind) for kind, n in f.collectives.items())
        spent = f"{f.construct_seconds:7.1f} s {f.step_seconds:9.1f} s"
        lines.append(f"{f.case.name:{width}}  {f.num_operations:10}  {spent}  {sent}")
        lines += [f"{'':{width}}  FAULT: {fault}" for fault in f.faults]
    crossed = dict.fromkeys(str(c) for f in found for c in f.moved)
    lines += [f"where numbers move: {crossing}" for crossing in crossed]
    return "\n".join(lines)


def to_dict(found: list[Found]) -> list[dict[str, Any]]:
    """Return what JSON can hold."""
    return [{**asdict(f), "faults": f.faults} for f in found]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.rehearsal.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    check_least(1, layers=args.layers)
    found = play_all(num_layers=args.layers)
    print(table(found))
    if args.json is not None:
        write_json(args.json, to_dict(found))
    if any(f.faults for f in found):
        raise SystemExit(1)


if __name__ == "__main__":
    command(main)
