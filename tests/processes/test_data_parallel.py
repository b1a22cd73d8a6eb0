"""Plain data parallelism: ranks that each update their pieces move parameters as one
process does, and keep a part of its state.
"""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import marsopt
from marsopt import MARS, REGISTRY
from marsopt.parallel import DataParallel, MeshCollectives
from marsopt.profiling.gpt2 import param_groups, shapes
from tests import dcp_states
from tests.library.test_guide import snippets
from tests.processes import spawn
from tests.table import steady

pytestmark = pytest.mark.processes

APPROXIMATE, EXACT, TRANSPORT = "approximate", "exact", "transport"
FORMS = {t: APPROXIMATE if r.is_mars else None for t, r in REGISTRY.items()}
SOME = [("mars-adamw", EXACT), ("lion", None), ("mars-normuon", TRANSPORT)]
SOME += [("mars-soap", APPROXIMATE), ("adamw", TRANSPORT)]
CASES = {1: SOME[:2], 2: [*FORMS.items()], 3: SOME, 4: SOME[2:4]}  # by ranks
# what is cut in every way: uneven rows, a number, nothing, blocks, batches, a kernel
SHAPES = {
    "matrix": (6, 4), "other": (4, 6), "vector": (5,), "number": (), "empty": (0, 3),
    "table": (50, 4), "heads": (12, 4), "qkv": (11, 5), "experts": (3, 4, 5),
    "kernel": (6, 3, 2, 2),
}  # fmt: skip
OPTIONS = {
    "table": dict(mars_type="adamw"),
    "heads": dict(splits=3),
    "qkv": dict(splits=(5, 3, 3)),
    "experts": dict(matrices="batched"),
    "kernel": dict(matrices="flattened"),
}


def build(collectives=None, mars_type="mars-m", dtype=torch.float64, **options):
    """Parameters by name, and MARS over them, each in a group of its own."""
    g = torch.Generator().manual_seed(0)
    drawn = {n: torch.randn(s, generator=g).to(dtype) for n, s in SHAPES.items()}
    params = {n: nn.Parameter(x) for n, x in drawn.items()}
    plain = [(n, p) for n, p in params.items() if n not in OPTIONS]
    groups = [{"params": plain}]
    groups += [{"params": [(n, params[n])], **own} for n, own in OPTIONS.items()]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    defaults = dict(
        mars_type=mars_type, lr=0.02, weight_decay=0.1, ns_dtype=exact, compile=False
    )
    defaults |= steady(mars_type) | options
    if collectives is not None:
        defaults["collectives"] = collectives
    return params, MARS(groups, lr_1d=0.02, **defaults)


def step(params, optimizer, seeds, exact=False):
    """Take a step with the gradients of each seed, the same on every rank."""

    def give(seed):
        g = torch.Generator().manual_seed(seed)
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)

    for seed in seeds:
        if exact:
            give(seed + 1)
            optimizer.update_previous_grad()
        give(seed)
        optimizer.step()
        if exact:
            optimizer.update_last_grad()


def off_by(params, others):
    """Largest difference of a parameter."""
    pairs = [(params[n], others[n]) for n in params if params[n].numel()]
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def held(optimizer):
    """Bytes of state on this rank, of counts of steps none."""
    entries = [e.items() for e in optimizer.state.values()]
    return sum(x.nbytes for entry in entries for k, x in entry if k != "step")


def ranks_and_one_process(rank, world, cases):
    """Of every case: the largest difference to one process, without a clip and with
    both, and parameters on this rank.
    """
    found = []
    for mars_type, form in cases:
        clipped = dict(max_norm=2.0) | (dict(clip=0.5) if form != TRANSPORT else {})
        errors = []
        for clips in (dict(clip=None), clipped):
            options = dict(mars_type=mars_type, correction=form, **clips)
            params, optimizer = build(DataParallel(), **options)
            others, one = build(**options)
            for each in ((params, optimizer), (others, one)):
                step(*each, range(2), exact=form == EXACT)
            errors.append(off_by(params, others))
            iterates = {p: x.clone() for p, x in optimizer.iterates()}
            optimizer.eval()
            one.eval()
            errors[-1] = max(errors[-1], off_by(params, others))
            assert all(torch.equal(iterates[p], p) for p in params.values())
        found.append((errors, {n: p.detach().clone() for n, p in params.items()}))
    return found


@pytest.mark.parametrize("world", CASES)
def test_ranks_together_are_one_process(world):
    """Elementwise rules bit for bit, where no clip acts: the sum of a norm has another
    order, as over shards.
    """
    cases = CASES[world]
    per_rank = spawn(ranks_and_one_process, world, cases, seconds=240)
    for i, (mars_type, form) in enumerate(cases):
        for found in per_rank:
            (plain, clipped), params = found[i]
            what = f"{mars_type} {form}"
            assert clipped < 1e-11, what
            assert plain < (1e-11 if REGISTRY[mars_type].matrix_only else 1e-300), what
            for n, p in params.items():
                assert torch.equal(p, per_rank[0][i][1][n]), f"{what}, {n}: ranks"


def rounded(rank, world):
    out = []
    for mars_type in ("adamw", "muon"):
        options = dict(mars_type=mars_type, dtype=torch.bfloat16)
        options |= dict(state_dtype=torch.bfloat16, stochastic_rounding=True)
        params, optimizer = build(DataParallel(), **options)
        others, one = build(**options)
        step(params, optimizer, range(3))
        step(others, one, range(3))
        out.append(off_by(params, others))
    return out


def test_the_noise_of_rounding_is_that_of_one_process():
    assert spawn(rounded, 2) == [[0.0, 0.0]] * 2


# ---- what is held and sent -----------------------------------------------------------


def costs(rank, world, mars_type, form, layers, width):
    """Bytes of state here and in one process, and the collectives of a warm step."""
    made = {n: nn.Parameter(torch.zeros(s)) for n, s in shapes(layers, width).items()}
    options = dict(mars_type=mars_type, correction=form, compile=False, lr_1d=1e-3)
    one = held(MARS(param_groups(made, mars_type), **options))
    optimizer = MARS(
        param_groups(made, mars_type), collectives=DataParallel(), **options
    )
    for p in made.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.profiler.profile(record_shapes=True) as seen:
        optimizer.step()
    calls = [
        (e.name.removeprefix("gloo:"), torch.Size(e.input_shapes[0]).numel())
        for e in seen.events()
        if e.name.startswith("gloo:")
    ]
    return held(optimizer), one, calls, sum(p.numel() for p in made.values())


@pytest.mark.parametrize(
    "mars_type, form, world",
    [("mars-m", TRANSPORT, 2), ("adamw", None, 3), ("moonlight", None, 4)],
)
def test_state_is_shared_out_and_parameters_come_in_one_piece(mars_type, form, world):
    """At most 1.1 / R of one process's state a rank; beside the numbers of the norms
    nothing travels but new parameters, padded by less than a tenth.
    """
    for mine, one, calls, numel in spawn(costs, world, mars_type, form, 8, 32):
        assert mine <= 1.1 / world * one
        names = [name for name, _ in calls]
        assert names == ["all_reduce", "all_gather"], names
        assert calls[1][1] <= 1.1 * numel / world


def replaced(rank, world, mars_type):
    """A weight is put elsewhere after each step; one of the ranks holds no piece."""
    model, optimizer = held_as("ddp", mars_type, None)
    weight, ends = inner(model).last.weight, []
    for seed in range(3):
        train(model, optimizer, [seed])
        weight.data = weight.data / weight.data.norm()
        ends.append(weight.detach().clone())
    return ends


@pytest.mark.parametrize("mars_type", ["muon", "soap"])
def test_ranks_agree_after_a_parameter_has_moved(mars_type):
    first, *others = spawn(replaced, 2, mars_type, seconds=60)
    for other in others:
        assert all(map(torch.equal, first, other))


def loaded_and_saved(rank, world):
    """Of a matrix whose one row another rank has, before any step."""
    states = []
    for _ in range(2):
        rows = nn.Parameter(torch.ones(1, 8))
        kw = dict(mars_type="adamw", correction="transport", compile=False)
        optimizer = MARS([rows], lr=0.1, collectives=DataParallel(), **kw)
        if states:
            optimizer.load_state_dict(states[0])
        else:
            rows.grad = torch.ones(1, 8)
            optimizer.step()
            optimizer.eval()
        states.append(optimizer.state_dict())
    return [dict(state["state"][0]) for state in states]


def test_what_was_loaded_is_saved_before_a_step():
    for before, after in spawn(loaded_and_saved, 2, seconds=60):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


# ---- state dicts ---------------------------------------------------------------------


class Model(nn.Module):
    """Fewer rows than ranks, and a matrix that one of them has."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.LayerNorm(5)
        self.last = nn.Linear(5, 2, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


WAYS = ("one", "ddp", "fsdp")  # to hold a model


def held_as(way, mars_type, form, compile=False):
    torch.manual_seed(1)
    model, kw = Model().double(), {}
    if way == "ddp":
        model = DistributedDataParallel(model)
        kw = dict(collectives=DataParallel(model.process_group))
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        kw = dict(collectives=MeshCollectives(mesh))
    optimizer = MARS(
        model.named_parameters(), lr=0.02, lr_1d=0.02, mars_type=mars_type,
        correction=form, ns_dtype=torch.float64, compile=compile, max_norm=1.0,
        **steady(mars_type), **kw,
    )  # fmt: skip
    return model, optimizer


def train(model, optimizer, seeds):
    """Every rank has the same batch, so that gradients are those of one process."""
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(8, n, generator=g).double() for n in (6, 2))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def whole(model):
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in inner(model).named_parameters()
    }


def inner(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def save_and_go_on(rank, world, way, case, folder, in_eval):
    model, optimizer = held_as(way, *case)
    train(model, optimizer, range(3))
    if in_eval:
        optimizer.eval()
        with torch.no_grad():  # which is no longer what the point ahead was made from
            inner(model).first.weight.add_(0.01)
    dcp_states.save(inner(model), optimizer, folder)
    optimizer.train()
    train(model, optimizer, range(3, 6))
    return whole(model)


def load_and_go_on(rank, world, way, case, folder, in_eval):
    model, optimizer = held_as(way, *case)
    train(model, optimizer, [7])
    if in_eval:
        optimizer.eval()
    dcp_states.load(inner(model), optimizer, folder)
    optimizer.train()
    train(model, optimizer, range(3, 6))
    return whole(model)


RESUMED = {
    "other ranks": ("ddp", 2, "ddp", 3, ("mars-m", APPROXIMATE), False),
    "transport": ("ddp", 3, "ddp", 2, ("mars-m", TRANSPORT), False),
    "x follows": ("ddp", 3, "ddp", 2, ("mars-adamw", TRANSPORT), True),
    "SOAP": ("ddp", 2, "ddp", 3, ("mars-soap", APPROXIMATE), False),
    "to FSDP2": ("ddp", 2, "fsdp", 3, ("mars-m", TRANSPORT), True),
    "SOAP to FSDP2": ("ddp", 2, "fsdp", 2, ("mars-soap", APPROXIMATE), False),
    "from FSDP2": ("fsdp", 2, "ddp", 2, ("mars-m", APPROXIMATE), False),
}


@pytest.mark.parametrize("name", RESUMED)
def test_checkpoints_of_dcp_resume_on_other_ranks_and_under_fsdp2(name, tmp_path):
    before, some, after, others, case, in_eval = RESUMED[name]
    folder = str(tmp_path / "checkpoint")
    want = spawn(save_and_go_on, some, before, case, folder, in_eval)[0]
    for got in spawn(load_and_go_on, others, after, case, folder, in_eval):
        for n, p in want.items():
            torch.testing.assert_close(got[n], p, rtol=0, atol=1e-11, msg=n)


def one_file(rank, world, case):
    """What rank 0 saves as under DDP, and parameters some steps later."""
    model, optimizer = held_as("ddp", *case)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save((model.module.state_dict(), optimizer.state_dict()), file)
    train(model, optimizer, range(3, 6))
    return file.getvalue(), whole(model)


def from_file(rank, world, case, saved):
    model, optimizer = held_as("ddp", *case)
    weights, state = torch.load(io.BytesIO(saved))
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(3, 6))
    return whole(model)


@pytest.mark.parametrize("case", [("mars-m", TRANSPORT), ("mars-soap", APPROXIMATE)])
def test_what_rank_0_saves_is_the_state_of_one_process(case):
    (saved, want), *_ = spawn(one_file, 2, case)
    model, optimizer = held_as("one", *case)
    weights, state = torch.load(io.BytesIO(saved))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(3, 6))
    for got in (whole(model), *spawn(from_file, 3, case, saved)):
        for n, p in want.items():
            torch.testing.assert_close(got[n], p, rtol=0, atol=1e-11, msg=n)


def pieces_move(rank, world, form):
    """Differences to one process after rules change, parameters freeze and come back,
    others join, and of a copy.
    """
    found = {}
    params, optimizer = build(DataParallel(), correction=form)
    others, one = build(correction=form)
    both = [(params, optimizer), (others, one)]

    def look(what, seeds):
        for each in both:
            step(*each, seeds)
        found[what] = off_by(params, others)

    look("at first", [0, 1])
    for _, each in both:
        each.param_groups[0]["mars_type"] = "mars-adamw"
        each.param_groups[1]["mars_type"] = "mars-m"
    look("other rules", [2, 3])
    for some, _ in both:
        some["heads"].requires_grad_(False)
        some["heads"].grad = None
    look("frozen", [])
    for some, _ in both:
        some["heads"].requires_grad_(True)
    look("thawed", [4])
    for some, each in both:
        some["late"] = nn.Parameter(torch.ones(8, 8, dtype=torch.float64))
        each.add_param_group({"params": [("late", some["late"])]})
    look("joined", [5, 6])
    twin = copy.deepcopy((params, optimizer))
    step(*twin, [7])
    look("copied", [7])
    found["copy"] = off_by(params, twin[0])
    return found


@pytest.mark.parametrize("form", [APPROXIMATE, TRANSPORT])
def test_pieces_move_with_their_state(form):
    for found in spawn(pieces_move, 3, form):
        assert max(found.values()) < 1e-11, found


# ---- skips, graphs, errors -----------------------------------------------------------


def skips(rank, world):
    params, optimizer = build(DataParallel(), mars_type="mars-m")
    step(params, optimizer, [0])
    before = {n: p.detach().clone() for n, p in params.items()}
    for p in params.values():
        p.grad = torch.ones_like(p)
    params["table"].grad[-1] = float("nan")  # a row of the last rank's alone
    optimizer.step()
    return optimizer.num_skipped, off_by(params, before)


def test_all_ranks_skip_together():
    assert spawn(skips, 3) == [(1, 0.0)] * 3


def compiled(rank, world):
    """Of the graphs that dynamo makes; what inductor makes of them is the same code as
    of one process.
    """
    pairs = [held_as("ddp", "mars-m", TRANSPORT, compile=how) for how in (True, False)]
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        for each in pairs:
            train(*each, range(3))
    (got, _), (want, _) = pairs
    return off_by(whole(got), whole(want))


def test_compiled_steps_are_eager_ones():
    assert max(spawn(compiled, 2, seconds=240)) < 1e-11


def errors(rank, world):
    told = []

    def tell(what, *args, **kw):
        try:
            what(*args, **kw)
        except (TypeError, ValueError, RuntimeError) as error:
            told.append(str(error))

    rows = distribute_tensor(
        torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)]
    )
    options = dict(collectives=DataParallel(), compile=False)
    tell(MARS, [nn.Parameter(rows)], **options)
    tell(pickle.dumps, MARS([nn.Parameter(torch.ones(4, 2))], **options))
    different = nn.Parameter(torch.ones(4 + rank, 2))
    optimizer = MARS([different], **options)
    different.grad = torch.ones_like(different)
    tell(optimizer.step)
    return told


def in_another_order(rank, world, late):
    """Two parameters of one shape, from the start or in a later group."""
    drawn = [
        torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in (1, 2)
    ]
    params = [nn.Parameter(x) for x in drawn]
    order = params[::-1] if rank else params
    first = [nn.Parameter(torch.ones(3))] if late else order
    options = dict(mars_type="moonlight", compile=False, collectives=DataParallel())
    optimizer = MARS(first, **options)

    def step():
        for p in (*first, *params):
            p.grad = torch.ones_like(p)
        optimizer.step()

    if late:
        step()
        optimizer.add_param_group({"params": order})
    try:
        step()
    except RuntimeError as error:
        same = all(map(torch.equal, params, drawn))
        return str(error), same
    return "taken", False


@pytest.mark.parametrize("late", [False, True])
def test_another_order_on_a_rank_is_refused(late):
    for told, same in spawn(in_another_order, 2, late):
        assert f"other values of parameter 0 of group {int(late)}" in told
        assert same


def other_gradients(rank, world):
    """Numbers, rows, kernels in other memory formats; ranks with other gradients."""
    g = torch.Generator().manual_seed(0)
    drawn = [torch.randn(s, generator=g) for s in ((), (5,), (7, 3), (4, 3, 2, 2))]
    drawn += [drawn[2].mT.contiguous().mT]
    drawn[3] = drawn[3].to(memory_format=torch.channels_last)
    params = list(map(nn.Parameter, drawn))
    optimizer = MARS(
        params, lr=0.1, correction="transport", compile=False,
        collectives=DataParallel(),
    )  # fmt: skip
    out = []
    for _ in range(3):
        for p in params:
            p.grad = torch.full_like(p, 1.0 + rank)
        optimizer.step()
        out.append([p.detach().clone() for p in params])
        optimizer.eval()
        out.append([p.detach().clone() for p in params])
        optimizer.train()
    return out


def test_ranks_hold_equal_parameters_whatever_their_gradients():
    """Every piece is its owner's: numbers are the first rank's."""
    first, second = spawn(other_gradients, 2)
    for mine, others in zip(first, second, strict=True):
        assert all(map(torch.equal, mine, others))


def in_small_chunks(rank, world):
    """A step where one rank owns nearly all, in chunks of four elements a rank."""
    found = []
    for chunk in (2**25, 4 * 8 * world):
        with mock.patch("marsopt.parallel.data_parallel.CHUNK", chunk):
            params, optimizer = build(DataParallel(), mars_type="moonlight")
            large = nn.Parameter(torch.ones(30, 20, dtype=torch.float64))
            params["large"] = large
            optimizer.add_param_group({"params": [("large", large)]})
            step(params, optimizer, range(2))
        found.append([p.detach().clone() for p in params.values()])
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_the_size_of_chunks_changes_nothing(world):
    for whole, chunks in spawn(in_small_chunks, world):
        assert all(map(torch.equal, whole, chunks))


def test_errors_say_what_to_do():
    for told in spawn(errors, 2, seconds=60):
        assert len(told) == 3, told
        assert "pass collectives=MeshCollectives(mesh)" in told[0]
        assert "expected its state_dict()" in told[1]
        assert "expected the same everywhere" in told[2]


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
        layers=[*model][:2], marsopt=marsopt, model=model,
        batches=list(pairs), loss_fn=nn.functional.mse_loss, torch=torch,
    )  # fmt: skip
    if heading != ALONE:
        names["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    code, *after = PAGE[heading]
    with mock.patch.dict(MARS.__init__.__kwdefaults__, compile=False):
        for part in (code, LOOP, *after):
            exec(compile(part, f"setups.md: {heading}", "exec"), names)
    if heading != ZERO:  # which has no transport
        names["optimizer"].eval()
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
    """As shown for schedules, and as torch's schedulers scale or erase it."""
    (code,) = PAGE[SCHEDULES]
    schedulers, ends = torch.optim.lr_scheduler, []
    for each in (True, False):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
        made = partial(marsopt.for_model, model, compile=False)
        optimizer = made("moonlight", lr=6e-3, lr_1d=6e-4)
        exec(code, dict(optimizer=optimizer, lr=3e-3, learning_rate=6e-3))
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([3e-3, *[3e-4] * (len(rates) - 1)])
        exec(code, dict(optimizer=optimizer, lr=6e-3, learning_rate=6e-3))
        peaks = [group["lr"] for group in optimizer.param_groups] if each else 6e-3
        schedulers.OneCycleLR(optimizer, peaks, total_steps=9, cycle_momentum=False)
        ends.append(len({group["lr"] for group in optimizer.param_groups}))
    assert ends == [2, 1]
    optimizer = made("moonlight", lr=6e-3, lr_1d=6e-4)
    schedulers.LambdaLR(optimizer, lambda step: 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {3e-3, 3e-4}
