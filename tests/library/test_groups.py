"""Param groups mean what they say, and a rule has one set of defaults by both doors."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import marsopt
from marsopt import MARS, REGISTRY
from marsopt.functional.authors import REST
from marsopt.optim.groups import values_of
from tests.stacking import copies, equal, parameters, run

MATRIX, VECTOR = (6, 4), (5,)
ELEMENTWISE = [n for n, rule in REGISTRY.items() if rule.fallback == "itself"]


def walk(optimizer, params, steps=3, scheduler=None):
    for seed in range(steps):
        run(optimizer, params, [seed])
        if scheduler is not None:
            scheduler.step()


def mars(groups, **options):
    return MARS(groups, compile=False, ns_dtype=torch.float32, **options)


def mover_of_vectors(mars_type, vector, **own):
    """Return the rule that moves vectors beside a rule, as an optimizer of one."""
    if mars_type in ELEMENTWISE:
        return mars([vector], mars_type=mars_type, **own)
    epsilon_hat = REGISTRY[mars_type].fallback == "adamw"
    own = {"betas": (0.9, 0.95), **own}
    return mars([vector], mars_type="adamw", epsilon_hat=epsilon_hat, **own)


def moved_by(group, is_matrix):
    """Rule, learning rate, betas and decay of a group's matrices, or of the rest."""
    values = values_of(group, is_matrix)
    rate = pytest.approx(values["lr"] * values.get("lr_ratio", 1.0))
    return values["mars_type"], rate, values["betas"], values["weight_decay"]


AUTHORS, OWN = ("mars-adamw", 0.1, (0.95, 0.99), 0.0), ("adamw", 3e-3, (0.9, 0.95), 0.1)
SAID = {"lr": 0.2, "betas": (0.5, 0.6), "weight_decay": 0.7}
BY_SAID = ("mars-adamw", *SAID.values()), ("adamw", *SAID.values())
FOR_VECTORS = dict(lr_1d=0.02, betas_1d=(0.7, 0.8), weight_decay_1d=0.25)
BY_FOR_VECTORS = ("adamw", 0.02, (0.7, 0.8), 0.25)
ALL = {"lr_1d_ratio", "betas_1d", "weight_decay_1d"}
ADAMW, LION = ("adamw", 0.1, (0.9, 0.999), 0.01), ("lion", 0.1, (0.9, 0.99), 0.0)
GROWN, STARTED = (0.1, (0.999, 0.999), 0.1), {"betas_1d", "nesterov_1d"}
KINDS = [  # given, options, numbers of matrices and of the rest, keys of the rest
    ({}, {}, AUTHORS, OWN, ALL),
    ({}, FOR_VECTORS, AUTHORS, BY_FOR_VECTORS, ALL),
    (SAID, {}, *BY_SAID, set()),
    (SAID, FOR_VECTORS, *BY_SAID, set()),
    (SAID | FOR_VECTORS, {}, BY_SAID[0], BY_FOR_VECTORS, ALL),
    ({}, dict(base_lr=0.3), AUTHORS, ("adamw", 1e-3, *OWN[2:]), ALL),
    ({}, dict(mars_type="adamw"), ADAMW, ADAMW, set()),
]
KINDS += [
    ({}, dict(mars_type=matrices[0]) | options, matrices, rest, keys)
    for matrices, rest, options, keys in (
        (AUTHORS, AUTHORS, dict(optimize_1d=True), {"optimize_1d"}),
        (("mars-m", *AUTHORS[1:]), AUTHORS, dict(optimize_1d=True), {"optimize_1d"}),
        (LION, ("lion", 0.05, *LION[2:]), dict(lr_1d=0.05), {"lr_1d_ratio"}),
        (("moonlight", *GROWN), ("adamw", *GROWN), dict(log_time=8), STARTED),
    )
]


@pytest.mark.parametrize(("given", "options", "matrices", "rest", "keys"), KINDS)
def test_a_given_group_stays_one_group(given, options, matrices, rest, keys):
    """The given dict, with the keys of its other tensors if it has any."""
    for shapes in ([VECTOR, MATRIX, VECTOR, MATRIX], [MATRIX], [VECTOR], []):
        optimizer = mars(parameters(MATRIX), lr=0.1, **options)
        group = {"params": parameters(*shapes), "mine": 3, **given}
        optimizer.add_param_group(group)
        assert optimizer.param_groups[1:] == [group] and group["mine"] == 3
        assert optimizer.param_groups[1] is group
        assert [tuple(p.shape) for p in group["params"]] == shapes
        present = group.keys() & (REST.keys() | FOR_VECTORS.keys())
        assert present == (keys if VECTOR in shapes else set())
        if MATRIX in shapes:
            assert moved_by(group, is_matrix=True) == matrices
        if VECTOR in shapes:
            assert moved_by(group, is_matrix=False) == rest


LISTS = {
    "LambdaLR": partial(
        lr_scheduler.LambdaLR, lr_lambda=[lambda t: 0.5**t, lambda t: 0.1**t]
    ),
    "OneCycleLR": partial(
        lr_scheduler.OneCycleLR, max_lr=[1e-3, 1e-2], total_steps=9, base_momentum=0.9
    ),
    "ReduceLROnPlateau": partial(
        lr_scheduler.ReduceLROnPlateau, factor=1e-3, patience=0, min_lr=[1e-5, 1e-4]
    ),
    "SWALR": partial(SWALR, swa_lr=[1e-4, 1e-3], anneal_epochs=1),
}


@pytest.mark.parametrize("mars_type", ["mars-adamw", "moonlight", "adamw"])
@pytest.mark.parametrize("name", LISTS)
def test_given_groups_are_the_callers(name, mars_type):
    """Lists of a schedule have a value for each of them, names stay, and a learning
    rate of zero that is written into a given dict stops its tensors, as in torch.optim.
    """
    found = []
    for make in (torch.optim.AdamW, partial(mars, mars_type=mars_type)):
        params = parameters(MATRIX, VECTOR, MATRIX, VECTOR)
        backbone = {"params": params[:2], "lr": 1e-3, "name": "backbone"}
        head = {"params": params[2:], "lr": 1e-2, "name": "head"}
        optimizer = make([backbone, head])
        schedule = LISTS[name](optimizer)
        for loss in (1.0, 2.0):
            run(optimizer, params, [0])
            schedule.step(*[loss] * ("Plateau" in name))
        found.append([(g["name"], g["lr"]) for g in optimizer.param_groups])
        before, backbone["lr"] = copies(params), 0.0
        run(optimizer, params, [1])
        equal(params[:2], before[:2])
        assert not any(map(torch.equal, params[2:], before[2:]))
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [mars, marsopt.for_model])
def test_a_parameter_that_is_appended_to_a_named_group_has_no_name(make):
    """It is trained, saved and loaded, as in torch.optim."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    source = model if make is marsopt.for_model else model.named_parameters()
    optimizer = make(source, lr=0.01, **dict(compile=False) if source is model else {})
    params = list(model.parameters())
    run(optimizer, params, [0])
    late = nn.Parameter(torch.zeros(5))
    group = optimizer.param_groups[-1]
    group["params"].append(late)
    run(optimizer, [*params, late], [1])
    assert len(group["param_names"]) == len(group["params"]) - 1
    assert any(name.startswith("group") for name in optimizer.statistics().names)
    assert late.all() and float(optimizer.state[late]["step"]) == 1
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, [*params, late], [2])
    assert float(optimizer.state[late]["step"]) == 2


@pytest.mark.parametrize("key", ["lr_1d", "base_lr"])
def test_a_rate_for_vectors_that_is_written_later_is_an_error(key):
    params = parameters(MATRIX, VECTOR)
    optimizer = mars(params)
    optimizer.param_groups[0][key] = None
    with pytest.raises(ValueError, match=f"{key}.* where a group is added"):
        walk(optimizer, params, 1)


SCHEDULES = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda t: 1 / (1 + t)),
    "nanoGPT": None,
}


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_write_lr_and_the_ratio_stays(name, tensor):
    """Vectors move as in an optimizer of their own at their rate, whose learning rate
    is written in proportion.
    """
    (matrix,), (vector,), (twin,) = map(parameters, (MATRIX, VECTOR, VECTOR))
    options = dict(lr=torch.tensor(0.1) if tensor else 0.1, lr_1d=0.02)
    optimizer = mars([matrix, vector], mars_type="moonlight", **options)
    alone = mover_of_vectors("moonlight", twin, lr=0.1, weight_decay=0.1)
    schedule = SCHEDULES[name] and SCHEDULES[name](optimizer)
    (group,) = optimizer.param_groups
    held = group["lr"]
    for t in range(6):
        if schedule is None:
            group["lr"] = 0.1 / (1 + t)
        alone.param_groups[0]["lr"] = 0.2 * float(group["lr"])
        walk(optimizer, [matrix, vector], 1)
        twin.grad = vector.grad.clone()
        alone.step()
        if schedule is not None:
            schedule.step()
    torch.testing.assert_close(vector, twin, rtol=0, atol=1e-6)
    # a schedule fills a tensor in place
    assert (group["lr"] is held) == (tensor and schedule is not None)


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_the_rate_betas_and_decay_of_vectors_are_never_ignored(mars_type):
    (vector,), (twin,) = parameters(VECTOR), parameters(VECTOR)
    own = dict(lr_1d=0.01, weight_decay_1d=0.2)
    walk(mars([vector], lr=0.5, mars_type=mars_type, **own), [vector])
    walk(mover_of_vectors(mars_type, twin, lr=0.01, weight_decay=0.2), [twin])
    equal([vector], [twin], 1e-7)

    (one,), (two,) = parameters(VECTOR), parameters(VECTOR)
    walk(mars([one], mars_type=mars_type, betas_1d=(0.5, 0.6)), [one], 9)
    walk(mars([two], mars_type=mars_type), [two], 9)
    assert not torch.equal(one, two)


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_a_rule_has_one_set_of_defaults_by_both_doors(mars_type):
    """MARS(mars_type=...) steps as the rule of that name, nothing given to either."""
    (p,) = parameters(MATRIX)
    options = dict(ns_dtype=torch.float32) if REGISTRY[mars_type].matrix_only else {}
    rule, x = marsopt.rule(mars_type, **options), [p.detach().clone()]
    state, optimizer = rule.init(x), mars([p], lr=0.1, mars_type=mars_type)
    for seed in range(4):
        p.grad = torch.randn(MATRIX, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        x, state = rule.step(x, [p.grad], state, lr=0.1)
    torch.testing.assert_close(p.detach(), x[0], rtol=0, atol=1e-6)


def test_groups_of_another_type_have_its_own_defaults():
    a, b = parameters(MATRIX, MATRIX)
    groups = [{"params": [a]}, {"params": [b], "mars_type": "adamw"}]
    first, second = mars(groups, mars_type="mars-m").param_groups
    assert (first["betas"], first["weight_decay"]) == ((0.95, 0.99), 0.0)
    assert (second["betas"], second["weight_decay"]) == ((0.9, 0.999), 0.01)
    groups = [{"params": [a]}, {"params": [b], "mars_type": "adamw"}]
    _, given = mars(groups, mars_type="mars-m", weight_decay=0.3).param_groups
    assert given["weight_decay"] == 0.3  # the constructor has said it


def test_names_are_understood_as_they_are_written_elsewhere():
    (p,) = parameters(MATRIX)
    assert mars([p], mars_type="Mars_M").param_groups[0]["mars_type"] == "mars-m"
    assert str(marsopt.mars(mars_type="mars_m").matrix) == "mars-m"


@pytest.mark.parametrize("mars_type", ["mars-adamw", "muon", "lion"])
def test_a_cautious_optimizer_is_so_beside_the_rule_unless_a_group_says_no(mars_type):
    groups = [dict(params=parameters(MATRIX, VECTOR)) for _ in range(2)]
    groups[1]["cautious_weight_decay"] = False
    for whole, want in ((True, [True] * 2 + [False] * 2), (False, [False] * 4)):
        own = dict(mars_type=mars_type, cautious_weight_decay=whole)
        optimizer = mars([dict(group) for group in groups], **own)
        kinds = [(g, kind) for g in optimizer.param_groups for kind in (True, False)]
        found = [values_of(*k).get("cautious_weight_decay", False) for k in kinds]
        assert found == want


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_a_rate_of_zero_is_no_base_rate(zero):
    with pytest.raises(ValueError, match="got lr=0 with .* a base learning rate"):
        mars(parameters(VECTOR), lr=zero)
    mars(parameters(MATRIX), lr=zero)
    mars(parameters(VECTOR), lr=zero, mars_type="moonlight")
    mars([{"params": parameters(VECTOR), "base_lr": 0.1, "lr_1d": 0.2}], lr=zero)


def test_containers_and_keys_that_torch_takes():
    (late, *more) = parameters(VECTOR, VECTOR, ())
    optimizer = mars(nn.ParameterList(parameters(VECTOR, (), (1, 1))))
    optimizer.add_param_group({"params": late, 7: "somebody's"})
    optimizer.add_param_group({"params": iter(more)})
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = copies(params)
    run(optimizer, params, [0])
    assert len(params) == 6 and not any(map(torch.equal, params, before))


# ---- doors ---------------------------------------------------------------------------


def given(key, value):
    return mars([{"params": parameters(MATRIX), key: value}])


def added(key, value):
    optimizer = mars(parameters(MATRIX))
    optimizer.add_param_group({"params": parameters(MATRIX), key: value})
    return optimizer


def later(key, value):
    """As a tool writes it between steps, or a state dict brings it."""
    params = parameters(MATRIX)
    optimizer = mars(params)
    optimizer.param_groups[0][key] = value
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, [0])
    return optimizer


@pytest.mark.parametrize("door", [given, added])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mars_type", "sgd", "got mars_type='sgd'"),
        ("betas_1d", (2.0, 0.5), "betas_1d"),
        ("maximize", True, "got maximize=True .*negate the loss"),
        ("max_norm", 0.5, "max_norm.* in a param group"),
        ("is_approx", False, r"got \['is_approx'\] in a param group"),
    ],
)
def test_a_key_of_a_new_group_is_refused(key, value, message, door):
    with pytest.raises(ValueError, match=message):
        door(key, value)


def test_a_refused_group_is_not_added():
    params = parameters(MATRIX, VECTOR)
    optimizer, wrong = mars(params), {"params": params[:1], "lr": 0.5}
    num_groups = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="got parameter .*twice, expected once"):
        optimizer.add_param_group(wrong)
    assert len(wrong) == 2 and len(optimizer.param_groups) == num_groups
    optimizer.param_groups[0]["maximize"] = True
    before = copy.deepcopy(params)
    with pytest.raises(ValueError, match="got maximize=True"):
        run(optimizer, params, [0])
    equal(params, before)
    optimizer.param_groups[0]["maximize"] = False
    run(optimizer, params, [0])


OTHERS = dict(initial_lr=1.0, swa_lr=1.0, max_lr=1.0, min_lr=0.0, maximize=False)
OTHERS |= dict(name="head", max_momentum=0.9, fused=True, decoupled_weight_decay=True)
OTHERS |= dict(lr_scale=0.5, differentiable=False, my_key=0.5)


@pytest.mark.parametrize("door", [given, added, later])
def test_keys_of_other_tools_stay_in_groups(door, caplog):
    for key, value in OTHERS.items():
        assert door(key, value).param_groups[-1][key] == value
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
