"""Optimizer state through torch.distributed.checkpoint, on another number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import marsopt
from marsopt import MARS
from marsopt.parallel import MeshCollectives
from tests.processes import spawn
from tests.processes.test_collectives import Model, whole

pytestmark = pytest.mark.processes

LEG = 3  # steps between two checkpoints


def build(world, mars_type, correction, hybrid):
    torch.manual_seed(1)
    model = Model()
    shape = (2, world // 2) if hybrid else (world,)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(world)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = MARS(
        model.parameters(), lr=0.02, mars_type=mars_type, correction=correction,
        max_norm=2.0, ns_dtype=torch.float32, compile=False,
        collectives=MeshCollectives(mesh),
    )  # fmt: skip
    return model, optimizer


def gradient(model, optimizer, seed):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 6, generator=g), torch.randn(8, 1, generator=g)
    optimizer.zero_grad()
    (30 * torch.nn.functional.mse_loss(model(x), y)).backward()


def legs(rank, world, mars_type, correction, hybrid, folder, first, last):
    """Train legs first..last-1, loading before and saving after; whole parameters."""
    model, optimizer = build(world, mars_type, correction, hybrid)
    if first:
        weights, state = get_state_dict(model, optimizer)
        both = {"model": weights, "optimizer": state}
        dcp.load(both, checkpoint_id=f"{folder}/{first}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=both["model"],
            optim_state_dict=both["optimizer"],
        )
    for leg in range(first, last):
        for t in range(leg * LEG, (leg + 1) * LEG):
            gradient(model, optimizer, t + 1)
            optimizer.update_previous_grad()
            gradient(model, optimizer, t)
            optimizer.step()
            optimizer.update_last_grad()
    weights, state = get_state_dict(model, optimizer)
    both = {"model": weights, "optimizer": state}
    dcp.save(both, checkpoint_id=f"{folder}/{last}")
    names = sorted({n for entry in state["state"].values() for n in entry})
    return whole(model), names


FORMS = {
    "mars-adamw exact": ("mars-adamw", "exact"),
    "moonlight": ("moonlight", "approximate"),
    "mars-shampoo": ("mars-shampoo", "approximate"),
}


@pytest.mark.parametrize("name", FORMS)
def test_resumes_on_other_numbers_of_ranks(name, tmp_path):
    """2 -> 1 -> 4 (HSDP) -> 2 is the uninterrupted run, h included."""
    form = FORMS[name]
    want, names = spawn(legs, 2, *form, False, str(tmp_path / "whole"), 0, 4)[0]
    assert ("last_grad" in names) is (name != "moonlight")
    folder = str(tmp_path / "parts")
    for i, (world, hybrid) in enumerate(
        ((2, False), (1, False), (4, True), (2, False))
    ):
        got, _ = spawn(legs, world, *form, hybrid, folder, i, i + 1)[0]
    for n, p in want.items():
        torch.testing.assert_close(
            got[n], p, rtol=0, atol=1e-6, msg=lambda m, n=n: n + m
        )


def test_equal_ranks_resume_bitwise(tmp_path):
    form = FORMS["mars-adamw exact"]
    want, _ = spawn(legs, 2, *form, False, str(tmp_path / "whole"), 0, 2)[0]
    for i in range(2):
        got, _ = spawn(legs, 2, *form, False, str(tmp_path / "parts"), i, i + 1)[0]
    assert all(torch.equal(got[n], want[n]) for n in want)


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
    legs(rank, world, "adamw", "approximate", False, folder, 0, 1)
    model, optimizer = build(world, "mars-adamw", "approximate", False)
    weights, state = get_state_dict(model, optimizer)
    both = {"model": weights, "optimizer": state}
    try:
        dcp.load(both, checkpoint_id=f"{folder}/1")
    except CheckpointException as error:
        return str(error)
    return "no error"


def test_state_that_is_missing_is_named(tmp_path):
    for told in spawn(load_into_another, 2, str(tmp_path / "adamw")):
        assert "last_grad" in told
        assert "weight" in told


# ---- buffers of one dim --------------------------------------------------------------

PLACES = {"rows": Shard(0), "cols": Shard(1), "copy": Replicate()}
SIZES = {"even": (8, 4), "uneven": (5, 3), "one": (1, 3)}


def wrapped(world, values):
    """Buffers (rows,) of matrices, as a rule's state holds them, beside a plain one."""
    mesh = init_device_mesh("cpu", (world,))
    found = {"plain": values["plain"].clone()}
    for size, shape in SIZES.items():
        for place, placement in PLACES.items():
            leaf = distribute_tensor(torch.zeros(shape), mesh, [placement])
            rows = Shard(0) if place == "rows" else Replicate()
            local = distribute_tensor(values[size], mesh, [rows]).to_local().clone()
            found[f"{place} {size}"] = MeshCollectives(mesh).wrap(local, leaf)
    return found


def pass_on(rank, world, folder, load, save):
    """Load, if told to, into zeros; save; return whole buffers."""
    values = {n: torch.arange(1.0, s[0] + 1) for n, s in SIZES.items()}
    values["plain"] = torch.tensor([3.0, 1.0])
    if load:
        values = {n: torch.zeros_like(v) for n, v in values.items()}
    buffers = wrapped(world, values)
    if load:
        dcp.load(buffers, checkpoint_id=f"{folder}/{load}")
    dcp.save(buffers, checkpoint_id=f"{folder}/{save}")
    return {
        n: b.full_tensor() if isinstance(b, DTensor) else b for n, b in buffers.items()
    }


def test_buffers_of_one_dim_change_ranks(tmp_path):
    """2 -> 1 -> 4 ranks: even, uneven and empty pieces, and whole ones."""
    folder = str(tmp_path)
    want = spawn(pass_on, 2, folder, 0, 1)[0]
    assert len(want) == 1 + len(PLACES) * len(SIZES)
    assert torch.equal(want["cols uneven"], torch.arange(1.0, 6.0))
    for i, world in enumerate((1, 4), start=1):
        for got in spawn(pass_on, world, folder, i, i + 1):
            assert got.keys() == want.keys()
            for n, buffer in want.items():
                assert torch.equal(got[n], buffer), n


def take_over(rank, world):
    """Two steps of torch's AdamW on sharded parameters; then its state, and whole
    tensors in place of it, into MARS. Return the differences after a third step.
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
    pairs = zip(ours, theirs, strict=True)
    return [float((p - q).detach().full_tensor().abs().max()) for p, q in pairs]


def test_sharded_state_of_another_library_is_taken():
    for differences in spawn(take_over, 2):
        assert max(differences) < 1e-6
