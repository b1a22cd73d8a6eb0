"""Whose memory is it? What the user has put into groups, parameters and state is what
the next step takes: values are never dropped and never stale.
"""

from __future__ import annotations

import copy
import logging
import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import marsopt
from marsopt import MARS
from marsopt.parallel import MeshCollectives
from tests.processes import spawn
from tests.stacking import build, copies, equal, fill, forced, run

SHAPES = ((5, 4), (4,), (5, 4), (4,), (5, 4), (3, 6))
LR = 0.02
RULES = (
    dict(mars_type="adamw"),
    dict(mars_type="mars-adamw"),
    dict(mars_type="moonlight", ns_dtype=torch.float32),
    dict(mars_type="mars-m", ns_dtype=torch.float32, max_norm=0.5),
    dict(mars_type="nadamw"),
    dict(mars_type="soap"),
)


def parameters(*shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=g)) for s in shapes or SHAPES]


@pytest.fixture(params=["eager", "stacks"])
def mode(request, monkeypatch):
    return forced(monkeypatch, request.param)


def tensors(optimizer):
    return [
        (entry, key, value)
        for entry in optimizer.state.values()
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    ]


# ---- state that is moved -------------------------------------------------------------


def move_data(optimizer):
    for _, _, value in tensors(optimizer):
        value.data = value.data.clone()


def move_one(optimizer):
    value = list(optimizer.state.values())[2]["exp_avg"]
    value.data = value.data.clone()


def replace(optimizer):
    for entry, key, value in tensors(optimizer):
        entry[key] = value.clone()


def swap(optimizer):
    for _, _, value in tensors(optimizer):
        torch.utils.swap_tensors(value, value.clone())


def share(optimizer):
    for _, _, value in tensors(optimizer):
        value.share_memory_()


def copy_entries(optimizer):
    for p in list(optimizer.state):
        optimizer.state[p] = copy.deepcopy(optimizer.state[p])


MOVES = (move_data, replace, swap, share, copy_entries)


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@pytest.mark.parametrize("kwargs", RULES, ids=lambda kwargs: kwargs["mars_type"])
def test_state_that_is_moved_is_the_state(kwargs, move, mode):
    """Whoever moves it, as offload helpers do, and however often, changes nothing."""
    ends = []
    for moves in (False, True):
        params = parameters()
        optimizer = build(params, mode, lr=LR, **kwargs)
        for seed in range(4):
            run(optimizer, params, [seed])
            if moves:
                move(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        ends.append((copies(params), saved["state"]))
    (want, want_state), (got, got_state) = ends
    equal(want, got)
    for number, entry in want_state.items():
        for key, value in entry.items():
            torch.testing.assert_close(got_state[number][key], value, rtol=0, atol=0)


def test_whoever_holds_a_tensor_of_the_state_sees_later_steps(mode):
    params = parameters()
    optimizer = build(params, mode, lr=LR)
    run(optimizer, params, [0])
    moments = [optimizer.state[p]["exp_avg"] for p in params]
    steps = [optimizer.state[p]["step"] for p in params]
    move_data(optimizer)
    run(optimizer, params, range(1, 3))
    for p, moment, step in zip(params, moments, steps, strict=True):
        assert optimizer.state[p]["exp_avg"] is moment
        assert optimizer.state[p]["step"] is step
        assert float(step) == 3


def test_state_in_shared_memory_stays_there(mode):
    """As A3C shares it between processes: who looks in there sees the steps."""
    params = parameters()
    optimizer = build(params, mode, lr=LR)
    share(optimizer)
    views = [
        (p, key, value.view_as(value))
        for p in params
        for key, value in optimizer.state[p].items()
        if value.numel()
    ]
    run(optimizer, params, range(2))
    for p, key, view in views:
        assert optimizer.state[p][key].is_shared()
        torch.testing.assert_close(optimizer.state[p][key], view, rtol=0, atol=0)


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_moment_that_is_replaced_is_taken(number, mode):
    """Of any parameter of a stack, as in torch's AdamW."""
    moments = []
    for make in (
        torch.optim.AdamW,
        lambda p, **kw: build(p, mode, mars_type="adamw", **kw),
    ):
        params = parameters()
        optimizer = make(params, lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
        run(optimizer, params, range(2))
        optimizer.state[params[number]]["exp_avg"] = torch.full(SHAPES[number], -0.5)
        run(optimizer, params, [2])
        moments.append(
            [optimizer.state[params[number]]["exp_avg"].clone(), *copies(params)]
        )
    equal(*moments, 1e-6)


@pytest.mark.parametrize("key", ["exp_avg", "last_grad"])
def test_state_that_does_not_fit_is_refused_by_name(key, mode):
    params = parameters()
    optimizer = build([{"params": [(f"w{i}", p) for i, p in enumerate(params)]}], mode)
    run(optimizer, params, [0])
    before, kept = copies(params), optimizer.state[params[2]][key]
    for wrong in (torch.zeros(5, 7), torch.zeros(20), 0.0):
        optimizer.state[params[2]][key] = wrong
        fill(params, 1)
        with pytest.raises(ValueError, match=rf"state '{key}' of parameter 'w2'"):
            optimizer.step()
        equal(params, before)
    optimizer.state[params[2]][key] = kept
    run(optimizer, params, [1])
    assert all(float(optimizer.state[p]["step"]) == 2 for p in params)


def test_a_parameter_that_grows_with_its_state(mode):
    """As points are added to a scene: all of it longer, zeros at the end."""
    params = parameters((4, 3), (4, 3))
    optimizer = build(params, mode, lr=LR)
    run(optimizer, params, range(2))
    old, new = (
        params[1],
        nn.Parameter(torch.cat([params[1].detach(), torch.ones(2, 3)])),
    )
    entry = optimizer.state.pop(old)
    for key in ("exp_avg", "exp_avg_sq", "last_grad"):
        entry[key] = torch.cat([entry[key], torch.zeros(2, 3)])
    optimizer.state[new] = entry
    optimizer.param_groups[0]["params"][1] = params[1] = new
    moment = entry["exp_avg"].clone()
    run(optimizer, params, [2])
    assert float(optimizer.state[new]["step"]) == 3
    beta1 = optimizer.param_groups[0]["betas"][0]
    assert not torch.equal(optimizer.state[new]["exp_avg"][:4], moment[:4])
    assert (optimizer.state[new]["exp_avg"][:4] - beta1 * moment[:4]).abs().max() < 0.2


# ---- groups that are exchanged -------------------------------------------------------


def control(steps_of, **kwargs):
    """Parameters and step counts of torch's AdamW and of MARS's, under ``steps_of``."""
    ends = []
    for make in (torch.optim.AdamW, lambda g, **kw: MARS(g, mars_type="adamw", **kw)):
        params = parameters()
        groups = [
            {"params": params[:2]},
            {"params": params[2:4]},
            {"params": params[4:]},
        ]
        extra = kwargs if make is not torch.optim.AdamW else {}
        optimizer = make(groups, lr=LR, betas=(0.9, 0.99), weight_decay=0.0, **extra)
        steps_of(optimizer, params)
        ends.append((params, [float(optimizer.state[p]["step"]) for p in params]))
    return ends


@pytest.mark.parametrize("kwargs", [dict(compile=False), dict(compile=True)], ids=str)
def test_a_list_of_groups_that_is_replaced_is_read(kwargs):
    """Stepped group by group, as DeepSpeed's ZeRO does; with its own learning rate."""

    def steps_of(optimizer, params):
        for seed in range(3):
            every = optimizer.param_groups
            for i, group in enumerate(every):
                group["lr"] = LR * (seed + 1) / (i + 1)
                optimizer.param_groups = [group]
                run(optimizer, params, [10 * seed + i])
                optimizer.param_groups = every

    (want, steps), (got, same) = control(steps_of, **kwargs)
    assert steps == same == [3.0] * 6
    equal(want, got, 1e-6)


def test_a_group_that_comes_back_has_its_state(mode):
    def steps_of(optimizer, params):
        run(optimizer, params, range(2))
        aside = optimizer.param_groups.pop(1)
        run(optimizer, params, [2])
        optimizer.param_groups.append(aside)
        run(optimizer, params, [3])

    (want, steps), (got, same) = control(steps_of, compile=mode != "eager")
    assert steps == same == [4, 4, 3, 3, 4, 4]
    equal(want, got, 1e-6)


def test_a_parameter_that_changes_its_group_keeps_its_state(mode):
    params = parameters()
    optimizer = build([{"params": params[:3]}, {"params": params[3:]}], mode, lr=LR)
    run(optimizer, params, range(2))
    p, (first, second) = params[0], optimizer.param_groups
    moment = optimizer.state[p]["exp_avg"].clone()
    second["params"].append(first["params"].pop(0))
    second["betas"] = (1 - 1e-9, 0.99)  # which keep the moment as it is
    run(optimizer, params, [2])
    assert float(optimizer.state[p]["step"]) == 3
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], moment)


# ---- state that is loaded ------------------------------------------------------------


def test_a_parameter_without_an_entry_starts_anew(mode):
    params, others = parameters(), parameters()
    optimizer, other = (build(p, mode, lr=LR) for p in (params, others))
    run(optimizer, params, range(2))
    run(other, others, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1], saved["state"][4]
    other.load_state_dict(saved)
    assert [float(other.state[p]["step"]) for p in others] == [2, 0, 2, 2, 0, 2]
    assert not other.state[others[4]]["last_grad"].any()
    equal([other.state[others[5]]["exp_avg"]], [optimizer.state[params[5]]["exp_avg"]])
    del saved["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match="without .'exp_avg'. of parameter 0"):
        other.load_state_dict(saved)


def named(order):
    torch.manual_seed(1)
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in order})
    groups = marsopt.param_groups(model, "moonlight", lr=LR)
    return model, MARS(groups, compile=False)


def test_state_goes_to_the_parameter_of_its_name(caplog):
    model, optimizer = named("abc")
    for seed in range(2):
        fill(list(model.parameters()), seed)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other, resumed = named("cab")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        resumed.load_state_dict(saved)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().endswith("restored 15 tensors, and restarted 0")
    for name, p in model.named_parameters():
        q = other.get_parameter(name)
        equal(optimizer.state[p].values(), resumed.state[q].values())
    for group in resumed.param_groups:
        for name, q in zip(group["param_names"], group["params"], strict=True):
            assert q is other.get_parameter(name)


# ---- sharded -------------------------------------------------------------------------


def moved_model(rank, world):
    """Exchanged by swap_tensors, between two steps: rules, and exact MARS."""
    mesh = init_device_mesh("cpu", (world,))
    for kwargs in (*RULES[:4], dict(mars_type="mars-m", correction="exact")):
        ends = []
        for moves in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
            fully_shard(model)
            optimizer = MARS(
                model.parameters(),
                lr=LR,
                collectives=MeshCollectives(mesh),
                compile=False,
                **kwargs,
            )
            for seed in range(4):
                if moves and seed % 2:
                    model._apply(lambda x: x.clone())
                for takes in (optimizer.update_previous_grad, optimizer.step):
                    optimizer.zero_grad()
                    torch.manual_seed(10 * seed + rank)
                    model(torch.randn(3, 6)).square().mean().backward()
                    takes()
                optimizer.update_last_grad()
            ends.append([p.full_tensor().detach() for p in model.parameters()])
        equal(*ends)
    return True


@pytest.mark.processes
def test_a_sharded_model_may_be_moved_between_steps():
    assert all(spawn(moved_model, 2))


# ---- compiled ------------------------------------------------------------------------


def test_state_that_is_moved_compiles_nothing_again(monkeypatch):
    params = parameters()
    optimizer = build(params, forced(monkeypatch, "stacks"), lr=LR)
    for seed in range(2):
        fill(params, seed)
        optimizer.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for move in MOVES[:3]:
            move(optimizer)
            fill(params, 2)
            optimizer.step()


# ---- many groups ---------------------------------------------------------------------


def test_groups_are_added_in_linear_time():
    """A group costs no more where 800 are there than where 100 are, but for noise."""

    def seconds(num):
        groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(num)]
        start = time.perf_counter()
        MARS(groups, compile=False)
        return time.perf_counter() - start

    seconds(10)
    few = min(seconds(100) for _ in range(3))
    assert seconds(800) < 3 * 8 * few
