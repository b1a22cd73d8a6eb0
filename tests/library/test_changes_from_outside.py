"""MARS whose groups and parameters change from outside: by any door, to any value."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import marsopt
from marsopt import MARS
from marsopt.optim.groups import configuration
from tests.stacking import build, copies, equal, fill, parameters, run

LR = 0.01
eager = partial(build, mode="eager")


def twins(*shapes):
    return parameters(*shapes), parameters(*shapes)


def keys(optimizer, p):
    return set(optimizer.state[p]) - {"step"}


# ---- state and groups changed from outside -------------------------------------------


def test_a_detour_through_another_rule_leaves_no_stale_state():
    (p,) = params = parameters((4, 4))
    optimizer = eager(params, lr=LR)
    run(optimizer, params, range(2))
    optimizer.param_groups[0]["mars_type"] = "adamw"
    run(optimizer, params, range(2, 4))
    assert keys(optimizer, p) == {"exp_avg", "exp_avg_sq"}
    optimizer.param_groups[0]["mars_type"] = "mars-adamw"
    optimizer.state_dict()
    p.grad = torch.full_like(p, float("nan"))
    optimizer.step()  # is skipped
    assert not optimizer.state[p]["last_grad"].any()


def test_a_parameter_taken_out_of_its_group_stays():
    params = parameters((3, 3), (2, 2))
    optimizer = eager(params, lr=LR)
    run(optimizer, params, [0])
    del optimizer.param_groups[0]["params"][1]
    del optimizer.state[params[1]]
    before = params[1].detach().clone()
    run(optimizer, params, [1])
    equal(params[1:], [before])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [*optimizer.state_dict()["state"]] == [0]


def test_a_refused_rate_leaves_no_other_group_behind():
    params = parameters((3,), (3,))
    groups = [{"params": [p]} for p in params]
    optimizer = eager(groups, mars_type="adamw", lr=LR, weight_decay=0.0)
    run(optimizer, params, [0])
    first, second = optimizer.param_groups
    first["lr"], second["lr"] = 0.0, -1.0
    with pytest.raises(ValueError, match="lr=-1.0"):
        optimizer.step()
    second["lr"] = LR
    before = copies(params)
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[1], before[1])


def test_betas_that_change_in_place_are_followed(mode):
    a, b = twins((3, 3), (3,))
    for params, late in ((a, False), (b, True)):
        optimizer = build(params, mode, lr=LR)
        group = optimizer.param_groups[0]
        group["betas"] = [0.95, 0.99]
        run(optimizer, params, [0])
        if late:
            group["betas"][0] = 0.5
        else:
            group["betas"] = (0.5, 0.99)
        run(optimizer, params, [1])
    equal(a, b)


def test_a_parameter_may_be_cast_and_not_resized(mode):
    """Between steps; others of its shape stay as they are."""
    params = parameters((6, 4), (6, 4), (6, 4))
    optimizer = build(params, mode, lr=LR)
    run(optimizer, params, [0])
    before = copies(params)
    optimizer.zero_grad()
    params[2].data = params[2].data.bfloat16()
    run(optimizer, params[2:], [1])
    dtypes = [torch.float32, torch.float32, torch.bfloat16]
    assert [p.dtype for p in params] == dtypes
    equal(params[:2], before[:2])
    params[2].data = torch.zeros(7, 4)
    optimizer.zero_grad()
    said = r"parameter 2 of group 0, expected .* \(7, 4\)"
    with pytest.raises(ValueError, match=said):
        run(optimizer, params[:2], [2])


# ---- options that reach where they should --------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r, x: r.init({**x, "c": torch.zeros(2)}), r"got state.m .*\['c'\]"),
        (lambda r, x: r.init({"a": torch.zeros(3)}), r"of shape \(3,\)"),
        (lambda r, x: marsopt.rule("muon").init([torch.ones(2, 2)]), "state.m in a"),
    ],
    ids=["more leaves", "another shape", "another rule"],
)  # fmt: skip
def test_a_foreign_state_is_refused(make, message):
    rule, x = marsopt.rule("lion"), {"a": torch.zeros(2)}
    with pytest.raises(ValueError, match=message):
        rule.step(x, x, make(rule, x), lr=LR)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2],
    ids=str,
)
def test_parameters_narrower_than_two_bytes_are_refused(dtype):
    p = torch.empty(4, 4, dtype=torch.uint8).view(dtype).requires_grad_()
    for make in (MARS, marsopt.rule("adamw").init, marsopt.FlatGroup.pack):
        with pytest.raises(ValueError, match=f"{dtype}, expected.*16 bits or more.*: "):
            make([p])


# ---- what nobody moves ---------------------------------------------------------------

KINDS = {
    "int8": lambda: torch.arange(6, dtype=torch.int8).view(2, 3),
    "packed": lambda: torch.arange(6, dtype=torch.uint8)[:, None],
    "float8": lambda: torch.ones(2, 3).to(torch.float8_e5m2),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex64),
    "float64": lambda: torch.ones(2, 3, dtype=torch.float64),  # wider than the state
    "meta": lambda: torch.ones(2, 3, device="meta"),
    "subclass": lambda: TwoTensor(torch.ones(2, 3), torch.ones(2, 3)),
}


def frozen(kind):
    return nn.Parameter(KINDS[kind](), requires_grad=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_parameter_may_be_anything(kind):
    """First in the list, in a group of its own, and beside what is trained, which moves
    as it does alone.
    """
    a, b = twins((4, 3), (3,))
    options = dict(lr=LR, mars_type="moonlight", max_norm=1.0, splits=2)
    options |= dict(state_dtype=torch.float32)
    alone = eager(a, **options)
    still = [frozen(kind) for _ in range(3)]
    groups = [{"params": still[:1]}, {"params": [still[1], *b]}]
    optimizer = eager(groups, **options)
    optimizer.add_param_group({"params": still[2:]})
    run(alone, a, range(2))
    run(optimizer, b, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    assert len(saved["state"]) == 2
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    for one, params in ((alone, a), (optimizer, b)):
        run(one, params, [2])
    equal(a, b)
    assert float(optimizer.grad_norm) == float(alone.grad_norm)
    if kind != "meta":
        for p in still:
            raw = [
                x.a if kind == "subclass" else x.detach() for x in (p, KINDS[kind]())
            ]
            assert torch.equal(*(x.contiguous().view(torch.uint8) for x in raw))


@pytest.mark.parametrize("kind", ["float8", "complex", "float64", "meta", "subclass"])
def test_what_thaws_and_cannot_be_moved_is_refused_before_anything_is(kind):
    params = parameters((2, 3))
    late = frozen(kind)
    named = [("late", late), ("adapter", params[0])]
    optimizer = eager(named, lr=LR, state_dtype=torch.float32)
    run(optimizer, params, [0])
    before = params[0].detach().clone()
    late.requires_grad_(True)
    fill(params, 1)
    with pytest.raises(ValueError, match="parameter 'late'"):
        optimizer.step()
    assert torch.equal(params[0], before)
    late.requires_grad_(False)
    optimizer.step()
    assert not torch.equal(params[0], before)


def test_a_subclass_that_is_no_dtensor_has_words_of_its_own():
    wrapped, rule = nn.Parameter(KINDS["subclass"]()), marsopt.rule("adamw")
    bare = wrapped.detach()
    for make, name in (
        (lambda: eager([("w", wrapped)]), "parameter 'w'"),
        (lambda: rule.step([bare], [bare], rule.init([bare]), lr=LR), ""),
    ):
        with pytest.raises(ValueError, match=f"{name}.*TwoTensor.*freeze it") as error:
            make()
        assert "MeshCollectives" not in str(error.value)


# ---- live values out of their range --------------------------------------------------


NO_NUMBERS = [
    (10**400, "got {}=a whole number of 1329 bits"),
    (torch.tensor(0.5j), r"got {} of shape \(\) and torch.complex64"),
    (torch.tensor(True), r"got {} of shape \(\) and torch.bool"),
    (torch.ones(1, 1), r"got {} of shape \(1, 1\)"),
    (torch.tensor([1.0, 2.0]), r"got {}=\(tensor\(1"),
    (torch.tensor(float("nan")), "got {}=nan"),
    (np.array([0.5]), r"got {}=\(0.5,\)"),
    (np.float32("inf"), "got {}=inf"),
]
NO_PAIRS = {0.5, 0.75}, "0.9", 0.9, np.ones(3), torch.ones(1)
REFUSED = [("lr", *row) for row in NO_NUMBERS]
REFUSED += [("betas", value, "got {}=(?=.*expected a pair)") for value in NO_PAIRS]
REFUSED += [
    ("lr", np.True_, "got lr=True"),
    ("betas", (0.9, 2.0), r"got betas\[1\]=2.0"),
    ("clip", 0.0, "got clip=0.0"),
]


@pytest.mark.parametrize(
    ("key", "value", "message"), REFUSED, ids=[m.format(k) for k, _, m in REFUSED]
)
def test_the_words_of_a_refusal(key, value, message):
    """By one door: test_hyperparameters.py goes through all of them."""
    with pytest.raises(ValueError, match=message.format(key) + ".*expected.*: "):
        eager(parameters((2, 2), (2,)), **{key: value})


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("key", ["lr", "lr_ratio", "weight_decay", "gamma"])
def test_none_stands_for_no_default_in_a_complete_group(key, is_loaded):
    params = parameters((2, 2), (2,))
    optimizer, before = eager(params), copies(params)
    if is_loaded:
        saved = optimizer.state_dict()
        saved["param_groups"][0][key] = None
    else:
        optimizer.param_groups[0][key] = None
    with pytest.raises(ValueError, match=f"got {key}=None"):
        optimizer.load_state_dict(saved) if is_loaded else run(optimizer, params, [0])
    equal(params, before)


PAIRS = [
    [0.75, np.float64(0.5)],
    np.array([0.75, 0.5], dtype=np.float32),
    torch.tensor([0.75, 0.5]),
    (torch.tensor(0.75), np.array(0.5)),
]
SCALARS = [np.float32, np.array, torch.tensor]


def plain_values(optimizer):
    """Whether all in a checkpoint's groups is of Python and torch."""
    every = [v for g in optimizer.state_dict()["param_groups"] for v in g.values()]
    flat = [e for v in every for e in (v if isinstance(v, tuple | list) else [v])]
    known = (float, int, bool, str, type(None), torch.Tensor)
    return all(type(v) in known for v in flat)


@pytest.mark.parametrize("betas", PAIRS, ids=lambda pair: type(pair).__name__)
def test_betas_are_any_sequence_of_two(betas):
    ends = []
    for door in ("plain", "constructor", "group", "set", "loaded"):
        params = parameters((2, 2), (2,))
        pair = {"betas": (0.75, 0.5) if door == "plain" else betas}
        of_class = pair if door in ("plain", "constructor") else {}
        of_group = pair if door == "group" else {}
        optimizer = eager([{"params": params, **of_group}], lr=0.5, **of_class)
        (group,) = optimizer.param_groups
        if door != "group":  # which says it for everything in it
            group["betas_1d"] = pair["betas"]
        if door == "set":
            group |= pair
        if door == "loaded":
            saved = optimizer.state_dict()
            saved["param_groups"][0] |= pair
            optimizer.load_state_dict(saved)
        run(optimizer, params, range(2))
        assert plain_values(optimizer)
        ends.append(params)
        equal(params, ends[0])
    for make in (partial(marsopt.rule, "adamw"), marsopt.AdamW, marsopt.mars):
        made = make(betas=betas)
        rule = made.matrix.preconditioner if isinstance(made, marsopt.Rule) else made
        assert [float(b) for b in rule.betas] == [0.75, 0.5]


@pytest.mark.parametrize("wrap", SCALARS)
def test_numbers_of_numpy_are_numbers(wrap):
    a, b = twins((2, 2), (2,))
    numbers = dict(lr=0.5, eps=0.25, weight_decay=0.125, gamma=0.5, lr_1d=0.25)
    numbers |= dict(clip=2.0, max_norm=4.0, base_lr=1.0)
    foreign = {name: wrap(value) for name, value in numbers.items()}
    optimizer, twin = eager(a, **foreign), eager(b, **numbers)
    for t in range(3):
        optimizer.param_groups[0]["lr"] = wrap(0.5 / 2**t)
        twin.param_groups[0]["lr"] = 0.5 / 2**t
        run(optimizer, a, [t])
        run(twin, b, [t])
    equal(a, b)
    assert plain_values(optimizer)
    whole = eager(parameters((4, 2)), mars_type="muon", splits=np.int64(2))
    assert type(whole.param_groups[0]["splits"]) is int

    x = [torch.ones(2, 2), torch.ones(2)]
    numbers.pop("lr")
    found = []
    for kind, own in ((wrap, {n: foreign[n] for n in numbers}), (float, numbers)):
        rule = marsopt.mars(**own)
        step = rule.step(x, x, rule.init(x), lr=kind(0.5), gamma=kind(0.25))
        found.append(step[0])
        assert all(type(p) is torch.Tensor for p in step[0])
    equal(*found)


def test_a_nan_that_comes_into_a_tensor_is_found_on_a_cpu():
    lr, params = torch.tensor(LR), parameters((2, 2), (2,))
    optimizer = eager(params, lr=lr, lr_1d=LR)
    run(optimizer, params, [0])
    before = copy.deepcopy(params)
    lr.fill_(float("nan"))
    with pytest.raises(ValueError, match="got lr=nan"):
        run(optimizer, params, [0])
    equal(params, before)
    lr.fill_(LR)
    run(optimizer, params, [0])


def test_a_nan_that_nobody_can_read_voids_the_step(monkeypatch):
    """As on a GPU: no sync, and nothing changes but the count."""
    monkeypatch.setattr(marsopt.rules.checks, "can_read", lambda value: False)
    lr, params = torch.tensor(float("nan")), parameters((2, 2), (2,))
    group = {"params": params, "base_lr": LR}
    optimizer = eager([group], lr=lr, lr_1d=LR)
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    run(optimizer, params, range(2))
    equal(params, before[0])
    for i, entry in optimizer.state_dict()["state"].items():
        equal(entry.values(), before[1][i].values())
    assert optimizer.num_skipped == 2
    again = eager([{"params": params, "base_lr": LR}], lr=lr, nonfinite="raise")
    with pytest.raises(FloatingPointError, match="got a learning rate in a tensor"):
        run(again, params, [0])


def test_a_compiled_step_looks_where_the_rate_has_become_a_tensor(
    monkeypatch, of_dynamo
):
    """And looks no more where it is a number again."""
    monkeypatch.setattr(marsopt.rules.checks, "can_read", lambda value: False)
    a, b = twins((2, 2), (2, 2))
    optimizer, twin = MARS(a, lr=LR, compile=True), eager(b, lr=LR)
    for rate in (LR, torch.tensor(LR), torch.tensor(float("nan")), LR):
        for each, mine in ((optimizer, a), (twin, b)):
            each.param_groups[0]["lr"] = rate
            run(each, mine, range(2))
        equal(a, b, atol=1e-6)
    assert optimizer.num_skipped == twin.num_skipped == 2


def test_a_learning_rate_that_is_not_finite_in_a_compiled_loop():
    rule, x = marsopt.rule("mars-adamw"), {"w": torch.ones(2, 2)}
    step = torch.compile(rule.step, fullgraph=True, backend="eager")
    for value in (float("nan"), float("inf")):
        moved, state = step(x, x, rule.init(x), lr=torch.tensor(value))
        assert int(state.skipped) == 1 and int(state.t.sum()) == 0
        equal(moved.values(), x.values())
    by_rate = torch.vmap(lambda lr: rule.step(x, x, rule.init(x), lr=lr))
    moved, state = by_rate(torch.tensor([0.0, float("nan"), float("inf")]))
    assert moved["w"].eq(1.0).all() and state.skipped.tolist() == [0, 1, 1]


@pytest.mark.parametrize("mars_type", ["mars-adamw", "moonlight", "soap"])
@pytest.mark.parametrize("shape", [(3, 2), (3,)], ids=["matrix", "vector"])
def test_a_step_and_its_state_are_under_vmap(mars_type, shape):
    """States hold no None, which is no leaf that vmap takes."""
    rule = marsopt.mars(mars_type=mars_type, ns_dtype=torch.float32)
    x, g = {"w": torch.ones(shape)}, torch.randn(2, *shape)

    def step(g, state):
        return rule.step(x, {"w": g}, state, lr=0.1, count=0)

    moved, state = torch.vmap(lambda g: step(g, rule.init(x)))(g)
    again, _ = torch.vmap(step)(g, state)
    for i in range(2):
        alone, after = step(g[i], rule.init(x))
        equal([moved["w"][i]], alone.values(), 1e-6)
        equal([again["w"][i]], step(g[i], after)[0].values(), 1e-6)


def test_ranks_do_not_compare_tensors_by_their_text():
    """Which on a GPU has the number of the rank's device."""
    texts = set()
    for decay in (torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), 0.1):
        optimizer = eager(parameters((2, 2)), lr=0.1, weight_decay=decay)
        texts.add(
            str(configuration(optimizer.param_groups, dict(inherited={"lr": decay})))
        )
    assert len(texts) == 2 and all("dtype=" not in text for text in texts)


def test_a_group_lacks_what_it_needs():
    with pytest.raises(
        ValueError, match=r"got a param group of \['lr'\], expected 'pa"
    ):
        eager([{"lr": 0.5}])
    for key, message in (("lr", "got lr=None"), ("mars_type", "expected 'mars_type'")):
        params = parameters((2, 2))
        optimizer = eager(params)
        del optimizer.param_groups[0][key]
        with pytest.raises(ValueError, match=message):
            run(optimizer, params, [0])


@pytest.mark.parametrize(
    ("rule", "name", "plain"),
    [
        ("nadamw", "nesterov", "adamw"),
        ("soap-muon", "orthogonalize", "soap"),
        ("mars-soap-muon", "orthogonalize", "mars-soap"),
    ],
)
def test_what_a_rule_is_named_for_is_not_switched_off(rule, name, plain):
    def live():
        params = parameters((2, 2))
        optimizer = eager(params, mars_type=rule)
        optimizer.param_groups[0][name] = False
        run(optimizer, params, [0])

    for door in (
        live,
        lambda: marsopt.rule(rule, **{name: False}),
        lambda: marsopt.mars(mars_type=rule, **{name: False}),
        lambda: eager(parameters((2, 2)), mars_type=rule, **{name: False}),
        lambda: eager([{"params": parameters((2, 2)), "mars_type": rule, name: False}]),
    ):
        with pytest.raises(ValueError, match=f"got {name}=False .*mars_type='{plain}'"):
            door()
