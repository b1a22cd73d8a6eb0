"""Whose memory is it? The library moves no tensor; and what the user has put into
groups, parameters and state is what the next step takes: no value is dropped or stale.
"""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import marsopt
from marsopt import MARS, REGISTRY
from marsopt.parallel import MeshCollectives
from tests.processes import spawn
from tests.stacking import (
    build,
    check_storages,
    copies,
    equal,
    fill,
    forced,
    parameters,
    run,
)

SHAPES = ((5, 4), (4,), (5, 4), (4,), (5, 4), (3, 6))
LR = 0.02
RULES = (
    dict(mars_type="mars-adamw"),
    dict(mars_type="mars-m", ns_dtype=torch.float32, max_norm=0.5),
    dict(mars_type="soap"),
)


def tensors(optimizer):
    return [
        (entry, key, value)
        for entry in optimizer.state.values()
        for key, value in entry.items()
    ]


# ---- nothing moves -------------------------------------------------------------------


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_every_tensor_has_memory_of_its_own_and_stays(mars_type, mode):
    """Over construction, steps, what others keep in the state, a new group, a load."""
    params = parameters(*SHAPES)
    where = [p.data_ptr() for p in params]
    optimizer = build(params, mode, lr=LR, mars_type=mars_type)
    held = [value for _, _, value in tensors(optimizer)]
    where += [value.data_ptr() for value in held]
    check_storages([*params, *held])
    run(optimizer, params, [0])
    optimizer.state[params[0]]["mine"] = torch.zeros(1)
    run(optimizer, params, [1])
    optimizer.add_param_group({"params": parameters((3,), (5, 4), seed=1)})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, [2])
    del optimizer.state[params[0]]["mine"]
    now = [value for _, _, value in tensors(optimizer)]
    assert all(a is b for a, b in zip(held, now, strict=False))
    assert [x.data_ptr() for x in (*params, *held)] == where
    check_storages([*params, *now])


def test_a_graph_of_before_the_step_notices_it(mode):
    params = parameters(*SHAPES)
    optimizer = build(params, mode, lr=LR)
    loss = (params[0] * params[2]).sum()
    run(optimizer, params, [0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- state that is moved -------------------------------------------------------------


def move_data(optimizer):
    for _, _, value in tensors(optimizer):
        value.data = value.data.clone()


def replace(optimizer):
    for entry, key, value in tensors(optimizer):
        entry[key] = value.clone()


def swap(optimizer):
    for _, _, value in tensors(optimizer):
        torch.utils.swap_tensors(value, value.clone())


def add_another(optimizer):
    for p, entry in optimizer.state.items():
        entry["mine"] = p.detach().clone()


def leave_and_return(optimizer, message, leave, come_back):
    """As trainers that generate between their steps move the state to the host; here
    the meta device, or none, is in the host's place. Its memory is freed, and no step
    is taken meanwhile.
    """
    kept = [(entry, key, value.clone()) for entry, key, value in tensors(optimizer)]
    local = optimizer.describe().binding.collectives.local
    memory = [
        StorageWeakRef(local(value).untyped_storage())
        for *_, value in tensors(optimizer)
        if value.ndim
    ]
    for entry, key, _ in kept:
        leave(entry, key)
    optimizer.zero_grad()
    assert all(storage.expired() for storage in memory)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    for entry, key, copied in kept:
        come_back(entry, key, copied)


def by_to(optimizer):
    """verl's loop, and prime-rl's: state[p][key] = value.to(...)."""
    leave_and_return(
        optimizer,
        "on meta as state .* on cpu, .*: move all state back before a step",
        lambda entry, key: entry.update({key: entry[key].to("meta")}),
        lambda entry, key, copied: entry.update({key: copied}),
    )


def by_data(optimizer):
    """miles's loop: value.data = ..."""

    def assign(entry, key, data=None):
        entry[key].data = torch.empty(0) if data is None else data

    message = r"got a tensor of shape \(0,\) on cpu as state"
    leave_and_return(optimizer, message, assign, assign)


MOVES = (move_data, replace, swap, by_to, by_data)


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@pytest.mark.parametrize("kwargs", RULES, ids=lambda kwargs: kwargs["mars_type"])
def test_state_that_is_moved_is_the_state(kwargs, move, mode):
    """Whoever moves it, as offload helpers do, and however often, changes nothing; and
    a tensor that was moved in place is the one that steps go on with.
    """
    ends = []
    for moves in (False, True):
        params = parameters(*SHAPES)
        optimizer = build(params, mode, lr=LR, **kwargs)
        for seed in range(4):
            run(optimizer, params, [seed])
            held = None  # nobody else holds the state
            if moves:
                move(optimizer)
            held = [value for _, _, value in tensors(optimizer)]
        run(optimizer, params, [4])
        now = [value for _, _, value in tensors(optimizer)]
        assert all(a is b for a, b in zip(held, now, strict=True))
        ends.append([*copies(params), *now])
    equal(*ends)


def test_a_moment_that_is_replaced_is_taken(mode):
    """As in torch's AdamW."""
    ends = []
    own = dict(lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    for make in (torch.optim.AdamW, partial(build, mode=mode, mars_type="adamw")):
        params = parameters(*SHAPES)
        optimizer = make(params, **own)
        run(optimizer, params, range(2))
        optimizer.state[params[3]]["exp_avg"] = torch.full(SHAPES[3], -0.5)
        run(optimizer, params, [2])
        ends.append([optimizer.state[params[3]]["exp_avg"], *params])
    equal(*ends, 1e-6)


def test_state_that_is_cleared_starts_anew(mode):
    params = parameters(*SHAPES)
    optimizer = build(params, mode, lr=LR)
    for clear, steps in (
        (optimizer.state[params[2]].clear, [2, 1, 2]),
        (optimizer.state.clear, [1, 1, 1]),
    ):
        run(optimizer, params, [0])
        clear()
        run(optimizer, params, [1])
        found = [float(optimizer.state[params[i]]["step"]) for i in (0, 2, 4)]
        assert found == steps


@pytest.mark.parametrize("key", ["exp_avg", "last_grad"])
def test_state_that_does_not_fit_is_refused_by_name(key, mode):
    params = parameters(*SHAPES)
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


@pytest.mark.parametrize("mars_type, key", [("soap", "row_basis"), ("normuon", "row_")])
def test_state_of_owners_on_another_device_is_refused(mars_type, key, mode):
    params = parameters((5, 4))
    optimizer = build(params, mode, mars_type=mars_type)
    run(optimizer, params, [0])
    for entry, name, value in tensors(optimizer):
        entry[name] = value.to("meta") if name.startswith(key) else value
    with pytest.raises(ValueError, match=f"on meta as state '{key}"):
        optimizer.step()


# ---- groups that are exchanged -------------------------------------------------------


def group_by_group(optimizer, params):
    """As DeepSpeed's ZeRO steps, each group with its own learning rate."""
    for seed in range(3):
        every = optimizer.param_groups
        for i, group in enumerate(every):
            group["lr"] = LR * (seed + 1) / (i + 1)
            optimizer.param_groups = [group]
            run(optimizer, params, [10 * seed + i])
            optimizer.param_groups = every


def in_another_order(optimizer, params):
    run(optimizer, params, range(2))
    optimizer.param_groups.reverse()
    run(optimizer, params, range(2, 4))


@pytest.mark.parametrize(
    ("steps_of", "num_steps"),
    [
        (group_by_group, [3] * 6),
        (in_another_order, [4] * 6),
    ],
)
def test_a_list_of_groups_that_changes_is_read_as_by_adamw(steps_of, num_steps, mode):
    ends = []
    for make in (torch.optim.AdamW, partial(build, mode=mode, mars_type="adamw")):
        params = parameters(*SHAPES)
        groups = [{"params": params[i : i + 2]} for i in (0, 2, 4)]
        optimizer = make(groups, lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
        steps_of(optimizer, params)
        assert [float(optimizer.state[p]["step"]) for p in params] == num_steps
        ends.append(params)
    equal(*ends, 1e-6)


# ---- state that is loaded ------------------------------------------------------------


def test_a_parameter_without_an_entry_starts_anew(mode):
    params, others = parameters(*SHAPES), parameters(*SHAPES)
    optimizer, other = (build(p, mode, lr=LR) for p in (params, others))
    run(optimizer, params, range(2))
    run(other, others, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    for number in (1, 4):
        del saved["state"][listed.index(id(params[number]))]
    other.load_state_dict(saved)
    assert [float(other.state[p]["step"]) for p in others] == [2, 0, 2, 2, 0, 2]
    assert not other.state[others[4]]["last_grad"].any()
    equal([other.state[others[5]]["exp_avg"]], [optimizer.state[params[5]]["exp_avg"]])


def named(order):
    torch.manual_seed(1)
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in order})
    groups = marsopt.param_groups(model, "moonlight", lr=LR)
    return model, MARS(groups, compile=False)


def test_state_goes_to_the_parameter_of_its_name(caplog):
    model, optimizer = named("abc")
    run(optimizer, list(model.parameters()), range(2))
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
    """Exchanged by swap_tensors between two steps; its state is away for a while."""
    mesh = init_device_mesh("cpu", (world,))
    for kwargs in (RULES[2], dict(mars_type="mars-m", correction="exact")):
        ends = []
        for moves in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
            fully_shard(model)
            own = dict(collectives=MeshCollectives(mesh), compile=False) | kwargs
            optimizer = MARS(model.parameters(), lr=LR, **own)
            for seed in range(4):
                if moves and seed % 2:
                    model._apply(lambda x: x.clone())
                    by_to(optimizer)
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


def test_state_that_is_moved_compiles_nothing_again(monkeypatch, of_dynamo):
    params = parameters(*SHAPES)
    optimizer = build(params, forced(monkeypatch, "flat"), lr=LR)
    for seed in range(2):
        fill(params, seed)
        optimizer.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for move in (move_data, replace, swap, add_another, by_to, by_data):
            move(optimizer)
            fill(params, 2)
            optimizer.step()
