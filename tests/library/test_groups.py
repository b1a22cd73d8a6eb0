"""Param groups mean what they say, and a rule has one set of defaults by both doors."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import marsopt
from marsopt import MARS, REGISTRY
from tests.stacking import equal, parameters, run

MATRIX, VECTOR = (6, 4), (5,)
ELEMENTWISE = [n for n, rule in REGISTRY.items() if rule.fallback == "itself"]
ROUTED = [n for n in REGISTRY if n not in ELEMENTWISE]


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


def halving(optimizer):
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_what_a_group_gives_holds_for_vectors(mars_type):
    """The decay and no-decay groups of nanoGPT's and Hugging Face's scripts, and a rate
    per group, which a scheduler scales.
    """
    (matrix,), (vector,), (twin,) = map(parameters, (MATRIX, VECTOR, VECTOR))
    own = {"weight_decay": 0.3, "lr": 1e-3, "betas": (0.8, 0.9)}
    optimizer = mars(
        [{"params": [matrix]}, {"params": [vector], **own}],
        lr=0.02,
        mars_type=mars_type,
    )
    alone = mover_of_vectors(mars_type, twin, **own)
    walk(optimizer, [vector], scheduler=halving(optimizer))
    walk(alone, [twin], scheduler=halving(alone))
    equal([vector], [twin], 1e-7)


def row(group):
    """Rule, learning rate, betas, decay and shapes of a param group."""
    numbers = group["lr"] * group["lr_ratio"], group["betas"], group["weight_decay"]
    return group["mars_type"], *numbers, [tuple(p.shape) for p in group["params"]]


AUTHORS, OWN = ("mars-adamw", 0.1, (0.95, 0.99), 0.0), ("adamw", 3e-3, (0.9, 0.95), 0.1)
SAID = {"lr": 0.2, "betas": (0.5, 0.6), "weight_decay": 0.7}
FOR_VECTORS = dict(lr_1d=0.02, betas_1d=(0.7, 0.8), weight_decay_1d=0.25)


@pytest.mark.parametrize(
    ("given", "options", "want"),
    [
        ({}, {}, [AUTHORS, OWN]),
        ({}, FOR_VECTORS, [AUTHORS, ("adamw", 0.02, (0.7, 0.8), 0.25)]),
        (SAID, {}, [("mars-adamw", *SAID.values()), ("adamw", *SAID.values())]),
        (
            SAID,
            FOR_VECTORS,
            [("mars-adamw", *SAID.values()), ("adamw", *SAID.values())],
        ),
        (
            SAID | FOR_VECTORS,
            {},
            [("mars-adamw", *SAID.values()), ("adamw", 0.02, (0.7, 0.8), 0.25)],
        ),
        ({}, dict(base_lr=0.3), [AUTHORS, ("adamw", 3e-3 / 3, (0.9, 0.95), 0.1)]),
        ({}, dict(optimize_1d=True), [AUTHORS]),
        ({}, dict(mars_type="adamw"), [("adamw", 0.1, (0.9, 0.999), 0.01)]),
        (
            {},
            dict(mars_type="lion", lr_1d=0.05),
            [("lion", 0.1, (0.9, 0.99), 0.0), ("lion", 0.05, (0.9, 0.99), 0.0)],
        ),
        (
            {},
            dict(mars_type="mars-m", optimize_1d=True),
            [("mars-m", *AUTHORS[1:]), ("mars-adamw", *AUTHORS[1:])],
        ),
        (
            {},
            dict(mars_type="moonlight", log_time=8),
            [("moonlight", 0.1, (0.999,) * 2, 0.1), ("adamw", 0.1, (0.999,) * 2, 0.1)],
        ),
    ],
)
def test_a_given_group_becomes_one_for_each_algorithm(given, options, want):
    """By the constructor and add_param_group; of the one kind, it makes one group."""
    for shapes in ([VECTOR, MATRIX, VECTOR, MATRIX], [MATRIX], [VECTOR], []):
        kinds = [[s for s in shapes if s == MATRIX], [s for s in shapes if s == VECTOR]]
        if len(want) == 1:
            kinds = [shapes]
        elif not shapes:
            kinds = [[]]
        rows = [(*w, k) for w, k in zip(want, kinds, strict=False) if k or not shapes]
        params = parameters(*shapes)
        first = parameters(MATRIX)
        optimizer = mars(first, lr=0.1, **options)
        num = len(optimizer.param_groups)
        optimizer.add_param_group({"params": params, "mine": 3, **given})
        found = optimizer.param_groups[num:]
        assert [row(group)[-1] for group in found] == [r[-1] for r in rows]
        assert [row(group)[0] for group in found] == [r[0] for r in rows]
        for group, expected in zip(found, rows, strict=True):
            assert row(group)[1] == pytest.approx(expected[1])
            assert row(group)[2:4] == expected[2:4]
            assert group["mine"] == 3
        keys = set().union(*found)
        assert not keys & {"base_lr", "optimize_1d", *FOR_VECTORS, "nesterov_1d"}


def test_names_stay_with_their_tensors():
    named_params = [(f"p{i}", p) for i, p in enumerate(parameters(VECTOR, MATRIX))]
    matrices, rest = mars(named_params).param_groups
    assert (matrices["param_names"], rest["param_names"]) == (["p1"], ["p0"])


@pytest.mark.parametrize("key", ["lr_1d", "betas_1d", "base_lr", "optimize_1d"])
def test_a_value_for_vectors_that_is_written_later_is_an_error(key):
    params = parameters(MATRIX, VECTOR)
    optimizer = mars(params)
    optimizer.param_groups[0][key] = None
    with pytest.raises(ValueError, match=f"{key}.* where a group is added"):
        walk(optimizer, params, 1)


def test_a_matrix_rule_in_a_group_of_vectors_is_an_error():
    params = parameters(MATRIX, VECTOR)
    optimizer = mars(params)
    optimizer.param_groups[1]["mars_type"] = "moonlight"
    with pytest.raises(ValueError, match="parameter 0 of group 1 of shape .5,."):
        walk(optimizer, params, 1)


SCHEDULES = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda t: 1 / (1 + t)),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9),
    "warm restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
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
    for t in range(6):
        if schedule is None:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + t)
        (group,) = alone.param_groups
        group["lr"] = 0.2 * float(optimizer.param_groups[1]["lr"])
        group["betas"] = optimizer.param_groups[1]["betas"]
        walk(optimizer, [matrix, vector], 1)
        twin.grad = vector.grad.clone()
        alone.step()
        if schedule is not None:
            schedule.step()
    torch.testing.assert_close(vector, twin, rtol=0, atol=1e-6)
    assert isinstance(optimizer.param_groups[1]["lr"], torch.Tensor) == tensor or (
        schedule is None
    )


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


@pytest.mark.parametrize("written", ["mars_m", "MARS-M", "Mars_M"])
def test_names_are_understood_as_they_are_written_elsewhere(written):
    (p,) = parameters(MATRIX)
    assert mars([p], mars_type=written).param_groups[0]["mars_type"] == "mars-m"
    assert str(marsopt.mars(mars_type=written).matrix) == "mars-m"


def test_nesterov_is_an_option_of_rules_that_have_one():
    (a,), (b,) = parameters(MATRIX), parameters(MATRIX)
    one = mars([a], mars_type="adamw", nesterov=True, lr=0.1)
    two = mars([b], mars_type="nadamw", lr=0.1)
    walk(one, [a]), walk(two, [b])
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    with pytest.raises(ValueError, match="got nesterov=True with mars_type='lion'"):
        mars([a], mars_type="lion", nesterov=True)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "muon", "normuon", "lion"])
def test_a_cautious_optimizer_is_so_beside_the_rule_unless_a_group_says_no(mars_type):
    def cautious(optimizer):
        groups = optimizer.param_groups
        return [group.get("cautious_weight_decay", False) for group in groups]

    options = dict(lr_1d=1e-3, mars_type=mars_type)
    whole = mars(parameters(MATRIX, VECTOR), cautious_weight_decay=True, **options)
    assert cautious(whole) == [True, True]  # the matrix, and the vector beside it
    assert cautious(mars(parameters(MATRIX, VECTOR), **options)) == [False, False]
    (a,), (b,) = parameters(MATRIX), parameters(VECTOR)
    no = dict(params=[b], mars_type="adamw", cautious_weight_decay=False)
    groups = [dict(params=[a]), no]
    own = mars(groups, cautious_weight_decay=True, mars_type=mars_type)
    assert cautious(own) == [True, False]


def test_a_cautious_optimizer_goes_on_from_a_state_that_lacks_the_option():
    params = parameters(MATRIX, VECTOR)
    plain = mars(params)
    walk(plain, params)
    saved = plain.state_dict()
    assert "cautious_weight_decay" not in saved["param_groups"][0]
    again = mars(params, cautious_weight_decay=True)
    again.load_state_dict(saved)
    walk(again, params)
    assert again.param_groups[0]["cautious_weight_decay"]


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_a_rate_of_zero_is_no_base_rate(zero):
    with pytest.raises(ValueError, match="got lr=0 with .* a base learning rate"):
        mars(parameters(VECTOR), lr=zero)
    mars(parameters(MATRIX), lr=zero)
    mars(parameters(VECTOR), lr=zero, mars_type="moonlight")
    mars([{"params": parameters(VECTOR), "base_lr": 0.1, "lr_1d": 0.2}], lr=zero)


def test_containers_and_keys_that_torch_takes():
    optimizer = mars(nn.ParameterList(parameters(VECTOR)))
    optimizer.add_param_group({"params": parameters(VECTOR), 7: "somebody's"})
    assert len(optimizer.param_groups) == 2


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
    ("key", "value", "kind", "message"),
    [
        ("weight_deacy", 0.5, TypeError, "did you mean 'weight_decay' for 'weight_de"),
        ("momentum", 0.5, TypeError, "did you mean 'betas' for 'momentum'"),
        ("beta1", 0.5, TypeError, "did you mean 'betas' for 'beta1'"),
        ("wd", 0.5, TypeError, "did you mean 'weight_decay' for 'wd'"),
        ("mars_type", "sgd", ValueError, "got mars_type='sgd'"),
        ("betas_1d", (2.0, 0.5), ValueError, "betas_1d"),
        ("maximize", True, ValueError, "got maximize=True .*negate the loss"),
        ("max_norm", 0.5, ValueError, "max_norm.* in a param group"),
        ("is_approx", False, ValueError, r"got \['is_approx'\] in a param group"),
    ],
)
def test_a_key_of_a_new_group_is_refused(key, value, kind, message, door):
    with pytest.raises(kind, match=message):
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
    assert later("weight_deacy", 0.5).param_groups[0]["weight_deacy"] == 0.5
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
