"""Buffers that live with the owners of matrices, over a mesh: steps are those of one
process, and checkpoints go on with other numbers of ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from marsopt import LOCAL, MARS, mars
from marsopt.parallel import MeshCollectives
from tests import dcp_states
from tests.factors import registered
from tests.processes import spawn

pytestmark = pytest.mark.processes

# wide, tall, square; with ranks that have no row; a batch, and heads
SHAPES = {
    "wide": (4, 9),
    "tall": (10, 3),
    "square": (5, 5),
    "short": (2, 7),
    "experts": (3, 4, 6),
    "heads": (8, 5),
    "bias": (6,),
}
OPTIONS = dict(
    mars_type="factors", lr=0.05, weight_decay=0.1, max_norm=2.0, compile=False
)
STEPS = 5


def wholes(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=g, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


class Model(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        for name, x in tensors.items():
            self.register_parameter(name, nn.Parameter(x))


def build(put, **more) -> tuple[Model, MARS]:
    model = Model({name: put(x) for name, x in wholes(0).items()})
    own = {
        "experts": dict(matrices="batched"),
        "heads": dict(block_rows=4),
    }
    groups = [
        {"params": [(name, p)], **own.get(name, {})}
        for name, p in model.named_parameters()
    ]
    return model, MARS(groups, **OPTIONS, **more)


def walk(model, optimizer, steps, put) -> None:
    for step in steps:
        for name, g in wholes(1 + step).items():
            getattr(model, name).grad = put(g)
        optimizer.step()


def full(model) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in model.named_parameters()
    }


@registered()
def alone(**more) -> dict[str, torch.Tensor]:
    model, optimizer = build(lambda x: x, **more)
    walk(model, optimizer, range(STEPS), lambda x: x)
    return full(model)


def largest(found, want) -> float:
    return max(float((found[name] - want[name]).abs().max()) for name in want)


def columns(ndim):
    return [Shard(ndim - 1)]


def first(ndim):
    return [Shard(0)]


def hybrid(ndim):
    return [Replicate(), Shard(0)]


def grid(ndim):
    return [Shard(0), Shard(ndim - 1)]


CASES = {
    "1 rank": ((1,), first, "auto"),
    "2 ranks": ((2,), first, "auto"),
    "3 ranks": ((3,), first, "owner"),
    "4 ranks": ((4,), first, "auto"),
    "columns": ((3,), columns, "auto"),
    "gathered": ((2,), first, "replicate"),
    "HSDP": ((2, 2), hybrid, "auto"),
    "two axes": ((2, 2), grid, "auto"),
}


@registered()
def sharded(rank, world, mesh_shape, place, strategy):
    mesh = init_device_mesh("cpu", mesh_shape)

    def put(x):
        return distribute_tensor(x, mesh, place(x.ndim))

    worst = []
    for correction in ("approximate", "transport"):
        more = dict(correction=correction)
        collectives = MeshCollectives(mesh, strategy=strategy)
        model, optimizer = build(put, collectives=collectives, **more)
        walk(model, optimizer, range(STEPS), put)
        worst.append(largest(full(model), alone(**more)))
    return worst


@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_unsharded(name):
    mesh_shape, place, strategy = CASES[name]
    world = torch.Size(mesh_shape).numel()
    for worst in spawn(sharded, world, mesh_shape, place, strategy):
        assert max(worst) < 1e-11


@registered()
def save(rank, world, folder):
    mesh = init_device_mesh("cpu", (world,))

    def put(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    model, optimizer = build(put, collectives=MeshCollectives(mesh))
    walk(model, optimizer, range(3), put)
    dcp_states.save(model, optimizer, folder)
    walk(model, optimizer, range(3, STEPS), put)
    return full(model)


@registered()
def resume(rank, world, folder):
    mesh = init_device_mesh("cpu", (world,))

    def put(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    model, optimizer = build(put, collectives=MeshCollectives(mesh))
    dcp_states.load(model, optimizer, folder)
    walk(model, optimizer, range(3, STEPS), put)
    return full(model)


@pytest.mark.parametrize("ranks", [(2, 3), (3, 1), (1, 2), (4, 2)])
def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(ranks, tmp_path):
    """The stage's rhythm too: it comes every two steps, and three were taken."""
    before, after = ranks
    want = alone()
    for found in spawn(save, before, str(tmp_path)):
        assert largest(found, want) < 1e-11
    for found in spawn(resume, after, str(tmp_path)):
        assert largest(found, want) < 1e-11


@registered()
def thaw(rank, world):
    """A parameter that joins moves owners: their buffers go with them."""
    mesh = init_device_mesh("cpu", (world,))

    def put(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    def steps(put, **more):
        model, optimizer = build(put, **more)
        model.tall.requires_grad_(False)
        model.wide.requires_grad_(False)
        for step in range(STEPS):
            if step == 3:
                model.tall.requires_grad_(True)
                model.wide.requires_grad_(True)
            for name, g in wholes(1 + step).items():
                p = getattr(model, name)
                p.grad = put(g) if p.requires_grad else None
            optimizer.step()
        return full(model)

    found = steps(put, collectives=MeshCollectives(mesh, strategy="owner"))
    return largest(found, steps(lambda x: x))


def test_owners_may_change():
    assert max(spawn(thaw, 3)) < 1e-11


@registered()
def functional(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    collectives = MeshCollectives(mesh)
    rule = mars(mars_type="factors", max_norm=2.0)

    def steps(put, collectives):
        own = ("wide", "tall", "square", "bias")
        params = {name: put(wholes(0)[name]) for name in own}
        state = rule.init(params, collectives=collectives)
        for step in range(STEPS):
            grads = {name: put(wholes(1 + step)[name]) for name in own}
            params, state = rule.step(
                params, grads, state, lr=0.05, collectives=collectives
            )
        return params

    found = steps(lambda x: distribute_tensor(x, mesh, [Shard(0)]), collectives)
    want = steps(lambda x: x, LOCAL)
    return largest({n: x.full_tensor() for n, x in found.items()}, want)


def test_the_functional_step_is_the_same():
    assert max(spawn(functional, 2)) < 1e-11


@registered()
def test_a_void_step_keeps_owners_buffers():
    model, optimizer = build(lambda x: x)
    walk(model, optimizer, range(2), lambda x: x)
    before = {
        (name, key): value.clone()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    for name, g in wholes(9).items():
        getattr(model, name).grad = g.fill_(torch.nan) if name == "wide" else g
    optimizer.step()
    assert optimizer.num_skipped == 1
    for (name, key), value in before.items():
        assert torch.equal(optimizer.state[getattr(model, name)][key], value), key
