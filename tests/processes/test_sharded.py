"""Sharded equals unsharded, in float64: rules, cuts and meshes in one table. A new rule
is a row by itself; whole tensors are held to their authors' code in other files.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from marsopt import LOCAL, MARS, REGISTRY, mars
from marsopt.parallel import MeshCollectives
from tests.factors import registered
from tests.library.test_master_weights import BF16, rounded
from tests.processes import spawn
from tests.slices import FLATTENED, TENSORS, Several, groups, values
from tests.table import steady

pytestmark = pytest.mark.processes

STEPS = 3
OPTIONS = dict(
    lr=0.1, lr_1d=0.1, weight_decay=0.1, ns_dtype=torch.float64, max_norm=3.0,
    compile=False,
)  # fmt: skip

# ---- rules ---------------------------------------------------------------------------

SHORT = steady("soap")


def options(mars_type: str, correction: str) -> dict:
    own = SHORT if "soap" in mars_type else {}
    return dict(mars_type=mars_type, correction=correction, **own)


LOG_TIME = dict(log_time=3.0)
RULES = {
    f"{mars_type} {correction}": options(mars_type, correction)
    for mars_type, rule in REGISTRY.items()
    for correction in ("approximate", "exact")
    if rule.is_mars or correction == "approximate"
} | {
    "adamw cautious": dict(mars_type="adamw", cautious_weight_decay=True),
    "mars-normuon clip": dict(mars_type="mars-normuon", clip_per="tensor", clip=None),
    "soap-muon stagger": dict(mars_type="mars-soap-muon", stagger=True, **SHORT),
    "both sides": dict(mars_type="mars-soap", precondition_frequency=2),
    "normuon log time": LOG_TIME | dict(mars_type="normuon", nesterov=0.2),
    "mars-soap log time": LOG_TIME | options("mars-soap", "approximate"),
    "factors": dict(mars_type="factors"),
}
# what a mesh may treat differently: no matrices, Newton-Schulz, moments of rows and
# factors at the owners, two gradients
SOME = (
    "mars-adamw exact", "mars-adamw approximate", "mars-lion approximate",
    "mars-m approximate", "mars-shampoo exact", "mars-normuon approximate",
    "mars-normuon clip", "mars-soap approximate", "soap-muon stagger", "both sides",
    "normuon log time", "factors",
)  # fmt: skip
HALF = (
    "mars-adamw exact", "mars-m approximate", "mars-normuon approximate",
    "mars-soap approximate", "factors",
)  # fmt: skip
FEW = ("mars-adamw exact", "mars-m approximate", "mars-soap approximate")


def bound(rule: str) -> float:
    """QR and Adam's quotients make more of rounding."""
    return 1e-9 if rule in ("both sides", "soap-muon stagger") else 1e-11


def tensors_of(rule: str) -> dict[str, Several]:
    """Batches, blocks, kernels; wide, tall, and shards that are uneven or empty.

    Of long sides the first gradient leaves eigenvectors to chance: both sides have one
    of square matrices alone.
    """
    if rule == "both sides":
        shapes = {"square": (5, 5), "experts": (3, 4, 4), "heads": (20, 4)}
        shapes |= {"bias": (6,)}
        return {
            n: Several(s, TENSORS.get(n, Several(s)).options) for n, s in shapes.items()
        }
    shapes = {"wide": (4, 9), "square": (5, 5), "row": (1, 6), "small": (3,)}
    return TENSORS | {n: Several(s) for n, s in shapes.items()}


# ---- cuts ----------------------------------------------------------------------------


def rows(name, ndim):
    return [Shard(0)]


def inner_rows(name, ndim):
    """Those of a batch's matrices."""
    return [Shard(max(0, ndim - 2))]


def columns(name, ndim):
    return [Shard(ndim - 1)]


def hybrid(name, ndim):
    return [Replicate(), Shard(0)]


def grid(name, ndim):
    """FSDP x TP: two axes cut one matrix."""
    return [Shard(0), Shard(ndim - 1)]


def crossed(name, ndim):
    return [Shard(ndim - 1), Shard(0)]


def twice(name, ndim):
    """Two axes cut one dim."""
    return [Shard(0), Shard(0)]


def striped(name, ndim):
    """As column-wise tensor parallelism under FSDP."""
    return [_StridedShard(0, split_factor=2), Shard(0)]


def mixed(name, ndim):
    """Sharded, replicated and plain tensors side by side."""
    if name in ("square", "heads", "bias"):
        return [Replicate()]
    return None if name in ("row", "experts", "small") else [Shard(0)]


def experts_and_rows(name, ndim):
    """Expert parallelism, and FSDP that cuts each expert's rows."""
    return [Shard(0), Shard(ndim - 2)] if ndim > 2 else [Replicate(), Shard(0)]


def experts_twice(name, ndim):
    """Expert parallelism, and FSDP over the experts of a rank."""
    return [Shard(0), Shard(0)] if ndim > 2 else [Replicate(), Shard(0)]


# ---- meshes --------------------------------------------------------------------------

# every rule once; every cut under what a mesh may treat differently
CELLS = {  # mesh, cut, rules
    "1 rank": ((1,), rows, HALF),
    "2 ranks": ((2,), rows, HALF),
    "3 ranks": ((3,), rows, RULES),
    "8 ranks": ((8,), rows, FEW),
    "inner rows": ((2,), inner_rows, SOME),
    "columns": ((3,), columns, HALF),
    "mixed": ((2,), mixed, HALF),
    "HSDP": ((2, 2), hybrid, HALF),
    "HSDP of one": ((2, 1), hybrid, FEW),
    "two axes": ((2, 2), grid, (*HALF, "mars-normuon clip")),
    "crossed": ((2, 2), crossed, FEW),
    "twice": ((2, 2), twice, FEW),
    "striped": ((2, 2), striped, FEW),
    "experts and rows": ((2, 2), experts_and_rows, HALF),
    "experts twice": ((2, 2), experts_twice, FEW),
    "an axis of one": ((2, 1), experts_and_rows, FEW),
    # in one step: as experts that get no token
    "a rank without gradients": ((2,), rows, SOME),
}
WITHOUT = {"a rank without gradients": 2}  # how many ranks: the last one has none
STEP_WITHOUT = 1


def walk(
    rule: str, put, without: int = 0, rank: int = 0, **collectives
) -> dict[str, Tensor]:
    """Whole parameters after STEPS steps, and the norm of the last gradient. In one
    step the gradients hold zeros in the rows of the last of ``without`` ranks, which
    has None.
    """
    tensors, own = tensors_of(rule), RULES[rule]
    params = {n: nn.Parameter(put(n, x)) for n, x in values(0, tensors).items()}
    optimizer = MARS(groups(params, tensors), **OPTIONS, **own, **collectives)

    def give(seed, without=0):
        for name, x in values(seed, tensors).items():
            if without and len(chunks := x.chunk(without)) == without:
                chunks[-1].zero_()
            grad = put(name, x)
            params[name].grad = None if rank == without - 1 > 0 else grad

    correction = own.get("correction")
    for t in range(STEPS):
        if correction == "exact":
            give(100 + t)
            optimizer.update_previous_grad()
        give(1 + t, without if t == STEP_WITHOUT else 0)
        optimizer.step()
        if correction == "exact":
            optimizer.update_last_grad()
    found = {n: p.detach().clone() for n, p in params.items()}
    found["norm"] = optimizer.grad_norm
    return {n: whole(x) for n, x in found.items()}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@registered()
def sharded(rank, world, cell):
    """{rule: what walk returns}"""
    shape, cut, rules = CELLS[cell]
    mesh = init_device_mesh("cpu", shape)

    def put(name, x):
        places = cut(name, x.ndim)
        if places is None:
            return x
        return distribute_tensor(x, mesh, places, src_data_rank=None)  # no messages

    collectives = MeshCollectives(mesh)
    return {
        rule: walk(rule, put, WITHOUT.get(cell, 0), rank, collectives=collectives)
        for rule in rules
    }


@cache
@registered()
def alone(rule: str, without: int = 0) -> dict[str, Tensor]:
    return walk(rule, lambda name, x: x, without)


def largest(got, want) -> float:
    return max(float((got[n] - want[n]).abs().max()) for n in want)


@pytest.mark.parametrize("cell", CELLS)
def test_sharded_equals_unsharded(cell):
    world = torch.Size(CELLS[cell][0]).numel()
    for found in spawn(sharded, world, cell, seconds=240):
        for rule, got in found.items():
            want = alone(rule, WITHOUT.get(cell, 0))
            assert largest(got, want) < bound(rule), rule


# ---- the functional step -------------------------------------------------------------

PURE = (
    "mars-adamw approximate", "mars-m approximate", "mars-normuon approximate",
    "mars-soap approximate", "soap-muon stagger", "factors",
)  # fmt: skip
NAMES = (
    "wide",
    "square",
    "row",
    "one matrix",
    "bias",
    "convolution",
    "other convolution",
)


def pure_steps(rule: str, put, collectives) -> dict[str, Tensor]:
    own = {n: x for n, x in OPTIONS.items() if n not in ("lr", "compile")}
    function = mars(base_lr=0.1, **own, **RULES[rule], **FLATTENED)
    tensors = {n: tensors_of(rule)[n] for n in NAMES}
    params = put(values(0, tensors))
    state = function.init(params, collectives=collectives)
    for t in range(STEPS):
        params, state = function.step(
            params, put(values(1 + t, tensors)), state, lr=0.1, collectives=collectives
        )
    return {n: whole(x) for n, x in params.items()}


@registered()
def pure(rank, world):
    """Largest differences, of tensors that are each cut by another dim."""
    mesh, found = init_device_mesh("cpu", (world,)), {}

    def put(tree):
        return {
            n: distribute_tensor(x, mesh, [Shard(i % x.ndim)], src_data_rank=None)
            for i, (n, x) in enumerate(tree.items())
        }

    for rule in PURE:
        want = pure_steps(rule, dict, LOCAL)
        found[rule] = largest(pure_steps(rule, put, MeshCollectives(mesh)), want)
    return found


def test_a_rule_takes_tensors_cut_by_any_dim():
    for found in spawn(pure, 3):
        for rule, error in found.items():
            assert error < bound(rule), rule


# ---- master weights ------------------------------------------------------------------

MASTERS = (
    "mars-adamw exact", "mars-m approximate", "mars-normuon approximate",
    "mars-soap approximate",
)  # fmt: skip


def shard_of(x):
    """The coordinates of a tensor's shard; replicas have the same."""
    if not isinstance(x, DTensor):
        return ()
    pairs = zip(x.device_mesh.get_coordinate(), x.placements, strict=True)
    return tuple(i for i, place in pairs if not place.is_replicate())


@registered()
def masters(rank, world, cell):
    """By rule, whether 32 bits are a float32 run, to the bit; and with 24 bits each
    weight that lies here, by its name and the place of its shard.
    """
    shape, cut, _ = CELLS[cell]
    mesh = init_device_mesh("cpu", shape)
    collectives = MeshCollectives(mesh)

    def put(name, x):
        places = cut(name, x.ndim)
        return x if places is None else distribute_tensor(x, mesh, places)

    def local(x):
        return x.to_local() if isinstance(x, DTensor) else x

    def built(tensors, dtype, **more):
        cast = {n: x.to(BF16).to(dtype) for n, x in values(0, tensors).items()}
        params = {n: nn.Parameter(put(n, x)) for n, x in cast.items()}
        more |= dict(collectives=collectives, ns_dtype=torch.float32)
        return params, MARS(groups(params, tensors), **OPTIONS | RULES[rule] | more)

    found = {}
    for rule in MASTERS:
        tensors = tensors_of(rule)
        narrow, first = built(tensors, BF16, master_weight_bits=32)
        short, third = built(tensors, BF16, master_weight_bits=24)
        wide, second = built(tensors, torch.float32)
        runs = ((narrow, first), (short, third), (wide, second))
        for seed in range(2 * STEPS):
            drawn = {n: x.to(BF16) for n, x in values(1 + seed, tensors).items()}
            for params, optimizer in runs:
                for name, p in params.items():
                    p.grad = put(name, drawn[name].to(p.dtype))
                if seed % 2 == 0:
                    optimizer.update_previous_grad()
                else:
                    optimizer.step()
                    optimizer.update_last_grad()
        weights, rest = first.master_weights(), third.master_weights()
        is_equal = all(
            weights[n].dtype == torch.float32
            and type(weights[n]) is type(p.data)
            and torch.equal(local(weights[n]), local(p.detach()))
            and torch.equal(local(narrow[n].detach()), rounded(local(p.detach())))
            for n, p in wide.items()
        )
        found[rule] = is_equal, {(n, shard_of(x)): local(x) for n, x in rest.items()}
    return found


@pytest.mark.parametrize("cell", ["3 ranks", "two axes", "mixed", "HSDP"])
def test_master_weights_of_shards_are_those_of_a_float32_run(cell):
    """And replicas round alike."""
    by_rank = spawn(masters, torch.Size(CELLS[cell][0]).numel(), cell, seconds=240)
    for found in by_rank:
        assert all(is_equal for is_equal, _ in found.values()), found.keys()
    for rule in MASTERS:
        first, num = {}, 0
        for found in by_rank:
            for place, x in found[rule][1].items():
                num += place in first
                assert torch.equal(first.setdefault(place, x), x), (rule, place)
        assert num or cell in ("3 ranks", "two axes")
