"""Two processes move sharded parameters exactly as one moves whole ones."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from marsopt import MARS, Matrices, NewtonSchulz, Orthogonal
from marsopt.parallel import MeshCollectives
from marsopt.rules.buffers import Buffer
from marsopt.rules.orthogonal import MatrixAverage
from marsopt.rules.preconditioner import MatrixInput, MatrixOutput
from marsopt.step.owners import (
    MatrixParam,
    Request,
    flat_indices,
)
from tests.processes import spawn
from tests.table import steady

pytestmark = pytest.mark.processes

STEPS = 4
# the others, and other cuts and meshes: test_sharded.py
CASES = [
    ("mars-adamw", True),
    ("mars-adamw", False),
    ("mars-shampoo", False),
    ("mars-soap", True),
    ("normuon", True),
]


class Model(nn.Module):
    """Uneven shards (5 and 3 rows on two ranks) and an empty one (1 row)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.second = nn.Linear(5, 3, bias=False)
        self.last = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.norm(self.first(x)))))


def train(model, optimizer, exact):
    """STEPS steps on seeded batches; returns the gradient norms."""

    def gradient(seed):
        g = torch.Generator().manual_seed(seed)
        dtype = model.first.weight.dtype
        x, y = (torch.randn(8, n, generator=g).to(dtype) for n in (6, 1))
        optimizer.zero_grad()
        (30 * nn.functional.mse_loss(model(x), y)).backward()

    norms = []
    for t in range(STEPS):
        if exact:
            gradient(t + 1)
            optimizer.update_previous_grad()
        gradient(t)
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
        if exact:
            optimizer.update_last_grad()
    return norms


def on_mesh():
    return MeshCollectives(init_device_mesh("cpu", (dist.get_world_size(),)))


def make(mars_type, is_approx, collectives=None, compiled=False, dtype=torch.float64):
    torch.manual_seed(1)
    model = Model().to(dtype)
    kw = dict(
        lr=0.02,
        mars_type=mars_type,
        is_approx=is_approx,
        weight_decay=0.1,
        max_norm=2.0,
        ns_dtype=dtype,
        compile=compiled,
        **steady(mars_type),
    )
    if collectives is None:
        return model, MARS(model.named_parameters(), **kw)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(dist.get_world_size())
            module.set_force_sum_reduction_for_comms(True)
    return model, MARS(model.named_parameters(), collectives=collectives, **kw)


def whole(model):
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in model.named_parameters()
    }


def train_sharded(rank, world):
    out = []
    for mars_type, is_approx in CASES:
        model, optimizer = make(mars_type, is_approx, on_mesh())
        norms = train(model, optimizer, not is_approx)
        out.append((whole(model), norms))
    return out


def test_fully_sharded_is_whole():
    per_rank = spawn(train_sharded, 3)
    for i, (mars_type, is_approx) in enumerate(CASES):
        model, optimizer = make(mars_type, is_approx)
        norms = train(model, optimizer, not is_approx)
        for results in per_rank:
            params, their_norms = results[i]
            assert their_norms == pytest.approx(norms, rel=1e-11)
            for n, p in whole(model).items():
                torch.testing.assert_close(
                    params[n],
                    p,
                    rtol=0,
                    atol=1e-11,
                    msg=lambda m, n=n, t=mars_type, a=is_approx: f"{t} {a} {n}: {m}",
                )


def turn(optimizer, t):
    """What a schedule may change, without a graph more."""
    optimizer.param_groups[0].update(lr=0.02 / (t + 1), gamma=0.01 * t)


@mock.patch.object(torch, "compile", partial(torch.compile, backend="eager"))
def compiled(rank, world):
    """Whole parameters of compiled steps, by the graphs that dynamo makes (inductor
    makes of them what it does in one process), whose graphs for vectors are those of
    MARS-AdamW.
    """
    model, optimizer = make("mars-shampoo", True, on_mesh(), True, torch.float32)
    train(model, optimizer, False)
    with torch.compiler.set_stance("fail_on_recompile"):
        for t in range(3):
            turn(optimizer, t)
            optimizer.step()
    return whole(model)


def test_compiled_and_sharded():
    """Equal to whole ones; what is sent is counted in test_forecast.py."""
    model, optimizer = make("mars-shampoo", True, dtype=torch.float32)
    train(model, optimizer, False)
    for t in range(3):
        turn(optimizer, t)
        optimizer.step()
    for params in spawn(compiled, 2):
        for n, p in whole(model).items():
            torch.testing.assert_close(params[n], p, rtol=0, atol=1e-5)


def refuse_one_shard(rank, world):
    """A NaN in the last rank's piece alone."""
    model, optimizer = make("mars-adamw", True, on_mesh())
    train(model, optimizer, False)
    saved = copy.deepcopy(optimizer.state_dict())
    if rank == world - 1:
        saved["state"][0]["exp_avg"].to_local().fill_(torch.nan)
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        optimizer.step()
        return str(error)
    return "no error"


def test_ranks_refuse_a_state_dict_together():
    for told in spawn(refuse_one_shard, 2):
        assert "got NaN or infinity in the state of parameter 'first.weight'" in told


def refuse(rank, world):
    model, _ = make("adamw", True, on_mesh())
    try:
        MARS(model.parameters(), compile=False)
    except ValueError as error:
        return str(error)
    return "no error"


def test_sharded_parameters_without_collectives_are_refused():
    for told in spawn(refuse, 2):
        assert "pass collectives=MeshCollectives(mesh)" in told


def save_and_load(rank, world):
    """A state dict of DTensors, through a file per rank, continues bit for bit."""
    model, optimizer = make("mars-adamw", True, on_mesh())
    train(model, optimizer, False)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=False)
    other, resumed = make("mars-adamw", True, on_mesh())
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    kinds = {type(v).__name__ for s in state["state"].values() for v in s.values()}
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o, False)
    a, b = whole(model), whole(other)
    return kinds, all(torch.equal(a[n], b[n]) for n in a)


def test_state_is_dtensors_and_resumes_bitwise():
    assert spawn(save_and_load, 2) == [({"DTensor", "Tensor"}, True)] * 2


# ---- sums along one dim, and buffers of one dim --------------------------------------

LINE = {"rows": [Shard(0)], "cols": [Shard(1)], "copy": [Replicate()]}
HYBRID = {"rows": [Replicate(), Shard(0)], "cols": [Replicate(), Shard(1)]}
GRID = {
    "both": [Shard(0), Shard(1)],
    "crossed": [Shard(1), Shard(0)],
    "twice": [Shard(0), Shard(0)],
    "striped": [_StridedShard(0, split_factor=2), Shard(0)],
    "first": [Shard(0), Replicate()],
    "second": [Replicate(), Shard(1)],
}
# mesh and placements
MESHES = {
    "2 ranks": ((2,), LINE),
    "4 ranks": ((4,), LINE),
    "HSDP 2x2": ((2, 2), HYBRID),
    "FSDP x TP 2x2": ((2, 2), GRID),
    "rows alone 2x2": ((2, 2), {"first": [Shard(0), Replicate()]}),
}


def cut(whole, mesh, placements):
    """A whole that every rank has; torch cannot send uneven stripes."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def cut_like(whole, leaf):
    """``whole`` as ``leaf`` is cut."""
    if not isinstance(leaf, DTensor):
        return whole
    return cut(whole, leaf.device_mesh, leaf.placements)


def matrices(mesh, places):
    """Whole matrices, even and uneven and with empty shards, and their leaves."""
    g = torch.Generator().manual_seed(3)
    wholes, leaves = [], []
    for size in ((4, 8), (5, 3), (1, 3), (3, 1)):
        for placements in places.values():
            wholes.append(torch.randn(size, generator=g, dtype=torch.float64))
            leaves.append(cut(wholes[-1], mesh, placements))
    plain = torch.ones(2, 3, dtype=torch.float64)
    return [*wholes, plain], [*leaves, plain]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSums(MatrixAverage):
    """At the owner: twice the matrix, and in a buffer the sums of its rows."""

    keeps = {
        **MatrixAverage.keeps,
        "sums": Buffer("row_sums", lambda shape, matrices: shape[:1], home="owner"),
    }

    def at_owner(self, matrices, stage):
        return [MatrixOutput(2 * x, (sums + x.sum(-1),)) for x, (sums,), *_ in matrices]


def rows_at_owners(rank, world, shape, places, strategy):
    """Rows come together in order; nothing that is given changes. Returns how many
    times each leaf has its owner here.
    """
    mesh = init_device_mesh("cpu", shape)
    collectives = MeshCollectives(mesh, strategy=strategy)
    wholes, leaves = matrices(mesh, places)
    same = RowSums(ns=NewtonSchulz(dtype=torch.float64))
    owns = collectives.owns([MatrixParam(leaf, Matrices(), same) for leaf in leaves])
    requests = []
    for leaf, numbers in zip(leaves, owns, strict=True):
        sums = torch.zeros(len(numbers), leaf.shape[0], dtype=torch.float64)
        given = MatrixInput(collectives.local(leaf), (sums,))
        keep = lambda old, new: new  # noqa: E731
        requests.append(Request(given, leaf, Matrices(), same, keep=keep))
    before = [one.input.matrix.clone() for one in requests]
    for _ in range(2):
        found = collectives.on_owners(requests)
        for one, whole, got in zip(requests, wholes, found, strict=True):
            assert torch.equal(got.matrix, 2 * one.input.matrix)
            (old,), (new,) = one.input.owned, got.owned
            assert not old.any()
            torch.testing.assert_close(new, whole.sum(1).expand_as(old))
    assert all(map(torch.equal, before, [one.input.matrix for one in requests]))
    return [len(numbers) for numbers in owns]


@pytest.mark.parametrize("strategy", ["owner", "replicate"])
@pytest.mark.parametrize("name", MESHES)
def test_rows_are_in_order_at_their_owner(name, strategy):
    shape, places = MESHES[name]
    world = torch.Size(shape).numel()
    ranks = spawn(rows_at_owners, world, shape, places, strategy)
    assert all(sum(nums) >= 1 for nums in zip(*ranks, strict=True))


def owned_matrices(rank, world, shape, places):
    """Numbers of the experts that this rank owns, for each leaf: some of those in its
    batches, in the order of its piece; all of them where no axis divides a matrix.
    """
    mesh = init_device_mesh("cpu", shape)
    collectives, owned = MeshCollectives(mesh), []
    for num in (4, 5, 1, 8):
        whole = torch.arange(num).view(-1, 1, 1).expand(num, 3, 2).contiguous()
        for placements in places.values():
            batches = [
                p if not p.is_replicate() and p.dim == 0 else Replicate()
                for p in placements
            ]
            in_order = cut(whole, mesh, batches).to_local()[:, 0, 0].tolist()
            leaf = cut(whole.double(), mesh, placements)
            experts = MatrixParam(leaf, Matrices(kind="batched"), Orthogonal())
            (numbers,) = collectives.owns([experts])
            assert [n for n in in_order if n in numbers] == [*numbers]
            assert batches != placements or [*numbers] == in_order
            owned.append((num, set(numbers)))
    return owned


@pytest.mark.parametrize("name", MESHES)
def test_experts_are_owned_where_they_lie(name):
    shape, places = MESHES[name]
    by_rank = spawn(owned_matrices, torch.Size(shape).numel(), shape, places)
    for leaves in zip(*by_rank, strict=True):
        assert set().union(*(numbers for _, numbers in leaves)) == {
            *range(leaves[0][0])
        }


def wrap_pieces(rank, world, shape, places):
    """Every rank's pieces make the whole again, and it knows the number of every
    element.
    """
    mesh = init_device_mesh("cpu", shape)
    collectives = MeshCollectives(mesh)
    _, leaves = matrices(mesh, places)
    for leaf in leaves:
        cuts = collectives.cuts(leaf)
        every = torch.arange(leaf.numel()).view(leaf.shape)
        mine = collectives.local(cut_like(every, leaf))
        assert torch.equal(flat_indices(leaf.shape, cuts, leaf.device), mine)
        buffer = collectives.wrap(mine, leaf)
        if isinstance(leaf, DTensor):
            assert collectives.local(buffer).data_ptr() == mine.data_ptr()
            assert torch.equal(buffer.full_tensor(), every), leaf.placements
        else:
            assert buffer is mine
    return True


@pytest.mark.parametrize("name", MESHES)
def test_wrapped_pieces_make_the_whole(name):
    shape, places = MESHES[name]
    world = torch.Size(shape).numel()
    assert all(spawn(wrap_pieces, world, shape, places))
