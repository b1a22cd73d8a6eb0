"""MARS's step, and the authors' defects.

Numbers in test names are rows of the list of defects in docs/fidelity.md.
"""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import marsopt
from marsopt import MARS, REGISTRY
from marsopt.step import graphs
from tests.stacking import (
    build,
    copies,
    equal,
    fill,
    parameters,
    run,
    run_protocol,
    traced,
)
from tests.table import steady

LR = 0.01
SHAPES = ((6, 4), (4,), (3, 5), (2, 3, 2, 2))
eager = partial(build, mode="eager")


def twins(*shapes):
    return parameters(*shapes), parameters(*shapes)


# ---- the authors' interface --------------------------------------------------------


def test_signature_and_defaults_are_the_authors():
    named = inspect.signature(MARS).parameters
    assert len(named) <= 26
    authors = dict(
        lr=3e-3, betas=(0.95, 0.99), eps=1e-8, weight_decay=0.0, amsgrad=False,
        gamma=0.025, is_approx=True, mars_type="mars-adamw", optimize_1d=False,
        lr_1d=3e-3, betas_1d=(0.9, 0.95), weight_decay_1d=0.1,
    )  # fmt: skip
    positional = [n for n, p in named.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["params", *authors]
    optimizer = eager(parameters(*SHAPES))
    (group,) = optimizer.param_groups
    for name, value in authors.items():
        # None in the signature: the rule's own, which are the authors' of their names
        assert named[name].default in (None, value), name
        if name == "lr_1d":
            assert group["lr"] * group["lr_1d_ratio"] == value
        elif name not in ("is_approx", "optimize_1d"):  # of no group
            assert group[name] == value, name
            assert optimizer.defaults.get(name, value) == value, name


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_the_class_is_the_rule(mars_type, both_layouts):
    """Four steps of MARS are four steps of mars(...), with a schedule; of matrices of
    one shape, too, which are one batch on a GPU.
    """
    params = parameters(*SHAPES, (6, 4), (6, 4))
    x = copies(params)
    kw = dict(mars_type=mars_type, weight_decay=0.1, max_norm=0.5)
    kw |= dict(ns_dtype=torch.float32) | steady(mars_type)
    optimizer, rule = eager(params, lr=LR, **kw), marsopt.mars(base_lr=LR, **kw)
    state = rule.init(x)
    for t in range(4):
        for group in optimizer.param_groups:
            group["lr"] = LR / (1 + t)
        fill(params, t)
        optimizer.step()
        x, state = rule.step(x, [p.grad for p in params], state, lr=LR / (1 + t))
        equal(params, x, 1e-6)


# each page once, with its correction or without: of the others dynamo makes the same
# graphs; NorMuon's in test_matrices.py
PAGES = ("nadamw", "soap", "mars-lion", "mars-shampoo", "mars-soap-muon")


# small tensors are compiled as stacks on a CPU too
@pytest.mark.parametrize("both_layouts", ["as-on-a-gpu"], indirect=True)
@pytest.mark.parametrize("mars_type", PAGES)
def test_compiled_is_eager(mars_type, both_layouts):
    """The shipped path: no recompile after the first step, whatever changes."""
    a, b = twins((6, 4), (4,))
    kw = dict(mars_type=mars_type, ns_dtype=torch.float32, max_norm=1.0, lr=LR)
    kw |= steady(mars_type)
    slow, fast = eager(a, **kw), MARS(b, compile=True, **kw)
    for t in range(3):
        for optimizer, params in ((slow, a), (fast, b)):
            fill(params, t)
            optimizer.param_groups[0].update(
                lr=LR / (1 + t), gamma=0.01 * t, weight_decay=0.1 * t
            )
            optimizer.max_norm = 1.0 + t
            with torch.compiler.set_stance("fail_on_recompile" if t else "default"):
                optimizer.step()
        equal(a, b, 1e-6)


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_compiled_steps_take_whatever_is_missing(mars_type):
    """Of tensors of one shape, which may move together: values and state."""
    shapes = (6, 4), (4,), (6, 4), (5, 3), (6, 4), (4,)
    found = []
    for mode in ("eager", "flat"):
        params = parameters(*shapes)
        kw = dict(lr=LR, max_norm=0.7, ns_dtype=torch.float32)
        optimizer = build(params, mode, mars_type=mars_type, **kw)
        run(optimizer, params, range(2))
        for missing in ([2], [0, 2, 4], []):
            fill(params, 2)
            for i in missing:
                params[i].grad = None
            with traced():
                optimizer.step()
        found.append((params, optimizer.state_dict()["state"]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


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


# ---- param groups (defect 2) -------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        dict(lr=0.05),
        dict(betas=(0.8, 0.9)),
        dict(eps=1e-2),
        dict(weight_decay=0.3),
        dict(amsgrad=True),
        dict(gamma=0.2),
        dict(clip=0.1),
        dict(mars_type="mars-lion"),
        dict(optimize_1d=True),
        dict(lr_1d=0.05),
        dict(betas_1d=(0.5, 0.9)),
        dict(weight_decay_1d=0.4),
    ],
    ids=lambda c: next(iter(c)),
)
def test_every_hyperparameter_is_per_group_and_live(change):
    """2: the authors read most of them from the object."""
    plain, set_in_group, changed, set_later = (parameters(*SHAPES) for _ in range(4))
    # what a group gives when it is added holds for vectors too (test_groups.py)
    followed = [n for n in ("lr", "betas", "weight_decay") if n in change]
    everything = change | {f"{n}_1d": change[n] for n in followed}
    optimizers = [
        (eager(plain, lr=3e-3), plain),
        (eager([{"params": set_in_group, **change}], lr=3e-3), set_in_group),
        (eager(changed, **{"lr": 3e-3, **everything}), changed),
    ]
    late = eager(set_later, lr=3e-3)
    (group,) = late.param_groups
    group.update({k: v for k, v in everything.items() if k != "lr_1d"})
    if "lr_1d" in everything:
        group["lr_1d_ratio"] = everything["lr_1d"] / group["lr"]
    optimizers.append((late, set_later))
    for optimizer, params in optimizers:
        run(optimizer, params, range(4))
    equal(set_in_group, changed)
    equal(set_later, changed)
    assert any(not torch.equal(a, b) for a, b in zip(plain, changed, strict=True))


def test_lr_of_zero_at_construction():
    """2: the authors divide by it."""
    params = parameters((3, 3), (3,))
    before = copies(params)
    optimizer = eager(params, lr=0.0, base_lr=0.1)
    run(optimizer, params, [0])
    equal(params, before)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    run(optimizer, params, [1])
    pairs = zip(params, before, strict=True)
    moved = [float((p.detach() - q).abs().max()) for p, q in pairs]
    assert moved[0] > 0.05 and moved[1] < 0.004


# ---- gradients (defects 1, 4, 5) ---------------------------------------------------


def test_a_gradient_may_be_zeroed_in_place(mode):
    """1: the authors alias p.grad, and h is then equal to 0 or g."""
    a, b = twins((4, 4), (4,), (4, 4))
    plain, other = eager(a, lr=LR), build(b, mode, lr=LR)
    for q in b:
        q.grad = torch.zeros_like(q)
    for t in range(4):
        fill(a, t)
        for p, q in zip(a, b, strict=True):
            q.grad.copy_(p.grad)
        with traced():
            plain.step()
            other.step()
        other.zero_grad(set_to_none=False)
    equal(a, b, 1e-7)


def test_parameters_without_gradient_stay_as_they_are():
    """torch.optim's convention; a later gradient starts at step 1."""
    used, idle = parameters((3, 4), (4,)), parameters((2, 5))
    optimizer = eager(used + idle, lr=LR, weight_decay=0.5)
    before = copies(idle)
    run(optimizer, used, range(3))
    equal(idle, before)
    assert float(optimizer.state[idle[0]]["step"]) == 0
    twin = parameters((2, 5))
    alone = eager(twin, lr=LR, weight_decay=0.5)
    fill(used + idle, 9)
    twin[0].grad = idle[0].grad.clone()
    optimizer.step()
    alone.step()
    equal(idle, twin)


def test_a_nan_skips_the_whole_step(mode):
    """5: with the authors one NaN stays in m, v and h for ever. (By every rule, eager:
    test_rules.py.)
    """
    params = parameters((6, 4), (4,), (2, 3, 4), (6, 4))
    options = dict(mars_type="mars-shampoo", matrices="batched")
    optimizer = build(params, mode, lr=LR, **options)
    run(optimizer, params, range(2))
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    fill(params, 9)
    params[0].grad[1, 1] = float("nan")
    with traced():
        optimizer.step()
    after = (params, optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert optimizer.num_skipped == pickle.loads(pickle.dumps(optimizer)).num_skipped
    run(optimizer, params, [3])
    assert optimizer.num_skipped == 1
    assert all(torch.isfinite(p).all() for p in params)


def test_nonfinite_may_raise():
    params = parameters((3, 3), (3,))
    optimizer = eager([("weight", params[0]), ("bias", params[1])], nonfinite="raise")
    fill(params, 0)
    params[1].grad[0] = float("inf")
    before = copies(params)
    with pytest.raises(FloatingPointError, match="in parameter 'bias' .norm 1 of 2."):
        optimizer.step()
    equal(params, before)
    unnamed = eager([{"params": [p]} for p in params], nonfinite="raise")
    with pytest.raises(FloatingPointError, match="parameter 0 of group 1 .norm 1"):
        unnamed.step()
    params[1].grad.fill_(1e20)
    with pytest.raises(FloatingPointError, match="or whose square overflows"):
        unnamed.step()


def test_gradients_are_never_rewritten(mode):
    """And their norm is that of clip_grad_norm_."""
    params = parameters(*SHAPES)
    optimizer = build(params, mode, max_norm=0.1)
    assert optimizer.grad_norm is None
    fill(params, 0)
    before = [p.grad.clone() for p in params]
    with traced():
        optimizer.step()
    equal([p.grad for p in params], before)
    want = torch.nn.utils.get_total_norm(before)
    torch.testing.assert_close(optimizer.grad_norm.float(), want)


def test_max_norm_may_change_between_steps():
    a, b = twins(*SHAPES)
    inside, outside = eager(a, lr=LR), eager(b, lr=LR)
    for t, bound in enumerate((None, 0.5, 0.1, None, torch.tensor(0.2))):
        fill(a, t), fill(b, t)
        inside.max_norm = bound
        if bound is not None:
            torch.nn.utils.clip_grad_norm_(b, float(bound))
        inside.step()
        outside.step()
        equal(a, b, 1e-6)
    with pytest.raises(ValueError, match="got max_norm=-1"):
        inside.max_norm = -1
    assert copy.deepcopy(inside).max_norm == inside.max_norm == pytest.approx(0.2)


# ---- exact MARS (defects 1 and 4, and the authors' protocol) -----------------------


def exact(params, **kwargs):
    return eager(params, lr=LR, is_approx=False, **kwargs)


def protocol(optimizer, params, t, clip=None, reused=False):
    """One step; gradients are clipped from outside, or overwrite one another."""
    for seed, call in ((100 + t, "update_previous_grad"), (t, "step")):
        held = [p.grad for p in params]
        fill(params, seed)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(params, clip)
        if reused and held[0] is not None:
            for p, g in zip(params, held, strict=True):
                p.grad = g.copy_(p.grad)
        getattr(optimizer, call)()
    optimizer.update_last_grad()


@pytest.mark.parametrize(
    "mars_type", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m"]
)
def test_exact_protocol_is_the_exact_rule(mars_type):
    """1: the gradient that was handed over may be overwritten at once."""
    params = parameters(*SHAPES)
    x, h = copies(params), [torch.zeros_like(p) for p in params]
    kw = dict(mars_type=mars_type, is_approx=False, ns_dtype=torch.float32)
    optimizer, rule = eager(params, lr=LR, **kw), marsopt.mars(base_lr=LR, **kw)
    state, shells = rule.init(x), parameters(*SHAPES)
    for t in range(4):
        protocol(optimizer, params, t, reused=True)
        x, state = rule.step(x, [p.grad for p in params], state, lr=LR, reference=h)
        fill(shells, 100 + t)
        h = [p.grad for p in shells]
        equal(params, x, 1e-6)


def test_exact_compiled_is_eager(of_dynamo):
    """h changes places between steps, and no graph minds."""
    a, b = twins(*SHAPES)
    slow, fast = exact(a, max_norm=0.5), exact(b, max_norm=0.5, compile=True)
    for t in range(4):
        with torch.compiler.set_stance("fail_on_recompile" if t else "default"):
            for optimizer, params in ((slow, a), (fast, b)):
                protocol(optimizer, params, t)
        equal(a, b, 1e-6)


def test_exact_keeps_what_half_precision_gradients_become_when_scaled():
    """h is in float32; rounding to bf16 before the clip's factor would show."""
    (p,) = params = parameters((8, 8), dtype=torch.bfloat16)
    optimizer = exact(params, state_dtype=torch.float32, max_norm=0.3)
    fill(params, 0)
    optimizer.update_previous_grad()
    optimizer.step()
    optimizer.update_last_grad()
    g = p.grad.float()
    want = g * 0.3 / (g.norm() + 1e-6)
    torch.testing.assert_close(optimizer.state[p]["last_grad"], want, rtol=1e-6, atol=0)


def test_exact_mode_under_a_grad_scaler():
    """4: the scaler unscales once per step, and the kept gradient by its own factor."""
    (a,), (b,) = twins((4, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, plain = exact([a], max_norm=0.5), exact([b], max_norm=0.5)
    for t in range(3):
        for seed in (100 + t, t):
            fill([b], seed)
            a.grad = None
            scaler.scale((a * b.grad).sum()).backward()
            if seed != t:
                scaled.update_previous_grad(grad_scale=scaler.get_scale())
                plain.update_previous_grad()
        scaler.step(scaled)
        scaler.update()
        plain.step()
        scaled.update_last_grad()
        plain.update_last_grad()
    equal([a], [b], 1e-6)


def test_exact_differs_from_approximate_and_survives_missing_gradients():
    """4: the authors crash on a parameter that never had a gradient."""
    a, b = twins((4, 3), (2, 2))
    for optimizer, params in ((exact(a), a), (eager(b, lr=LR), b)):
        run_protocol(optimizer, params[:1], range(3))
    assert not torch.equal(a[0], b[0])
    equal(a[1:], b[1:])


PREVIOUS, STEP, LAST = "update_previous_grad", "step", "update_last_grad"


@pytest.mark.parametrize(
    ("taken", "refused", "message"),
    [
        ([], STEP, "expected the protocol"),
        ([], LAST, "update_previous_grad"),
        # h was handed over: the last step needs no next batch
        ([PREVIOUS, STEP, LAST, STEP], STEP, "expected the protocol"),
        # another batch, before the step: as you like
        ([PREVIOUS, PREVIOUS, STEP], PREVIOUS, "update_last_grad"),
        ([PREVIOUS, STEP], STEP, "update_last_grad"),
        ([PREVIOUS, "state_dict", STEP], "state_dict", "call optimizer.update_last"),
        ([PREVIOUS, STEP], "deepcopy", "call optimizer.update_last_grad"),
        ([PREVIOUS, "load"], LAST, "nothing kept"),
    ],
)
def test_the_exact_protocol_out_of_order(taken, refused, message):
    """Is an error, since h would stay 0 or be old; and nothing has moved."""
    params = parameters((3, 3))
    optimizer = exact(params)
    saved = copy.deepcopy(optimizer.state_dict())
    own = dict(deepcopy=partial(copy.deepcopy, optimizer))
    own |= dict(load=partial(optimizer.load_state_dict, saved))
    for seed, name in enumerate(taken):
        fill(params, seed)
        (own.get(name) or getattr(optimizer, name))()
    before = copies(params)
    fill(params, 9)
    with pytest.raises(RuntimeError, match=message):
        (own.get(refused) or getattr(optimizer, refused))()
    equal(params, before)


# ---- state -------------------------------------------------------------------------


def test_state_is_made_at_construction_and_only_what_is_needed():
    """9: the authors keep three buffers for every parameter of every type."""
    want = {
        "mars-adamw": {"step", "exp_avg", "exp_avg_sq", "last_grad"},
        "mars-lion": {"step", "exp_avg", "last_grad"},
        "mars-shampoo": {"step", "exp_avg", "last_grad"},
        "mars-m": {"step", "exp_avg", "last_grad"},
        "adamw": {"step", "exp_avg", "exp_avg_sq"},
        "lion": {"step", "exp_avg"},
        "soap": {"step", "stage_count", *(b.key for b in marsopt.SOAP.keeps.values())},
        "muon": {"step", "momentum_buffer"},
        "moonlight": {"step", "momentum_buffer"},
        "normuon": {"step", "momentum_buffer", "row_exp_avg_sq"},
        "mars-normuon": {"step", "exp_avg", "last_grad", "row_exp_avg_sq"},
    }
    for mars_type in want:
        matrix, vector = parameters((3, 3), (3,))
        optimizer = eager([matrix, vector], mars_type=mars_type)
        assert set(optimizer.state[matrix]) == want[mars_type]
        rest = want["lion"] if mars_type == "lion" else want["adamw"]
        assert set(optimizer.state[vector]) == rest


@pytest.mark.parametrize("correction", ["approximate", "exact"])
def test_under_inference_mode_an_optimizer_is_built_and_loaded_as_outside(correction):
    a, b = twins(*SHAPES)
    kw = dict(lr=LR, correction=correction)
    one = eager(a[:1], **kw)
    one.add_param_group(dict(params=a[1:]))
    run_protocol(one, a, range(2))
    with torch.inference_mode():
        two = eager(b[:1], **kw)
        two.add_param_group(dict(params=b[1:]))
        two.load_state_dict(copy.deepcopy(one.state_dict()))
    run_protocol(two, b, [2])
    state = [v for entry in two.state.values() for v in entry.values()]
    assert not any(v.is_inference() for v in state)


# ---- what it says, and compiles ----------------------------------------------------


def test_compile_says_what_it_decided(monkeypatch, caplog):
    monkeypatch.setattr(graphs, "missing_for", lambda device: "no C++ compiler")
    with pytest.raises(RuntimeError, match="got compile=True"):
        MARS(parameters((2, 2)), compile=True)
    with caplog.at_level(logging.WARNING):
        params = parameters((2, 2))
        run(MARS(params), params, [0])
    assert "runs eagerly, since there is no C++ compiler" in caplog.text


def test_the_first_compiled_step_of_a_process_says_so(of_dynamo, caplog):
    """Before it is compiled; nothing is said of what runs eagerly."""
    graphs.announce.cache_clear()
    params = parameters((2, 2))
    run(eager(params), params, [0])
    optimizer = MARS(params, compile=True)
    for seed in range(2):
        fill(params, seed)
        optimizer.step()
    MARS(params, compile=True).step()
    warned = [r for r in caplog.records if r.levelno >= logging.WARNING]
    (line,) = [r.getMessage() for r in warned if r.name.startswith("marsopt")]
    assert "compiling the formulas of the optimizer's step" in line
    assert "10 s to 90" in line and "compile=False compiles nothing" in line


def test_an_outer_compile_leaves_the_step_alone(of_dynamo):
    """Its graphs are those of the step alone; they run, and nothing else is traced."""
    a, b = twins((4, 3), (3,))
    plain, inside = (MARS(p, lr=LR, compile=True) for p in (a, b))
    graphs = []
    for params, step in ((a, plain.step), (b, torch.compile(inside.step))):
        torch._dynamo.reset()
        counters.clear()
        for t in range(3):
            fill(params, t)
            step()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0
    equal(a, b)
