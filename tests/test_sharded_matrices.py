"""Batches of matrices over a mesh equal a loop over slices, however they are cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from marsopt.parallel import MeshCollectives
from tests.processes import spawn
from tests.slices import BATCHED, FLATTENED, TENSORS, Several, at_once, in_loop

pytestmark = pytest.mark.processes

STEPS = 2
OPTIONS = dict(
    lr=0.1, lr_1d=0.1, weight_decay=0.1, ns_dtype=torch.float32, max_norm=3.0,
    compile=False,
)  # fmt: skip
# clip per matrix, Newton-Schulz, weights of rows, with the iterate in the state
RULES = (
    dict(mars_type="mars-adamw"),
    dict(mars_type="mars-m"),
    dict(mars_type="mars-normuon", correction="transport"),
    dict(mars_type="mars-normuon", clip_per="tensor", clip=None),
)


def first(ndim):
    """Whole experts, but blocks of rows anywhere."""
    return [Shard(0)]


def rows(ndim):
    return [Shard(max(0, ndim - 2))]


def columns(ndim):
    return [Shard(ndim - 1)]


def hybrid(ndim):
    return [Replicate(), Shard(0)]


def experts_and_rows(ndim):
    """Expert parallelism, and FSDP that cuts each expert's rows."""
    return [Shard(0), Shard(ndim - 2)] if ndim > 2 else [Replicate(), Shard(0)]


def experts_twice(ndim):
    """Expert parallelism, and FSDP over the experts of a rank."""
    return [Shard(0), Shard(0)] if ndim > 2 else [Replicate(), Shard(0)]


# mesh, placements, strategies
CASES = {
    "1 rank": ((1,), first, ("auto",)),
    "2 ranks": ((2,), first, ("owner", "gram", "replicate", "auto")),
    "3 ranks": ((3,), first, ("owner", "gram")),
    "4 ranks": ((4,), first, ("owner",)),
    "rows, 2": ((2,), rows, ("owner", "gram")),
    "rows, 3": ((3,), rows, ("owner",)),
    "columns": ((3,), columns, ("owner", "gram")),
    "HSDP": ((2, 2), hybrid, ("owner", "auto")),
    "experts and rows": ((2, 2), experts_and_rows, ("owner",)),
    "experts twice": ((2, 2), experts_twice, ("owner", "replicate")),
    "an axis of one rank": ((2, 1), experts_and_rows, ("owner", "replicate")),
}


def compare(rank, world, mesh_shape, place, strategies):
    """Largest difference to the loop over slices, by rule."""
    mesh = init_device_mesh("cpu", mesh_shape)
    worst = []
    for rule in RULES:
        want = in_loop(TENSORS, STEPS, **OPTIONS, **rule)
        for strategy in strategies:
            got, _ = at_once(
                TENSORS,
                STEPS,
                lambda _, whole: distribute_tensor(whole, mesh, place(whole.ndim)),
                collectives=MeshCollectives(mesh, strategy=strategy),
                **OPTIONS,
                **rule,
            )
            found = {n: p.detach().full_tensor() for n, p in got.items()}
            worst.append(max(float((found[n] - want[n]).abs().max()) for n in want))
    return worst


@pytest.mark.parametrize("name", CASES)
def test_sharded_batches_equal_the_loop(name):
    mesh_shape, place, strategies = CASES[name]
    world = torch.Size(mesh_shape).numel()
    for worst in spawn(compare, world, mesh_shape, place, strategies, seconds=240):
        assert max(worst) < 1e-5


def count(rank, world):
    """All-to-alls of a step after the first, of expert weights, heads and kernels on
    two ranks: whole on a rank, and not.
    """
    mesh = init_device_mesh("cpu", (world,))
    found, real = {}, dist.all_to_all_single
    for name, several, placement in (
        ("experts", Several((4, 4, 6), BATCHED), Shard(0)),
        ("heads", Several((16, 6), dict(block_rows=4)), Shard(0)),
        ("rows of experts", Several((4, 4, 6), BATCHED), Shard(1)),
        ("odd heads", Several((12, 6), dict(block_rows=4)), Shard(0)),
        ("fused kernels", Several((8, 2, 3), FLATTENED | dict(block_rows=4)), Shard(0)),
        ("channels out", Several((5, 4, 3, 3), FLATTENED), Shard(0)),
        ("channels in", Several((6, 3, 2, 2), FLATTENED), Shard(1)),
        ("height", Several((6, 2, 3, 2), FLATTENED), Shard(2)),
    ):
        calls = []

        def all_to_all(*args, calls=calls, **kw):
            calls.append(1)
            return real(*args, **kw)

        dist.all_to_all_single = all_to_all
        collectives = MeshCollectives(mesh, strategy="owner", max_buckets=1)
        at_once(
            {name: several},
            1,
            lambda _, whole, place=placement: distribute_tensor(whole, mesh, [place]),
            mars_type="mars-m",
            collectives=collectives,
            **OPTIONS,
        )
        dist.all_to_all_single = real
        found[name] = len(calls)
    return found


def test_matrices_that_lie_whole_on_a_rank_do_not_travel():
    here = dict.fromkeys(("experts", "heads", "fused kernels"), 0)
    cut = ("rows of experts", "odd heads", "channels out", "channels in", "height")
    for found in spawn(count, 2):
        assert found == here | dict.fromkeys(cut, 2)
