"""Optimizer state through torch.distributed.checkpoint, on another number of ranks and
under other owners; buffers that live with the owners of matrices.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import marsopt
from marsopt import MARS
from marsopt.parallel import MeshCollectives
from marsopt.rules.formats import low_symbols
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
    "elementwise": dict(mars_type="mars-adamw", correction="exact"),
    "momentum": dict(mars_type="moonlight", ns_dtype=torch.float64),
    "factors": dict(mars_type="factors"),
    "both sides": dict(mars_type="mars-soap", precondition_frequency=2),
    "short side": dict(mars_type="mars-soap", **SHORT),
    "orthogonalized": dict(
        mars_type="mars-soap-muon", stagger=True, ns_dtype=torch.float64, **SHORT
    ),
}


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
    return model, MARS(groups, **OPTIONS | RULES[rule] | more)


def give(model, seed, rule, put) -> None:
    for name, g in wholes(seed, rule).items():
        getattr(model, name).grad = put(g)


def walk(model, optimizer, rule, steps, put) -> None:
    for step in steps:
        give(model, 2 + step, rule, put)
        optimizer.update_previous_grad()  # exact alone does something
        give(model, 1 + step, rule, put)
        optimizer.step()
        optimizer.update_last_grad()


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


def placed(world):
    """How tensors are put on so many ranks, and the collectives; four are HSDP."""
    shape = (2, 2) if world == 4 else (world,)
    mesh = init_device_mesh("cpu", shape)
    places = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]

    def put(x):
        return distribute_tensor(x, mesh, places, src_data_rank=None)

    return put, dict(collectives=MeshCollectives(mesh))


@registered()
def legs(rank, world, folder, first, last):
    """Of each rule whole parameters after the steps up to ``last``: from a checkpoint
    of step ``first``, unless that is 0, and with one of the last step.
    """
    put, how = placed(world)
    found = []
    for rule in RULES:
        model, optimizer = build(put, rule, **how)
        if first:
            dcp_states.load(model, optimizer, f"{folder}/{rule}{first}")
        walk(model, optimizer, rule, range(first, last), put)
        dcp_states.save(model, optimizer, f"{folder}/{rule}{last}")
        found.append(full(model))
    return found


def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(tmp_path):
    """3 -> 1 -> 4, with other owners, too; and the rhythm of stages goes on: they come
    every two steps, and three were taken.
    """
    for world, first, last in ((3, 0, 3), (1, 3, 4), (4, 4, STEPS)):
        found = spawn(legs, world, str(tmp_path), first, last)
    wants = [alone(rule) for rule in RULES]
    for every in found:
        for rule, got, want in zip(RULES, every, wants, strict=True):
            assert largest(got, want) < bound(rule), rule


def test_equal_ranks_resume_bitwise(tmp_path):
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    want = spawn(legs, 2, whole, 0, STEPS)[0]
    spawn(legs, 2, parts, 0, 3)
    got = spawn(legs, 2, parts, 3, STEPS)[0]
    for ours, theirs in zip(got, want, strict=True):
        assert all(torch.equal(ours[n], x) for n, x in theirs.items())


@registered()
def thaw(rank, world):
    """A parameter that joins moves owners: their buffers go with them."""
    put, how = placed(world)

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
        found = steps(put, rule, **how)
        worst[rule] = largest(found, steps(lambda x: x, rule))
    return worst


def test_owners_may_change():
    for worst in spawn(thaw, 3):
        assert near(worst), worst


@pytest.mark.parametrize("rule", RULES)
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
        value = value + (key == "stage_count")  # the host does not wait to count
        assert torch.equal(optimizer.state[getattr(model, name)][key], value), key


def interleaved(rank, world):
    """Parameters after three steps in graphs of a layer, and in one eager call."""
    (put, how), found = placed(world), []
    for compile in (True, False):
        g = torch.Generator().manual_seed(0)
        # gate, up and down take equal work; graphs of a layer come before "down"
        layers = ((8, 8), (8, 8), (12, 8), (12, 8), (8, 12)) * 3
        drawn = [torch.randn(s, generator=g, dtype=torch.float64) for s in layers]
        params = [nn.Parameter(put(x)) for x in drawn]
        more = how | dict(compile=compile)
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


@registered()
def masters(rank, world, folder, is_start):
    """Whole weights and low bits of a run that is saved, or loaded."""
    (place, how), found = placed(world), {}

    def put(x):
        return place(x.to(torch.bfloat16))

    for rule in ("elementwise", "momentum", "short side"):
        for bits in (32, 24):
            model, optimizer = build(put, rule, master_weight_bits=bits, **how)
            if is_start:
                walk(model, optimizer, rule, range(3), put)
                dcp_states.save(model, optimizer, f"{folder}/{rule}{bits}")
            else:
                dcp_states.load(model, optimizer, f"{folder}/{rule}{bits}")
            whole = get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(full_state_dict=True)
            )
            for name, weight in optimizer.master_weights().items():
                found[rule, bits, name] = weight.full_tensor()
                for symbol in low_symbols(bits):
                    entry = whole["state"][name]
                    found[rule, bits, f"{symbol} of {name}"] = entry[symbol]
    return found


def test_master_weights_go_to_other_numbers_of_ranks_to_the_bit(tmp_path):
    want = spawn(masters, 3, str(tmp_path), True)[0]
    assert {x.dtype for x in want.values()} == {torch.float32, torch.int8}
    assert all(x.any() for (_, _, name), x in want.items() if "bits" in name)
    for world in (1, 4):
        for found in spawn(masters, world, str(tmp_path), False):
            assert found.keys() == want.keys()
            assert all(torch.equal(found[key], x) for key, x in want.items())


# ---- other state ---------------------------------------------------------------------


def functional(rank, world, folder):
    """Sharded state of a rule, as a list of its tensors, each of which DCP knows."""
    mesh = init_device_mesh("cpu", (world,))
    x = [
        distribute_tensor(torch.arange(30.0).view(6, 5), mesh, [Shard(0)]),
        distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]),
    ]
    rule = marsopt.mars()
    before = rule.init(x)
    _, state = rule.step(x, x, before, lr=0.1, collectives=MeshCollectives(mesh))
    dcp.save({"state": tree_leaves(state)}, checkpoint_id=folder)
    dcp.load({"state": tree_leaves(before)}, checkpoint_id=folder)
    pairs = zip(tree_leaves(before), tree_leaves(state), strict=True)
    return [torch.equal(a.to_local(), b.to_local()) if isinstance(a, DTensor)
            else torch.equal(a, b) for a, b in pairs]  # fmt: skip


def test_sharded_functional_state_is_saved_as_its_tensors(tmp_path):
    for found in spawn(functional, 2, str(tmp_path)):
        assert len(found) == 9 and all(found)


def load_into_another(rank, world, folder):
    """A checkpoint of AdamW has no h."""
    put, how = placed(world)
    model, optimizer = build(put, "momentum", **how | dict(mars_type="adamw"))
    walk(model, optimizer, "momentum", range(1), put)
    dcp_states.save(model, optimizer, folder)
    model, optimizer = build(put, "elementwise", **how)
    try:
        dcp_states.load(model, optimizer, folder)
    except CheckpointException as error:
        return str(error)
    return "no error"


def test_state_that_is_missing_is_named(tmp_path):
    for told in spawn(load_into_another, 2, str(tmp_path / "adamw")):
        assert "last_grad" in told
        assert "wide" in told


def take_over(rank, world):
    """Two steps of torch's AdamW on sharded parameters; then its state, and whole
    tensors in place of it, into MARS. Return the differences after a third step, and
    after a fourth that torch's AdamW takes in place of MARS.
    """
    mesh = init_device_mesh("cpu", (world,))
    theirs, ours = (
        [
            torch.nn.Parameter(distribute_tensor(torch.full(s, 0.5), mesh, [Shard(0)]))
            for s in [(5, 3), (4,)]
        ]
        for _ in range(2)
    )
    adamw = torch.optim.AdamW(theirs, lr=0.1)
    optimizer = MARS(
        ours, lr=0.1, mars_type="adamw", compile=False,
        collectives=MeshCollectives(mesh),
    )  # fmt: skip

    def step(one, params, t):
        for i, p in enumerate(params):
            g = torch.full(p.shape, t + i - 1.5)
            p.grad = distribute_tensor(g, mesh, [Shard(0)])
        one.step()

    for t in range(2):
        step(adamw, theirs, t)
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    saved = adamw.state_dict()
    whole = tree_map_only(DTensor, DTensor.full_tensor, saved)
    with pytest.raises(
        ValueError, match="exp_avg of parameter 0 .* expected a DTensor"
    ):
        optimizer.load_state_dict([whole])
    optimizer.load_state_dict([saved])
    step(adamw, theirs, 2)
    step(optimizer, ours, 2)
    _, back = marsopt.to_torch(optimizer)
    step(adamw, theirs, 3)
    step(back, ours, 3)
    pairs = zip(ours, theirs, strict=True)
    return [float((p - q).detach().full_tensor().abs().max()) for p, q in pairs]


def test_sharded_state_of_another_library_is_taken():
    for differences in spawn(take_over, 2):
        assert max(differences) < 1e-6
