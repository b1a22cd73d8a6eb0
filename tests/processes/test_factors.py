"""Buffers that live with the owners of matrices, over a mesh: steps are those of one
process, and checkpoints go on with other numbers of ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from marsopt import MARS
from marsopt.parallel import MeshCollectives
from tests import dcp_states
from tests.factors import registered
from tests.processes import spawn
from tests.stacking import forced, traced

pytestmark = pytest.mark.processes

# wide, tall, square; with ranks that have no row; a batch, and heads
SHAPES = {
    "wide": (4, 9),
    "tall": (10, 3),
    "square": (5, 5),
    "short": (2, 7),
    "experts": (3, 4, 6),
    "heads": (8, 5),
    "qkv": (9, 6),
    "bias": (6,),
}
OPTIONS = dict(lr=0.05, weight_decay=0.1, max_norm=2.0, compile=False)
STEPS = 5
# what has factors; of long sides the first gradient leaves eigenvectors to chance, so
# that both sides have one of square matrices alone
SQUARES = {"square": (5, 5), "experts": (3, 4, 4), "heads": (8, 4), "bias": (6,)}
SHORT = dict(sides="short", precondition_frequency=2)
RULES = {
    "factors": dict(mars_type="factors"),
    "both sides": dict(mars_type="mars-soap", precondition_frequency=2),
    "short side": dict(mars_type="mars-soap", **SHORT),
    "orthogonalized": dict(
        mars_type="mars-soap-muon", stagger=True, ns_dtype=torch.float64, **SHORT
    ),
}
rules = pytest.mark.parametrize("rule", RULES)


def bound(rule: str) -> float:
    """QR and Adam's quotients make more of rounding than the test's own rule."""
    return 1e-11 if rule == "factors" else 1e-9


def near(worst: dict) -> bool:
    """Whether the largest differences, by rule and more, are rounding."""
    names = {key: next(n for n in RULES if n in key) for key in worst}
    return all(far < bound(names[key]) for key, far in worst.items())


def wholes(seed: int, rule: str = "factors") -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=g, dtype=torch.float64)
        for name, shape in (SQUARES if rule == "both sides" else SHAPES).items()
    }


class Model(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        for name, x in tensors.items():
            self.register_parameter(name, nn.Parameter(x))


def build(put, rule, **more) -> tuple[Model, MARS]:
    model = Model({name: put(x) for name, x in wholes(0, rule).items()})
    own = {
        "experts": dict(matrices="batched"),
        "heads": dict(splits=2),
        "qkv": dict(splits=(5, 2, 2)),
    }
    groups = [
        {"params": [(name, p)], **own.get(name, {})}
        for name, p in model.named_parameters()
    ]
    return model, MARS(groups, **OPTIONS, **RULES[rule], **more)


def walk(model, optimizer, rule, steps, put) -> None:
    for step in steps:
        for name, g in wholes(1 + step, rule).items():
            getattr(model, name).grad = put(g)
        optimizer.step()


def full(model) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in model.named_parameters()
    }


@registered()
def alone(rule, **more) -> dict[str, torch.Tensor]:
    model, optimizer = build(lambda x: x, rule, **more)
    walk(model, optimizer, rule, range(STEPS), lambda x: x)
    return full(model)


def largest(found, want) -> float:
    return max(float((found[name] - want[name]).abs().max()) for name in want)


@registered()
def save(rank, world, folder):
    mesh, found = init_device_mesh("cpu", (world,)), []

    def put(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    for rule in RULES:
        model, optimizer = build(put, rule, collectives=MeshCollectives(mesh))
        walk(model, optimizer, rule, range(3), put)
        dcp_states.save(model, optimizer, f"{folder}/{rule}")
        walk(model, optimizer, rule, range(3, STEPS), put)
        found.append(full(model))
    return found


@registered()
def resume(rank, world, folder):
    mesh, found = init_device_mesh("cpu", (world,)), []

    def put(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    for rule in RULES:
        model, optimizer = build(put, rule, collectives=MeshCollectives(mesh))
        dcp_states.load(model, optimizer, f"{folder}/{rule}")
        walk(model, optimizer, rule, range(3, STEPS), put)
        found.append(full(model))
    return found


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 2)])
def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(before, after, tmp_path):
    """With other owners, too; and the rhythm of stages goes on: they come every two
    steps, and three were taken.
    """
    wants = [alone(rule) for rule in RULES]
    for ranks, function in ((before, save), (after, resume)):
        for every in spawn(function, ranks, str(tmp_path)):
            for rule, found, want in zip(RULES, every, wants, strict=True):
                assert largest(found, want) < bound(rule), rule


@registered()
def thaw(rank, world):
    """A parameter that joins moves owners: their buffers go with them."""
    mesh = init_device_mesh("cpu", (world,))

    def put(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    def steps(put, rule, **more):
        model, optimizer = build(put, rule, **more)
        model.tall.requires_grad_(False)
        model.wide.requires_grad_(False)
        for step in range(STEPS):
            if step == 3:
                model.tall.requires_grad_(True)
                model.wide.requires_grad_(True)
            for name, g in wholes(1 + step, rule).items():
                p = getattr(model, name)
                p.grad = put(g) if p.requires_grad else None
            optimizer.step()
        return full(model)

    worst = {}
    for rule in ("factors", "short side", "orthogonalized"):
        found = steps(put, rule, collectives=MeshCollectives(mesh))
        worst[rule] = largest(found, steps(lambda x: x, rule))
    return worst


def test_owners_may_change():
    for worst in spawn(thaw, 3):
        assert near(worst), worst


@rules
@registered()
def test_a_void_step_keeps_owners_buffers(rule):
    model, optimizer = build(lambda x: x, rule)
    walk(model, optimizer, rule, range(2), lambda x: x)
    before = {
        (name, key): value.clone()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    for name, g in wholes(9, rule).items():
        getattr(model, name).grad = g.fill_(torch.nan) if name == "square" else g
    optimizer.step()
    assert optimizer.num_skipped == 1
    for (name, key), value in before.items():
        assert torch.equal(optimizer.state[getattr(model, name)][key], value), key


def interleaved(rank, world):
    """Parameters after three steps in graphs of a layer, and in one eager call."""
    mesh, found = init_device_mesh("cpu", (world,)), []

    def put(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    for compile in (True, False):
        g = torch.Generator().manual_seed(0)
        # gate, up and down take equal work; graphs of a layer come before "down"
        layers = ((8, 8), (8, 8), (12, 8), (12, 8), (8, 12)) * 3
        drawn = [torch.randn(s, generator=g, dtype=torch.float64) for s in layers]
        params = [nn.Parameter(put(x)) for x in drawn]
        more = dict(collectives=MeshCollectives(mesh), compile=compile)
        with pytest.MonkeyPatch.context() as patch, traced():
            forced(patch, "leaves")
            optimizer = MARS(params, **OPTIONS | more, **RULES["short side"])
            for _ in range(3):
                for p, x in zip(params, drawn, strict=True):
                    p.grad = put(x)
                optimizer.step()
        found.append([p.detach().full_tensor() for p in params])
    return found


def test_owners_are_found_whatever_the_order_of_calls():
    """Of matrices of equal work the order decides who owns which."""
    for compiled, eager in spawn(interleaved, 2):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-9)
