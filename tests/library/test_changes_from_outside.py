"""MARS whose groups or state change from outside, and exact mode's protocol."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import marsopt
from marsopt import MARS
from marsopt.optim.groups import configuration
from tests.library.test_optimizer import (
    LR,
    SHAPES,
    eager,
    equal,
    fill,
    parameters,
    run,
    twins,
)

pytestmark = pytest.mark.usefixtures("both_layouts")


def keys(optimizer, p):
    return set(optimizer.state[p]) - {"step"}


# ---- loading into another structure (defect 6) ---------------------------------------


@pytest.mark.parametrize(
    ("saved", "into"),
    [
        (dict(mars_type="mars-adamw"), dict(mars_type="mars-lion")),
        (dict(mars_type="mars-lion"), dict(mars_type="mars-adamw")),
        (dict(amsgrad=True), dict(amsgrad=False)),
        (dict(mars_type="mars-m"), dict(mars_type="mars-m", clip=None)),
    ],
    ids=["wider", "narrower", "amsgrad", "clip"],
)
def test_a_state_dict_brings_its_structure_and_loses_nothing(saved, into):
    """6: what the saved hyperparameters need is loaded, not made anew as zeros."""
    a, b = twins(*SHAPES)
    optimizer, other = eager(a, lr=LR, **saved), eager(b, lr=0.5, **into)
    run(optimizer, a, 3)
    for p, q in zip(a, b, strict=True):
        q.data.copy_(p.data)
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(a, b, strict=True):
        assert keys(optimizer, p) == keys(other, q)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, other.state[q][key])
    run(optimizer, a, 2, 3)
    run(other, b, 2, 3)
    equal(a, b)


def test_a_refused_load_changes_nothing():
    a, b = twins((3, 3), (3,))
    optimizer, theirs = eager(a, lr=LR), torch.optim.SGD(b, lr=0.7, momentum=0.9)
    run(optimizer, a, 2)
    fill(b, 0)
    theirs.step()
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(before)
    bad["param_groups"][0]["lr"] = -1.0
    for state_dict, message in ((theirs.state_dict(), "groups"), (bad, "lr=-1.0")):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for i, entry in before["state"].items():
            assert all(torch.equal(v, after["state"][i][k]) for k, v in entry.items())
    run(optimizer, a, 1)


def test_torch_adamw_state_is_taken_over():
    """A plain AdamW may be continued by mars_type="adamw"."""
    a, b = twins((3, 4), (4,))
    theirs = torch.optim.AdamW(a, lr=LR, betas=(0.9, 0.99), weight_decay=0.1)
    for t in range(3):
        fill(a, t)
        theirs.step()
    for p, q in zip(a, b, strict=True):
        q.data.copy_(p.data)
    ours = eager(b, mars_type="adamw")
    ours.load_state_dict(theirs.state_dict())
    for t in range(3, 6):
        fill(a, t)
        theirs.step()
    run(ours, b, 3, 3)
    equal(a, b, 1e-7)


def test_frozen_parameters_keep_loaded_state_in_its_dtype():
    a, b = twins((3, 3), (2, 2))
    for p in (*a, *b):
        p.data = p.data.bfloat16()
    kw = dict(lr=LR, state_dtype=torch.float32)
    optimizer = eager(a, **kw)
    run(optimizer, a, 2)
    b[1].requires_grad_(False)
    other = eager(b, **kw)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[b[1]]["exp_avg"].dtype == torch.float32
    assert torch.equal(other.state[b[1]]["exp_avg"], optimizer.state[a[1]]["exp_avg"])


def test_a_shape_mismatch_is_refused():
    saved = eager(parameters((3, 3), (2, 2))).state_dict()
    with pytest.raises(ValueError, match=r"got exp_avg of shape \(3, 3\)"):
        eager(parameters((2, 2), (3, 3))).load_state_dict(saved)


# ---- state and groups changed from outside -------------------------------------------


def test_a_detour_through_another_rule_leaves_no_stale_state():
    (p,) = params = parameters((4, 4))
    optimizer = eager(params, lr=LR)
    run(optimizer, params, 2)
    optimizer.param_groups[0]["mars_type"] = "adamw"
    run(optimizer, params, 2, 2)
    assert keys(optimizer, p) == {"exp_avg", "exp_avg_sq"}
    optimizer.param_groups[0]["mars_type"] = "mars-adamw"
    optimizer.state_dict()
    fill(params, 9, scale=float("nan"))
    optimizer.step()  # is skipped
    assert not optimizer.state[p]["last_grad"].any()


def test_the_one_buffer_form_has_a_name_of_its_own():
    (p,) = params = parameters((4, 4))
    optimizer = eager(params, lr=LR, mars_type="mars-lion", clip=None)
    assert keys(optimizer, p) == {"grad_avg"}
    run(optimizer, params, 2)
    optimizer.param_groups[0]["clip"] = 1.0
    run(optimizer, params, 1, 2)
    assert keys(optimizer, p) == {"exp_avg", "last_grad"}


def test_a_parameter_taken_out_of_its_group_stays():
    params = parameters((3, 3), (2, 2))
    optimizer = eager(params, lr=LR)
    run(optimizer, params, 1)
    del optimizer.param_groups[0]["params"][1]
    before = params[1].detach().clone()
    run(optimizer, params, 1, 1)
    equal(params[1:], [before])


def test_replaced_and_cleared_state_is_seen():
    (p,) = params = parameters((3, 3))
    optimizer = eager(params, lr=LR)
    run(optimizer, params, 1)
    optimizer.state[p]["exp_avg"] = torch.full_like(p, 7.0)
    run(optimizer, params, 1, 1)
    assert float(optimizer.state[p]["exp_avg"].mean()) == pytest.approx(6.65, abs=0.1)
    optimizer.state.clear()
    run(optimizer, params, 1)
    assert float(optimizer.state[p]["step"]) == 1


def test_empty_groups_and_all_frozen():
    params = parameters((3, 3), (3,))
    optimizer = eager([{"params": []}, {"params": params}, {"params": []}], lr=LR)
    run(optimizer, params, 1)
    for p in params:
        p.requires_grad_(False)
        p.grad = None
    eager(params).step()


def test_an_optimizer_without_parameters_waits_for_some():
    optimizer = eager([{"params": []}], lr=LR)  # ZeRO leaves such ranks
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.grad_norm is None
    params = parameters((3, 3))
    before = params[0].detach().clone()
    optimizer.add_param_group({"params": params})
    run(optimizer, params, 1)
    assert not torch.equal(params[0], before)


def test_an_empty_matrix_is_no_obstacle():
    params = parameters((3, 0), (4, 4))
    run(eager(params, lr=LR, mars_type="mars-shampoo"), params, 2)


def test_pickle_keeps_what_was_skipped():
    params = parameters((3, 3))
    optimizer = eager(params, lr=LR)
    fill(params, 0)
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    other = pickle.loads(pickle.dumps(optimizer))
    assert other.num_skipped == 1
    run(other, other.param_groups[0]["params"], 1)


# ---- no sync -------------------------------------------------------------------------


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-shampoo"])
def test_the_class_step_has_no_host_sync(mars_type):
    """3: under FakeTensorMode, reading a value on the host raises."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(4))]
        # construction may read; a first layout over fake steps cannot be made
        optimizer = eager(params, lr=LR, mars_type=mars_type, max_norm=1.0)
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.step()
        optimizer.step()


# ---- options that reach where they should --------------------------------------------


def test_newton_schulz_options_reach_the_step():
    outcomes = []
    for kw in ({}, {"ns_steps": 2}, {"ns_coefficients": "polar_express"}):
        torch.manual_seed(0)
        params = parameters((4, 6))
        run(
            eager(params, lr=LR, mars_type="muon", ns_dtype=torch.float32, **kw),
            params,
            1,
        )
        outcomes.append(params[0].detach())
    assert not torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])


def test_gamma_of_a_step_overrides_the_rules():
    x, g = [torch.randn(4, 4)], [torch.randn(4, 4)]
    one = marsopt.rule("mars-adamw", gamma=0.3)
    two = marsopt.rule("mars-adamw", gamma=0.025)
    _, state = one.step(x, g, one.init(x), lr=LR)
    g = [torch.randn(4, 4)]
    a, _ = one.step(x, g, state, lr=LR)
    b, _ = two.step(x, g, state, lr=LR, gamma=0.3)
    c, _ = two.step(x, g, state, lr=LR)
    assert torch.equal(a[0], b[0])
    assert not torch.equal(a[0], c[0])


def test_state_dtype_reaches_the_rest_and_nesterov_matters():
    rule = marsopt.mars(state_dtype=torch.float64)
    state = rule.init([torch.zeros(2, 2), torch.zeros(2)])
    assert state.rest.m[1].dtype == torch.float64
    x, g = [torch.randn(4, 6)], [torch.randn(4, 6)]
    found = []
    for nesterov in (True, False):
        muon = marsopt.rule("muon", nesterov=nesterov)
        y, state = muon.step(x, g, muon.init(x), lr=LR)
        found.append(muon.step(y, [torch.ones(4, 6)], state, lr=LR)[0][0])
    assert not torch.equal(*found)


def test_state_is_matched_by_name():
    rule = marsopt.rule("lion")
    x = {"a": torch.zeros(2), "b": torch.zeros(2)}
    _, state = rule.step(
        x, {"a": torch.ones(2), "b": 5 * torch.ones(2)}, rule.init(x), lr=0
    )
    turned = {"b": x["b"], "a": x["a"]}
    zeros = {"b": torch.zeros(2), "a": torch.zeros(2)}
    _, state = rule.step(turned, zeros, state, lr=0)
    assert float(state.m["b"][0]) == pytest.approx(5 * float(state.m["a"][0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r, x: r.init({**x, "c": torch.zeros(2)}), "got state.m for"),
        (lambda r, x: r.init({"a": torch.zeros(3)}), r"of shape \(3,\)"),
        (lambda r, x: marsopt.rule("muon").init([torch.ones(2, 2)]), "got state.m for"),
    ],
    ids=["more leaves", "another shape", "another rule"],
)  # fmt: skip
def test_a_foreign_state_is_refused(make, message):
    rule, x = marsopt.rule("lion"), {"a": torch.zeros(2)}
    with pytest.raises(ValueError, match=message):
        rule.step(x, x, make(rule, x), lr=LR)


# ---- exact mode (defects 1 and 4) ----------------------------------------------------


def test_exact_mode_does_not_alias_the_next_gradient():
    """1: the gradient that was handed over may be overwritten at once."""
    a, b = twins((4, 3))
    fresh, reused = (eager(p, lr=LR, is_approx=False) for p in (a, b))
    b[0].grad = torch.zeros_like(b[0])
    for t in range(3):
        for seed, call in ((50 + t, "update_previous_grad"), (t, "step")):
            fill(a, seed)
            getattr(fresh, call)()
            b[0].grad.copy_(a[0].grad)  # the same storage, again and again
            getattr(reused, call)()
        fresh.update_last_grad()
        reused.update_last_grad()
    equal(a, b)


def test_exact_mode_without_its_protocol_is_an_error():
    params = parameters((3, 3))
    optimizer = eager(params, is_approx=False)
    fill(params, 0)
    with pytest.raises(RuntimeError, match="expected the protocol"):
        optimizer.step()
    run(optimizer, params, 2)
    optimizer.step()  # h was handed over: the last step needs no next batch
    with pytest.raises(RuntimeError, match="expected the protocol"):
        optimizer.step()


def test_exact_mode_without_update_last_grad_is_an_error():
    """h would stay 0 for ever."""
    params = parameters((3, 3))
    optimizer = eager(params, is_approx=False)
    for again in ("update_previous_grad", "step"):
        run(optimizer, params, 1)
        fill(params, 1)
        optimizer.update_previous_grad()
        optimizer.update_previous_grad()  # another batch, before the step: as you like
        fill(params, 2)
        optimizer.step()
        before = [p.detach().clone() for p in params]
        with pytest.raises(RuntimeError, match="update_last_grad"):
            getattr(optimizer, again)()
        equal(params, before)
        optimizer.update_last_grad()
        fill(params, 3)
        optimizer.update_previous_grad()
        optimizer.step()
        optimizer.update_last_grad()


def test_exact_mode_around_a_new_group():
    first, second = parameters((3, 3)), parameters((2, 2))
    optimizer = eager(first, lr=LR, is_approx=False)
    fill(first, 0)
    optimizer.update_previous_grad()
    optimizer.add_param_group({"params": second})
    fill(first + second, 1)
    optimizer.step()
    optimizer.update_last_grad()
    assert not optimizer.state[second[0]]["last_grad"].any()


def test_loading_forgets_what_was_kept():
    params = parameters((3, 3))
    optimizer = eager(params, lr=LR, is_approx=False)
    run(optimizer, params, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    fill(params, 5)
    optimizer.update_previous_grad()
    optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="nothing kept"):
        optimizer.update_last_grad()


def test_exact_mode_under_a_grad_scaler():
    """4: the scaler unscales once per step, and the kept gradient by its own factor."""
    (a,), (b,) = twins((4, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = eager([a], lr=LR, is_approx=False, max_norm=0.5)
    plain = eager([b], lr=LR, is_approx=False, max_norm=0.5)

    def gradient(p, seed, scale):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        p.grad = None
        scale((p * x).sum()).backward()

    for t in range(3):
        gradient(a, 50 + t, scaler.scale)
        scaled.update_previous_grad(grad_scale=scaler.get_scale())
        gradient(a, t, scaler.scale)
        scaler.step(scaled)
        scaler.update()
        scaled.update_last_grad()
        gradient(b, 50 + t, lambda loss: loss)
        plain.update_previous_grad()
        gradient(b, t, lambda loss: loss)
        plain.step()
        plain.update_last_grad()
    equal([a], [b], 1e-6)


# ---- inference mode and narrow dtypes ------------------------------------------------


@pytest.mark.parametrize("correction", ["approximate", "exact"])
def test_under_inference_mode_an_optimizer_is_built_and_loaded_as_outside(correction):
    a, b = twins(*SHAPES)
    kw = dict(lr=LR, correction=correction)
    one = eager(a[:1], **kw)
    one.add_param_group(dict(params=a[1:]))
    run(one, a, 2)
    with torch.inference_mode():
        two = eager(b[:1], **kw)
        two.add_param_group(dict(params=b[1:]))
        two.load_state_dict(copy.deepcopy(one.state_dict()))
    with torch.no_grad():
        for p, q in zip(a, b, strict=True):
            q.copy_(p)
    run(two, b, 1, start=2)
    state = [v for entry in two.state.values() for v in entry.values()]
    assert not any(v.is_inference() for v in state)


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


@pytest.mark.parametrize("mars_type", ["mars-adamw", "moonlight"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_parameter_may_be_anything(kind, mars_type):
    """First in the list, in a group of its own, and beside what is trained, which moves
    as it does alone.
    """
    a, b = twins((4, 3), (3,))
    options = dict(lr=LR, mars_type=mars_type, max_norm=1.0, splits=2)
    options |= dict(state_dtype=torch.float32)
    alone = eager(a, **options)
    still = [frozen(kind) for _ in range(3)]
    groups = [{"params": still[:1]}, {"params": [still[1], *b]}]
    optimizer = eager(groups, **options)
    optimizer.add_param_group({"params": still[2:]})
    run(alone, a, 2)
    run(optimizer, b, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    assert len(saved["state"]) == 2
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    for one, params in ((alone, a), (optimizer, b)):
        run(one, params, 1, 2)
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
    run(optimizer, params, 1)
    before = params[0].detach().clone()
    late.requires_grad_(True)
    fill(params, 1)
    with pytest.raises(ValueError, match="parameter 'late'"):
        optimizer.step()
    assert torch.equal(params[0], before)
    late.requires_grad_(False)
    optimizer.step()
    assert not torch.equal(params[0], before)


def test_frozen_parameters_may_share_memory_until_both_are_moved():
    memory = torch.ones(4, 3)
    a, b = (nn.Parameter(memory[i : i + 3], requires_grad=False) for i in (0, 1))
    params = parameters((2, 2))
    optimizer = eager([a, b, *params], lr=LR)
    run(optimizer, params, 1)
    a.requires_grad_(True)
    run(optimizer, [a, *params], 1)
    b.requires_grad_(True)
    with pytest.raises(ValueError, match="parameter 0 of group 0 and parameter 1"):
        run(optimizer, [a, b, *params], 1)


def test_an_optimizer_of_frozen_parameters_waits_for_one(monkeypatch):
    """For its device, and to ask whether it can compile there."""
    asked = []
    monkeypatch.setattr(
        "marsopt.optim.base.resolve_compile",
        lambda wanted, device: asked.append(device),
    )
    (p,) = parameters((2, 2))
    p.requires_grad_(False)
    optimizer = MARS([frozen("meta"), p], lr=LR, max_norm=1.0)
    optimizer.step()
    assert optimizer.num_skipped == 0 and not asked
    p.requires_grad_(True)
    before = p.detach().clone()
    run(optimizer, [p], 1)
    assert asked == ["cpu"] and not torch.equal(p, before)


def test_a_subclass_that_is_no_dtensor_has_words_of_its_own():
    wrapped, rule = nn.Parameter(KINDS["subclass"]()), marsopt.rule("adamw")
    for make, name in (
        (lambda: eager([("w", wrapped)]), "parameter 'w'"),
        (lambda: rule.step([wrapped], [wrapped], rule.init([wrapped]), lr=LR), ""),
    ):
        with pytest.raises(ValueError, match=f"{name}.*TwoTensor.*freeze it") as error:
            make()
        assert "MeshCollectives" not in str(error.value)


# ---- live values out of their range --------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("betas", 0.9, "expected a pair"),
        ("weight_decay", None, "got weight_decay=None"),
        ("gamma", None, "got gamma=None"),
        ("lr_ratio", -1.0, "got lr_ratio=-1.0"),
        ("lr", None, "got lr=None"),
        ("lr", torch.tensor([1.0, 2.0]), r"got lr of shape \(2,\)"),
        ("clip", 0.0, "got clip=0.0"),
    ],
)
@pytest.mark.parametrize("mars_type", ["mars-adamw", "adamw"])
def test_values_out_of_range(key, value, message, mars_type):
    params = parameters((2, 2), (2,))
    with pytest.raises(ValueError, match=message):
        eager([{"params": params, key: value}], mars_type=mars_type)
    optimizer = eager(params, mars_type=mars_type)
    optimizer.param_groups[0][key] = value
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=message):
        run(optimizer, params, 1)
    equal(params, before)


NO_NUMBERS = [
    (10**400, "got {}=a whole number of 1329 bits"),
    (-(10**5000), "got {}=a whole number of 16610 bits"),
    (torch.tensor(0.5j), r"got {} of shape \(\) and torch.complex64"),
    (torch.tensor(True), r"got {} of shape \(\) and torch.bool"),
    (torch.ones(1, 1), r"got {} of shape \(1, 1\)"),
    (torch.tensor(float("nan")), "got {}=nan"),
    (np.array([0.5]), r"got {}=\(0.5,\)"),
    (np.float32("inf"), "got {}=inf"),
]

MESSAGES = [message for _, message in NO_NUMBERS]


@pytest.mark.parametrize(("value", "message"), NO_NUMBERS, ids=MESSAGES)
@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay", "gamma", "clip"])
def test_what_is_no_number_is_refused_by_all_doors(key, value, message):
    params, x = parameters((2, 2), (2,)), [torch.ones(2, 2)]

    def live():
        optimizer = eager(params)
        optimizer.param_groups[0][key] = value
        run(optimizer, params, 1)

    def loaded():
        optimizer = eager(params)
        saved = optimizer.state_dict()
        saved["param_groups"][0][key] = value
        optimizer.load_state_dict(saved)

    def stepped():
        rule = marsopt.rule("mars-adamw")
        rule.step(x, x, rule.init(x), **{"lr": LR, key: value})

    pure = stepped if key in ("lr", "gamma") else lambda: marsopt.mars(**{key: value})
    doors = [
        pure,
        live,
        loaded,
        lambda: eager(params, **{key: value}),
        lambda: eager([{"params": params, key: value}]),
    ]
    before = copy.deepcopy(params)
    for door in doors:
        with pytest.raises(ValueError, match=message.format(key) + ".*expected.*: "):
            door()
    equal(params, before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: marsopt.mars(max_norm=10**400),
        lambda: marsopt.rule("muon", ns_eps=10**400),
        lambda: marsopt.Rule(matrix=marsopt.rule("adamw").matrix, rest_ratio=10**400),
        lambda: marsopt.param_groups(nn.Linear(2, 2), lr=10**400),
        lambda: eager(parameters((2, 2)), max_norm=10**400),
        lambda: eager(parameters((2, 2)), betas=(10**400, 0.9)),
    ],
)
def test_numbers_beyond_all_floats(make):
    with pytest.raises(ValueError, match="got .*=a whole number of 1329 bits"):
        make()


def test_truth_of_numpy_is_no_number_and_is_an_option():
    with pytest.raises(ValueError, match="got lr=True, expected a finite number"):
        eager(parameters((2, 2)), lr=np.True_)
    algorithm = marsopt.rule("nadamw", nesterov=np.True_).matrix
    assert algorithm.preconditioner.nesterov is True


class Values(Sequence):
    """Of a configuration: no list, though it prints like one."""

    def __init__(self, *values):
        self.values = values

    def __getitem__(self, i):
        return self.values[i]

    def __len__(self):
        return len(self.values)


PAIRS = [
    Values(0.75, 0.5),
    Values(np.float32(0.75), np.float16(0.5)),
    [0.75, np.float64(0.5)],
    np.array([0.75, 0.5]),
    np.array([0.75, 0.5], dtype=np.float32),
    torch.tensor([0.75, 0.5]),
    (torch.tensor(0.75), np.array(0.5)),
]
SCALARS = [np.float64, np.float32, np.array, torch.tensor]


def plain_values(optimizer):
    """Whether all in a checkpoint's groups is of Python and torch."""
    every = [v for g in optimizer.state_dict()["param_groups"] for v in g.values()]
    flat = [e for v in every for e in (v if isinstance(v, tuple | list) else [v])]
    known = (float, int, bool, str, type(None), torch.Tensor)
    return all(type(v) in known for v in flat)


@pytest.mark.parametrize("betas", PAIRS, ids=lambda pair: type(pair).__name__)
@pytest.mark.parametrize("name", ["betas", "betas_1d"])
@pytest.mark.parametrize("door", ["constructor", "group", "set", "loaded"])
def test_betas_are_any_sequence_of_two(betas, name, door):
    a, b = twins((2, 2), (2,))
    twin = eager(b, lr=0.5, lr_1d=0.25, **{name: (0.75, 0.5)})
    common = dict(lr=0.5, lr_1d=0.25)
    if door == "constructor":
        optimizer = eager(a, **common, **{name: betas})
    elif door == "group":  # which says it for everything in it, unless both are given
        other = {"betas_1d": (0.9, 0.95), "betas": (0.95, 0.99)}
        optimizer = eager([{"params": a, **common, **other, name: betas}], lr=0.5)
    else:
        optimizer = eager(a, **common)
    number = int(name == "betas_1d")  # of the group with the vector
    if door == "loaded":
        saved = optimizer.state_dict()
        saved["param_groups"][number]["betas"] = betas
        optimizer.load_state_dict(saved)
    elif door == "set":
        optimizer.param_groups[number]["betas"] = betas
    for each, mine in ((optimizer, a), (twin, b)):
        run(each, mine, 2)
    equal(a, b)
    assert plain_values(optimizer)


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
        run(optimizer, a, 1, start=t)
        run(twin, b, 1, start=t)
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


@pytest.mark.parametrize("betas", PAIRS, ids=lambda pair: type(pair).__name__)
def test_betas_of_a_rule_are_any_sequence_of_two(betas):
    for make in (partial(marsopt.rule, "adamw"), marsopt.AdamW, marsopt.mars):
        made = make(betas=betas)
        rule = made.matrix.preconditioner if isinstance(made, marsopt.Rule) else made
        assert [float(b) for b in rule.betas] == [0.75, 0.5]
        assert isinstance(rule.betas, tuple | list)


@pytest.mark.parametrize("betas", [{0.5, 0.75}, "0.9", 0.9, np.ones(3), torch.ones(1)])
def test_what_is_no_pair_is_refused(betas):
    for make in (partial(eager, parameters((2, 2))), partial(marsopt.rule, "adamw")):
        with pytest.raises(ValueError, match="got betas=.*, expected a pair"):
            make(betas=betas)


def test_a_nan_that_comes_into_a_tensor_is_found_on_a_cpu():
    lr, params = torch.tensor(LR), parameters((2, 2), (2,))
    optimizer = eager(params, lr=lr, lr_1d=LR)
    run(optimizer, params, 1)
    before = copy.deepcopy(params)
    lr.fill_(float("nan"))
    with pytest.raises(ValueError, match="got lr=nan"):
        run(optimizer, params, 1)
    equal(params, before)
    lr.fill_(LR)
    run(optimizer, params, 1)


def test_a_nan_that_nobody_can_read_voids_the_step(monkeypatch):
    """As on a GPU: no sync, and nothing changes but the count."""
    monkeypatch.setattr(marsopt.rules.checks, "can_read", lambda value: False)
    lr, params = torch.tensor(float("nan")), parameters((2, 2), (2,))
    group = {"params": params, "base_lr": LR}
    optimizer = eager([group], lr=lr, lr_1d=LR)
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    run(optimizer, params, 2)
    equal(params, before[0])
    for i, entry in optimizer.state_dict()["state"].items():
        equal(entry.values(), before[1][i].values())
    assert optimizer.num_skipped == 2
    again = eager([{"params": params, "base_lr": LR}], lr=lr, nonfinite="raise")
    with pytest.raises(FloatingPointError, match="got a learning rate in a tensor"):
        run(again, params, 1)


def test_a_compiled_step_looks_where_the_rate_has_become_a_tensor(monkeypatch):
    """And looks no more where it is a number again."""
    monkeypatch.setattr(marsopt.rules.checks, "can_read", lambda value: False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    a, b = twins((2, 2), (2, 2))
    optimizer, twin = MARS(a, lr=LR, compile=True), eager(b, lr=LR)
    for rate in (LR, torch.tensor(LR), torch.tensor(float("nan")), LR):
        for each, mine in ((optimizer, a), (twin, b)):
            each.param_groups[0]["lr"] = rate
            run(each, mine, 2)
        equal(a, b, atol=1e-6)
    assert optimizer.num_skipped == twin.num_skipped == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_learning_rate_that_is_not_finite_in_a_compiled_loop(value):
    rule, x = marsopt.rule("mars-adamw"), {"w": torch.ones(2, 2)}
    step = torch.compile(rule.step, fullgraph=True, backend="eager")
    moved, state = step(x, x, rule.init(x), lr=torch.tensor(value))
    assert int(state.skipped) == 1 and int(state.t.sum()) == 0
    equal(moved.values(), x.values())
    by_rate = torch.vmap(lambda lr: rule.step(x, x, rule.init(x), lr=lr))
    moved, state = by_rate(torch.tensor([0.0, value]))
    assert moved["w"].eq(1.0).all() and state.skipped.tolist() == [0, 1]


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


def test_a_state_dict_that_is_refused_changes_nothing():
    """That of another rule, too, whose moments ours would have to start with."""
    kw = dict(lr=0.1)
    for kind in (dict(mars_type="lion"), dict(mars_type="adamw"), {"amsgrad": True}):
        kind = {"mars_type": "adamw"} | kw | kind
        params, others = parameters((2, 3)), parameters((2, 3))
        optimizer, other = eager(params, **kind), eager(others, **kw, amsgrad=True)
        run(optimizer, params, 2), run(other, others, 1)
        before = copy.deepcopy(optimizer.state_dict())
        saved = copy.deepcopy(other.state_dict())
        del saved["state"][0]["max_exp_avg_sq"]
        with pytest.raises(ValueError, match="max_exp_avg_sq"):
            optimizer.load_state_dict(saved)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        equal(after["state"][0].values(), before["state"][0].values())


def test_loading_ones_own_state_moves_nothing():
    """Whatever may move into a stack by then."""
    params = [nn.Parameter(torch.randn(3, 3)) for _ in range(16)]
    held = [p.detach() for p in params]
    optimizer = eager(params, lr=0.1, mars_type="moonlight")
    run(optimizer, params, 1)
    before = [p.detach().clone() for p in params]
    del held
    optimizer.load_state_dict(optimizer.state_dict())
    equal(params, before)


def test_a_threshold_in_a_tensor_changes_where_it_is():
    bound = torch.tensor(1.0)
    params = parameters((2, 2))
    optimizer = eager(params, lr=0.1, mars_type="lion", max_norm=bound)
    run(optimizer, params, 1)
    bound.fill_(0.5)
    run(optimizer, params, 1)
    assert float(optimizer.describe().scalars[-1]) == 0.5


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
            run(optimizer, params, 1)


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
        run(optimizer, params, 1)

    for door in (
        live,
        lambda: marsopt.rule(rule, **{name: False}),
        lambda: marsopt.mars(mars_type=rule, **{name: False}),
        lambda: eager(parameters((2, 2)), mars_type=rule, **{name: False}),
        lambda: eager([{"params": parameters((2, 2)), "mars_type": rule, name: False}]),
    ):
        with pytest.raises(ValueError, match=f"got {name}=False .*mars_type='{plain}'"):
            door()


def test_options_of_the_whole_optimizer():
    params = parameters((2, 2))
    with pytest.raises(ValueError, match=r"got \['is_approx'\] in a param group"):
        eager([{"params": params, "is_approx": False}])
    with pytest.raises(ValueError, match=r"got state_dtype=torch\.int64"):
        eager(params, state_dtype=torch.int64)
    with pytest.raises(ValueError, match="got compile='yes'"):
        MARS(params, compile="yes")
    with pytest.raises(ValueError, match="got collectives=None"):
        eager(params, collectives=None)


def test_overflow_of_the_square_is_named():
    params = parameters((2, 2))
    optimizer = eager(params, nonfinite="raise")
    params[0].grad = torch.full_like(params[0], 1e20)
    with pytest.raises(FloatingPointError, match="or whose square overflows"):
        optimizer.step()


def test_a_rule_with_new_debiased_moments_starts_with_its_steps():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = MARS([p], mars_type="lion", lr=1e-2, compile=False)
    for step in range(22):
        if step == 20:
            optimizer.param_groups[0]["mars_type"] = "adamw"
        before = p.detach().clone()
        p.grad = torch.randn(8, 8)
        optimizer.step()
    assert (p - before).abs().max() < 0.05  # it was more than one
    assert float(optimizer.state[p]["step"]) == 2
