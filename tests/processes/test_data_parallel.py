"""Plain data parallelism: ranks that share Newton-Schulz move parameters as one process
does, and each has all state.
"""

from __future__ import annotations

import copy
import io
import pickle
from functools import cache, partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import marsopt
from marsopt import MARS
from marsopt.parallel import DataParallel, MeshCollectives, data_parallel, exchange
from marsopt.parallel.planner import assign
from marsopt.profiling.gpt2 import param_groups, shapes
from tests import dcp_states
from tests.library.test_guide import is_python, snippets
from tests.processes import spawn
from tests.table import steady

pytestmark = pytest.mark.processes

RULES = ("muon", "moonlight", "normuon", "soap", "adamw", "mars-m", "soap-muon")
BF16 = torch.bfloat16
TOKENS = 12  # of all ranks in a step: divisible by 2, 3 and 4
NUM_STEPS = 3


class Model(nn.Module):
    """Matrices in every form: alone, heads, parts of several shapes, experts, and a
    convolution kernel.
    """

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.LayerNorm(5)
        self.heads = nn.Linear(5, 12, bias=False)
        self.qkv = nn.Linear(12, 11, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 11, 4))
        self.kernel = nn.Conv2d(1, 3, 2)

    def forward(self, x):
        x = torch.tanh(self.qkv(self.heads(self.norm(self.first(x)))))
        x = (x @ self.experts).sum(0)
        return self.kernel(x.view(-1, 1, 2, 2)).flatten(1)


OWN = {
    "heads.weight": dict(splits=3),
    "qkv.weight": dict(splits=(5, 3, 3)),
    "experts": dict(matrices="batched"),
    "kernel.weight": dict(matrices="flattened"),
}


class Small(nn.Module):
    """A single matrix: fewer than ranks."""

    def __init__(self):
        super().__init__()
        self.only = nn.Linear(6, 3)

    def forward(self, x):
        return self.only(x)


def held_as(way, kind, mars_type, compile=False, dtype=torch.float64, **more):
    """A model, and its optimizer, over the ranks or whole in one process."""
    torch.manual_seed(1)
    model, kw = kind().to(dtype), {}
    if way == "ddp":
        model = DistributedDataParallel(model)
        kw = dict(collectives=DataParallel(model.process_group))
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        model.set_gradient_divide_factor(dist.get_world_size())  # gloo cannot average
        model.set_force_sum_reduction_for_comms(True)
        kw = dict(collectives=MeshCollectives(mesh))
    named = [*inner(model).named_parameters()]
    plain = [pair for pair in named if pair[0] not in OWN]
    groups = [dict(params=plain)]
    groups += [dict(params=[(n, p)], **OWN[n]) for n, p in named if n in OWN]
    kw |= steady(mars_type) | more
    optimizer = MARS(
        groups, lr=0.02, lr_1d=0.02, mars_type=mars_type, weight_decay=0.1,
        ns_dtype=torch.float64, compile=compile, max_norm=1.0, **kw,
    )  # fmt: skip
    return model, optimizer


def inner(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def whole(model):
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in inner(model).named_parameters()
    }


def train(model, optimizer, seeds, rank=0, world=1):
    """Each rank has its own part of the batch, of which one process has all."""
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(TOKENS, n, generator=g).double() for n in (6, 3))
        x, y = (v.chunk(world)[rank] for v in (x, y))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def buffers(state_dict):
    """All tensors of a state dict, by parameter and key."""
    entries = state_dict["state"].items()
    return {(i, key): x for i, entry in entries for key, x in entry.items()}


def without_bases(state):
    """SOAP's are left to chance where there was no gradient."""
    return {(i, key): x for (i, key), x in state.items() if "basis" not in key}


def assert_close(got, want):
    assert got.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=1e-12, msg=str(name))


# ---- steps ---------------------------------------------------------------------------


def trained(rank, world, kind, rules):
    """Of every rule: parameters and state; what rank 0 alone has saved, and parameters
    some steps later.
    """
    found = []
    for mars_type in rules:
        model, optimizer = held_as("ddp", kind, mars_type)
        train(model, optimizer, range(NUM_STEPS), rank, world)
        file = io.BytesIO()
        if rank == 0:
            torch.save((model.module.state_dict(), optimizer.state_dict()), file)
        at_save = whole(model), copy.deepcopy(buffers(optimizer.state_dict()))
        train(model, optimizer, range(NUM_STEPS, 2 * NUM_STEPS), rank, world)
        found.append((*at_save, file.getvalue(), whole(model)))
    return found


@cache
def alone(kind, mars_type):
    """The same in one process."""
    model, optimizer = held_as("one", kind, mars_type)
    train(model, optimizer, range(NUM_STEPS))
    at_save = whole(model), copy.deepcopy(buffers(optimizer.state_dict()))
    train(model, optimizer, range(NUM_STEPS, 2 * NUM_STEPS))
    return *at_save, whole(model)


def masters(rank, world):
    """By rule, whether 32 bits are a float32 run, and the weights of 24 bits."""
    found = {}
    for mars_type in ("mars-m", "normuon", "soap"):
        runs = [
            held_as("ddp", Model, mars_type, dtype=dtype, master_weight_bits=bits)
            for dtype, bits in ((BF16, 32), (torch.float32, None), (BF16, 24))
        ]
        with torch.no_grad():
            for p, q in zip(*(m.parameters() for m, _ in runs[:2]), strict=True):
                q.copy_(p)
        for seed in range(NUM_STEPS):
            for model, optimizer in runs:
                g = torch.Generator().manual_seed(seed)
                for p in model.parameters():
                    p.grad = torch.randn(p.shape, generator=g).to(BF16).to(p.dtype)
                optimizer.step()
        weights, (wide, _) = runs[0][1].master_weights(), runs[1]
        expected = whole(wide)
        found[mars_type] = all(torch.equal(weights[n], x) for n, x in expected.items())
        found[mars_type, 24] = runs[2][1].master_weights()
    return found


def test_master_weights_are_those_of_a_float32_run():
    """And ranks round alike."""
    first, second = spawn(masters, 2)
    for key, value in first.items():
        if isinstance(value, dict):
            assert all(torch.equal(second[key][n], x) for n, x in value.items()), key
        else:
            assert value and second[key], key


@pytest.mark.parametrize(
    "kind, world, rules",
    [(Model, 2, RULES), (Model, 3, ("normuon", "soap")), (Small, 3, ("muon",))],
    ids=["2", "3", "fewer matrices than ranks"],
)
def test_ranks_together_are_one_process(kind, world, rules):
    """With averaged gradients; ranks are equal bit for bit, and each has all state.
    Rank 0 saves it by itself, and one process goes on from its file.
    """
    per_rank = spawn(trained, world, kind, rules, seconds=240)
    for i, mars_type in enumerate(rules):
        params, state, end = alone(kind, mars_type)
        first = per_rank[0][i]
        for found in per_rank:
            assert_close(found[i][0], params)
            assert found[i][1].keys() == state.keys()
            assert_close(*map(without_bases, (found[i][1], state)))
            assert_close(found[i][3], end)
            for mine, of_first in zip(found[i], first, strict=True):
                if isinstance(mine, dict):
                    assert all(torch.equal(mine[k], x) for k, x in of_first.items())
        model, optimizer = held_as("one", kind, mars_type)
        weights, saved = torch.load(io.BytesIO(first[2]))
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        train(model, optimizer, range(NUM_STEPS, 2 * NUM_STEPS))
        assert_close(whole(model), end)


def compiled(rank, world):
    """Of the graphs that dynamo makes; what inductor makes of them is the same code as
    of one process.
    """
    pairs = [held_as("ddp", Small, "mars-m", compile=how) for how in (True, False)]
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        for each in pairs:
            train(*each, range(NUM_STEPS), rank, world)
    (got, _), (want, _) = pairs
    return whole(got), whole(want)


def test_compiled_steps_are_eager_ones():
    for got, want in spawn(compiled, 2, seconds=240):
        assert_close(got, want)


# ---- what is done and sent -----------------------------------------------------------


def shares(rank, world, layers, width, mesh_shape):
    """Matrices that this rank iterates in a warm step, all matrices, the collectives
    with how many numbers each takes from here, and bytes of state; over (replicas,
    shards), or of plain data parallelism.
    """
    collectives, room, put = DataParallel(), data_parallel, lambda x: x
    if mesh_shape:
        mesh = init_device_mesh("cpu", mesh_shape)
        collectives, room = MeshCollectives(mesh), exchange
        put = partial(
            distribute_tensor, device_mesh=mesh, placements=[Replicate(), Shard(0)]
        )
    drawn = {n: torch.ones(shape) for n, shape in shapes(layers, width).items()}
    made = {n: nn.Parameter(put(x)) for n, x in drawn.items()}
    groups = param_groups(made, "moonlight")  # embeddings under AdamW
    optimizer = MARS(
        groups, mars_type="moonlight", lr_1d=1e-3, compile=False,
        ns_dtype=torch.float32, collectives=collectives,
    )  # fmt: skip
    for p in made.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    done, work = [], room.precondition_matrices

    def counted(requests):
        done.extend(request.input.matrix.shape for request in requests)
        return work(requests)

    with (
        mock.patch.object(room, "precondition_matrices", counted),
        torch.profiler.profile(record_shapes=True) as seen,
    ):
        optimizer.step()
    calls = [
        (e.name.removeprefix("gloo:"), torch.Size(e.input_shapes[0]).numel())
        for e in seen.events()
        if e.name.startswith("gloo:")
    ]
    matrices = [
        p.shape
        for group in optimizer.param_groups
        for p in group["params"]
        if group["mars_type"] == "moonlight" and p.ndim == 2
    ]
    kept = sum(x.nbytes for entry in optimizer.state.values() for x in entry.values())
    return done, matrices, calls, kept


@pytest.mark.parametrize("mesh_shape, exchanges", [(None, 0), ((2, 2), 4)])
def test_each_rank_does_its_share_and_sends_it_once(mesh_shape, exchanges):
    """Balanced by FLOPs over all ranks, of DDP or HSDP; one all-reduce of norms; in two
    buckets shards there and back, and all-gathers, padded by less than a quarter.
    """
    world, layers = 4 if mesh_shape else 3, 4
    per_rank = spawn(shares, world, layers, 32, mesh_shape)
    cost = marsopt.NewtonSchulz(dtype=torch.float32)
    matrices = per_rank[0][1]
    flops = [cost.num_flops(*shape) for shape in matrices]
    owners = assign(flops, world)
    pairs = [*zip(owners, flops, strict=True)]
    loads = [sum(n for owner, n in pairs if owner == rank) for rank in range(world)]
    every = [shape for done, *_ in per_rank for shape in done]
    assert sorted(every) == sorted(matrices)
    assert max(loads) < 1.1 * sum(flops) / world
    kinds = {"all_reduce": 1, "all_to_all": exchanges, "all_gather": 2}
    for (done, _, calls, kept), load in zip(per_rank, loads, strict=True):
        assert sum(cost.num_flops(*shape) for shape in done) == load
        names = [name for name, _ in calls]
        assert {kind: names.count(kind) for kind in kinds} == kinds
        assert len(names) == sum(kinds.values())
        sent = sum(numel for name, numel in calls if name == "all_gather")
        assert sent <= 1.25 * sum(s.numel() for s in matrices) / world
        assert kept == per_rank[0][3]


# ---- checkpoints, copies, errors -----------------------------------------------------


def save_and_go_on(rank, world, way, mars_type, folder):
    model, optimizer = held_as(way, Model, mars_type)
    train(model, optimizer, range(NUM_STEPS), rank, world)
    dcp_states.save(inner(model), optimizer, folder)
    train(model, optimizer, range(NUM_STEPS, 2 * NUM_STEPS), rank, world)
    return whole(model)


def load_and_go_on(rank, world, way, mars_type, folder):
    model, optimizer = held_as(way, Model, mars_type)
    train(model, optimizer, [7], rank, world)
    dcp_states.load(inner(model), optimizer, folder)
    train(model, optimizer, range(NUM_STEPS, 2 * NUM_STEPS), rank, world)
    return whole(model)


@pytest.mark.parametrize(
    "before, some, after, others, mars_type",
    [
        ("ddp", 2, "ddp", 3, "mars-m"),
        ("ddp", 2, "fsdp", 3, "mars-soap"),
        ("fsdp", 3, "ddp", 2, "normuon"),
    ],
)
def test_checkpoints_of_dcp_resume_on_other_ranks_and_under_fsdp2(
    before, some, after, others, mars_type, tmp_path
):
    folder = str(tmp_path / "checkpoint")
    want = spawn(save_and_go_on, some, before, mars_type, folder)[0]
    for got in spawn(load_and_go_on, others, after, mars_type, folder):
        for n, p in want.items():
            torch.testing.assert_close(got[n], p, rtol=0, atol=1e-11, msg=n)


def errors(rank, world):
    told = []
    rows = distribute_tensor(
        torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)]
    )
    options = dict(collectives=DataParallel(), compile=False)
    for what in (
        lambda: MARS([nn.Parameter(rows)], **options),
        lambda: MARS([nn.Parameter(rows)], compile=False),
        lambda: pickle.dumps(MARS([nn.Parameter(torch.ones(4, 2))], **options)),
    ):
        try:
            what()
        except (TypeError, ValueError) as error:
            told.append(str(error))
    return told


def test_errors_say_what_to_do():
    for sharded, without, pickled in spawn(errors, 2, seconds=60):
        for told in (sharded, without):
            assert "pass collectives=MeshCollectives(mesh)" in told
        assert "expected its state_dict()" in pickled


def test_a_process_group_is_needed():
    with pytest.raises(ValueError, match="init_process_group"):
        DataParallel()


# ---- docs/setups.md ------------------------------------------------------------------

PAGE = snippets(Path(__file__).parents[2] / "docs" / "setups.md")
(LOOP,) = PAGE["Your setup"]
ALONE = "One GPU"
ZERO = "ZeroRedundancyOptimizer"
SCHEDULES = "Learning rate schedules"
OTHERS = {"Your setup", ALONE, SCHEDULES, "torchtitan"}  # test_torchtitan.py


def as_shown(heading):
    """Parameters after the code under a heading, with start and loop around it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    pairs = zip(torch.randn(4, 5, 4), torch.randn(4, 5, 2), strict=True)
    names = dict(
        DistributedDataParallel=DistributedDataParallel, MARS=MARS, dist=dist,
        ColwiseParallel=ColwiseParallel, RowwiseParallel=RowwiseParallel,
        device="cpu", fully_shard=fully_shard, parallelize_module=parallelize_module,
        layers=[*model][:2], marsopt=marsopt, model=model, stage=model,
        batches=list(pairs), learning_rate=1.7e-2, loss_fn=nn.functional.mse_loss,
        torch=torch,
    )  # fmt: skip
    if heading != ALONE:
        names["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    code, *after = filter(is_python, PAGE[heading])
    with mock.patch.dict(MARS.__init__.__kwdefaults__, compile=False):
        for part in (code, LOOP, *after):
            exec(compile(part, f"setups.md: {heading}", "exec"), names)
    return whole(names["model"])


def shown(rank, world, heading):
    with mock.patch.object(torch, "save", lambda x, name: x):
        return as_shown(heading)


@pytest.mark.parametrize("heading", [h for h in PAGE if h not in OTHERS])
def test_what_is_shown_runs_and_is_one_process(heading):
    """But for ZeRO, which clips nothing and decays other tensors."""
    world = 4 if "(2, 2)" in PAGE[heading][0] else 2
    first, *others = spawn(shown, world, heading)
    want = as_shown(ALONE)
    for n, p in want.items():
        assert all(torch.equal(other[n], first[n]) for other in others)
        if heading != ZERO:
            torch.testing.assert_close(first[n], p, rtol=0, atol=1e-6)


def test_a_loop_over_the_groups_keeps_lr_1d():
    (code,) = PAGE[SCHEDULES]
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
    optimizer = marsopt.for_model(model, lr=6e-3, lr_1d=6e-4, compile=False)
    exec(code, dict(optimizer=optimizer, lr=3e-3))
    rates = [group["lr"] * group["lr_ratio"] for group in optimizer.param_groups]
    assert rates == pytest.approx([3e-3, *[3e-4] * (len(rates) - 1)])
