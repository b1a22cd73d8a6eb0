"""MARS as a torch.optim.Optimizer: groups, state, and the authors' defects.

Numbers in test names are rows of the list of defects in docs/fidelity.md.
"""

from __future__ import annotations

import copy
import io
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import marsopt
from marsopt import MARS, REGISTRY
from marsopt.optim import compiled

pytestmark = pytest.mark.usefixtures("both_layouts")

LR = 0.01


def parameters(*shapes, dtype=torch.float32):
    return [nn.Parameter(0.1 * torch.randn(s, dtype=dtype)) for s in shapes]


def eager(params, **kwargs):
    return MARS(params, compile=False, **kwargs)


def fill(params, seed, scale=1.0):
    """A fresh gradient for every parameter."""
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=g)).to(p.dtype)


def run(optimizer, params, steps, start=0):
    """Seeded steps, by the exact protocol (which does nothing for approximate MARS)."""
    for t in range(start, start + steps):
        fill(params, 1001 + t)
        optimizer.update_previous_grad()
        fill(params, t)
        optimizer.step()
        optimizer.update_last_grad()


def twins(*shapes):
    a = parameters(*shapes)
    return a, [nn.Parameter(p.detach().clone()) for p in a]


def equal(a, b, atol=0.0):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=0, atol=atol)


SHAPES = ((6, 4), (4,), (3, 5), (2, 3, 2, 2))


# ---- the authors' interface --------------------------------------------------------


def test_signature_and_defaults_are_the_authors():
    import inspect

    named = inspect.signature(MARS).parameters
    assert len(named) <= 26
    positional = [n for n, p in named.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "params",
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "gamma",
        "is_approx",
        "mars_type",
        "optimize_1d",
        "lr_1d",
        "betas_1d",
        "weight_decay_1d",
    ]
    authors = [
        3e-3, (0.95, 0.99), 1e-8, 0.0, False, 0.025, True,
        "mars-adamw", False, 3e-3, (0.9, 0.95), 0.1,
    ]  # fmt: skip
    optimizer = eager(parameters(*SHAPES))
    matrices, vectors = optimizer.param_groups
    for name, value in zip(positional[1:], authors, strict=True):
        # None in the signature: the rule's own, which are the authors' of their names
        assert named[name].default in (None, value), name
        if name == "lr_1d":
            assert vectors["lr"] * vectors["lr_ratio"] == value
        elif name.endswith("_1d") and name != "optimize_1d":
            assert vectors[name.removesuffix("_1d")] == value, name
        elif name not in ("is_approx", "optimize_1d"):  # of no group
            assert optimizer.defaults[name] == value, name
            assert matrices[name] == value, name


@pytest.mark.parametrize("mars_type", REGISTRY)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_the_class_is_the_rule(mars_type, max_norm):
    """Five steps of MARS are five steps of mars(...), with a schedule."""
    params = parameters(*SHAPES)
    x = [p.detach().clone() for p in params]
    kw = dict(mars_type=mars_type, weight_decay=0.1, max_norm=max_norm)
    kw |= dict(ns_dtype=torch.float32)
    optimizer, rule = eager(params, lr=LR, **kw), marsopt.mars(base_lr=LR, **kw)
    state = rule.init(x)
    for t in range(5):
        for group in optimizer.param_groups:
            group["lr"] = LR / (1 + t)
        fill(params, t)
        optimizer.step()
        x, state = rule.step(x, [p.grad for p in params], state, lr=LR / (1 + t))
        equal(params, x, 1e-7)


# each page once, with its correction or without: of the others dynamo makes the same
# graphs; NorMuon's in test_matrices.py
PAGES = ("nadamw", "soap", "mars-lion", "mars-shampoo", "mars-soap-muon")


# small tensors are compiled as stacks on a CPU too
compiled_once = pytest.mark.parametrize("both_layouts", ["as-on-a-gpu"], indirect=True)


@compiled_once
@pytest.mark.parametrize("mars_type", PAGES)
def test_compiled_is_eager(mars_type):
    """The shipped path: no recompile after the first step, whatever changes."""
    a, b = twins((6, 4), (4,))
    kw = dict(mars_type=mars_type, ns_dtype=torch.float32, max_norm=1.0, lr=LR)
    slow, fast = eager(a, **kw), MARS(b, compile=True, **kw)
    for t in range(4):
        for optimizer, params in ((slow, a), (fast, b)):
            fill(params, t, 3.0)
            optimizer.param_groups[0].update(
                lr=LR / (1 + t), gamma=0.01 * t, weight_decay=0.1 * t
            )
            optimizer.max_norm = 1.0 + t
            with torch.compiler.set_stance("fail_on_recompile" if t else "default"):
                optimizer.step()
        equal(a, b, 1e-6)


def test_named_parameters_and_closure():
    model = nn.Linear(4, 2)
    optimizer = eager(model.named_parameters(), lr=LR)
    x = torch.randn(8, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(20)]
    assert losses[-1] < losses[0]
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names == [["weight"], ["bias"]]


def test_schedulers_move_both_rates():
    params = parameters((3, 3), (3,))
    optimizer = eager(params, lr=0.1, lr_1d=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    for t in range(3):
        fill(params, t)
        optimizer.step()
        matrix, vector = optimizer.describe().layout.groups
        assert float(matrix.hyper.lr) == pytest.approx(0.1 / (1 + t))
        assert float(vector.hyper.lr) == pytest.approx(0.02 / (1 + t))
        scheduler.step()


def test_a_tensor_lr_is_followed():
    a, b = twins(*SHAPES)
    lr = torch.tensor(LR, dtype=torch.float64)
    x, y = eager(a, lr=lr), eager(b, lr=LR)
    for t in range(3):
        lr.fill_(LR * (1 + t))
        for group in y.param_groups:
            group["lr"] = LR * (1 + t)
        run(x, a, 1, t)
        run(y, b, 1, t)
    equal(a, b)


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
    plain, set_in_group = twins(*SHAPES)
    changed, set_later = twins(*SHAPES)
    for p, q, r in zip(set_in_group, changed, set_later, strict=True):
        q.data.copy_(p.data)
        r.data.copy_(p.data)
    # what a group gives when it is added holds for vectors too (test_groups.py)
    followed = [n for n in ("lr", "betas", "weight_decay") if n in change]
    everything = change | {f"{n}_1d": change[n] for n in followed}
    optimizers = [
        (eager(plain, lr=3e-3), plain),
        (eager([{"params": set_in_group, **change}], lr=3e-3), set_in_group),
        (eager(changed, **{"lr": 3e-3, **everything}), changed),
    ]
    late = eager(set_later, lr=3e-3)
    matrices, vectors = late.param_groups
    matrices.update({k: v for k, v in change.items() if not k.endswith("_1d")})
    if "optimize_1d" in change:
        vectors.update(matrices | {"params": vectors["params"]})
    elif "mars_type" not in change:
        vectors.update({k.removesuffix("_1d"): v for k, v in everything.items()})
    optimizers.append((late, set_later))
    for optimizer, params in optimizers:
        run(optimizer, params, 4)
    equal(set_in_group, changed)
    equal(set_later, changed)
    assert any(not torch.equal(a, b) for a, b in zip(plain, changed, strict=True))


def test_lr_of_zero_at_construction():
    """2: the authors divide by it."""
    matrices = parameters((3, 3))
    optimizer = eager(matrices, lr=0.0)
    run(optimizer, matrices, 1)
    optimizer.param_groups[0]["lr"] = 0.1
    run(optimizer, matrices, 1)
    mixed = parameters((3, 3), (3,))
    before = [p.detach().clone() for p in mixed]
    with pytest.raises(ValueError, match="got lr=0 with lr_1d=0.003"):
        eager(mixed, lr=0.0)
    optimizer = eager(mixed, lr=0.0, base_lr=0.1)
    run(optimizer, mixed, 1)
    equal(mixed, before)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    run(optimizer, mixed, 1)
    pairs = zip(mixed, before, strict=True)
    moved = [float((p.detach() - q).abs().max()) for p, q in pairs]
    assert moved[0] > 0.05 and moved[1] < 0.004


def test_add_param_group():
    first, second = parameters((3, 3)), parameters((4, 2), (4,))
    optimizer = eager(first, lr=LR)
    run(optimizer, first, 2)
    optimizer.add_param_group(
        {"params": second, "lr": 0.1, "mars_type": "mars-shampoo"}
    )
    assert all("exp_avg" in optimizer.state[p] for p in second)
    run(optimizer, first + second, 1, 2)
    assert [float(optimizer.state[p]["step"]) for p in first + second] == [3, 1, 1]
    with pytest.raises(ValueError, match="got mars_type='sgd'"):
        optimizer.add_param_group({"params": parameters((2, 2)), "mars_type": "sgd"})
    assert len(optimizer.param_groups) == 3
    wrong = {"params": parameters((2, 2), (2,)), "betas_1d": (2.0, 0.5)}
    with pytest.raises(ValueError, match="betas_1d"):
        optimizer.add_param_group(wrong)
    assert len(optimizer.param_groups) == 3 and len(wrong) == 2


# ---- gradients (defects 1, 4, 5) ---------------------------------------------------


def test_reused_gradient_storage_does_not_turn_mars_off():
    """1: the authors alias p.grad; zeroing it in place then makes h equal to 0 or g."""
    a, b = twins(*SHAPES)
    fresh, reused = eager(a, lr=LR), eager(b, lr=LR)
    for p in b:
        p.grad = torch.zeros_like(p)
    for t in range(4):
        fill(a, t)
        fresh.step()
        for p, q in zip(a, b, strict=True):
            q.grad.copy_(p.grad)  # the same storage, again and again
        reused.step()
        reused.zero_grad(set_to_none=False)
    equal(a, b)


def test_parameters_without_gradient_stay_as_they_are():
    """torch.optim's convention; a later gradient starts at step 1."""
    used, idle = parameters((3, 4), (4,)), parameters((2, 5))
    optimizer = eager(used + idle, lr=LR, weight_decay=0.5)
    before = idle[0].detach().clone()
    run(optimizer, used, 3)
    equal(idle, [before])
    assert float(optimizer.state[idle[0]]["step"]) == 0
    twin = [nn.Parameter(before.clone())]
    alone = eager(twin, lr=LR, weight_decay=0.5)
    fill(used + idle, 9)
    twin[0].grad = idle[0].grad.clone()
    optimizer.step()
    alone.step()
    equal(idle, twin)


def test_frozen_parameters_cost_nothing_until_they_thaw():
    params = parameters((3, 3), (2, 2))
    params[1].requires_grad_(False)
    optimizer = eager(params, lr=LR)
    assert params[1] not in optimizer.state
    run(optimizer, params[:1], 1)
    params[1].requires_grad_(True)
    run(optimizer, params, 1, 1)
    assert [float(optimizer.state[p]["step"]) for p in params] == [2, 1]


@pytest.mark.parametrize(
    ("mars_type", "compiled"),
    [*((name, False) for name in REGISTRY), ("mars-shampoo", True)],
)
def test_a_nan_skips_the_whole_step(mars_type, compiled):
    """5: with the authors one NaN stays in m, v and h for ever."""
    params = parameters((6, 4), (4,), (2, 3, 4))
    options = dict(mars_type=mars_type, compile=compiled, matrices="batched")
    optimizer = MARS(params, lr=LR, **options)
    run(optimizer, params, 2)
    before = copy.deepcopy([p.detach() for p in params])
    state = copy.deepcopy(optimizer.state_dict()["state"])
    fill(params, 9)
    params[0].grad[1, 1] = float("nan")
    optimizer.step()
    equal(params, before)
    for i, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(v, state[i][k]) for k, v in entry.items())
    assert optimizer.num_skipped == 1
    run(optimizer, params, 1)
    assert optimizer.num_skipped == 1
    assert all(torch.isfinite(p).all() for p in params)


def test_nonfinite_may_raise():
    params = parameters((3, 3), (3,))
    optimizer = eager([("weight", params[0]), ("bias", params[1])], nonfinite="raise")
    fill(params, 0)
    params[1].grad[0] = float("inf")
    before = [p.detach().clone() for p in params]
    with pytest.raises(FloatingPointError, match="in 1 of 2 parameters .*bias"):
        optimizer.step()
    equal(params, before)
    unnamed = eager([{"params": [p]} for p in params], nonfinite="raise")
    with pytest.raises(FloatingPointError, match="parameter 0 of group 1"):
        unnamed.step()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = eager(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"sparse=False"):
        optimizer.step()


def test_noncontiguous_gradients_and_parameters():
    a, b = twins((4, 6))
    a[0].data = a[0].data.mT.contiguous().mT  # same values, other strides
    for optimizer, params in ((eager(a, lr=LR), a), (eager(b, lr=LR), b)):
        for t in range(3):
            fill(params, t)
            params[0].grad = params[0].grad.mT.contiguous().mT
            optimizer.step()
    equal(a, b, 1e-7)


def test_bf16_parameters_with_float32_state():
    params = parameters((4, 4), (4,), dtype=torch.bfloat16)
    optimizer = eager(params, lr=LR, state_dtype=torch.float32)
    run(optimizer, params, 2)
    assert {s[k].dtype for s in optimizer.state.values() for k in s} == {torch.float32}
    other = eager(
        [nn.Parameter(p.detach().clone()) for p in params],
        lr=LR,
        state_dtype=torch.float32,
    )
    other.load_state_dict(optimizer.state_dict())
    copies = [q for group in other.param_groups for q in group["params"]]
    for p, q in zip(params, copies, strict=True):
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, other.state[q][key])  # not rounded through bf16


def test_gradient_norm_is_that_of_clip_grad_norm():
    params = parameters(*SHAPES)
    optimizer = eager(params)
    assert optimizer.grad_norm is None
    fill(params, 0)
    want = torch.nn.utils.get_total_norm([p.grad for p in params])
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm.float(), want)


def test_gradients_are_never_rewritten():
    params = parameters(*SHAPES)
    optimizer = eager(params, max_norm=0.1)
    fill(params, 0, 5.0)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    equal([p.grad for p in params], before)


def test_max_norm_may_change_between_steps():
    a, b = twins(*SHAPES)
    inside, outside = eager(a, lr=LR), eager(b, lr=LR)
    for t, bound in enumerate((None, 0.5, 0.1, None, 0.2)):
        fill(a, t), fill(b, t)
        inside.max_norm = bound
        if bound is not None:
            torch.nn.utils.clip_grad_norm_(b, bound)
        inside.step()
        outside.step()
        equal(a, b, 1e-6)
    with pytest.raises(ValueError, match="got max_norm=-1"):
        inside.max_norm = -1
    assert inside.max_norm == 0.2
    assert copy.deepcopy(inside).max_norm == 0.2


# ---- exact MARS (defect 4 and the authors' protocol) -------------------------------


@pytest.mark.parametrize(
    "mars_type", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m"]
)
def test_exact_protocol_is_the_exact_rule(mars_type):
    params = parameters(*SHAPES)
    x = [p.detach().clone() for p in params]
    kw = dict(mars_type=mars_type, is_approx=False, ns_dtype=torch.float32)
    optimizer, rule = eager(params, lr=LR, **kw), marsopt.mars(base_lr=LR, **kw)
    state, h = rule.init(x), [torch.zeros_like(v) for v in x]
    for t in range(4):
        fill(params, 100 + t)
        following = [p.grad.clone() for p in params]
        optimizer.update_previous_grad()
        fill(params, t)
        optimizer.step()
        optimizer.update_last_grad()
        x, state = rule.step(x, [p.grad for p in params], state, lr=LR, reference=h)
        h = following
        equal(params, x, 1e-7)


@compiled_once
def test_exact_compiled_is_eager():
    """h changes places between steps, and no graph minds."""
    a, b = twins(*SHAPES)
    kw = dict(lr=LR, is_approx=False, max_norm=0.5)
    slow, fast = eager(a, **kw), MARS(b, compile=True, **kw)
    for t in range(4):
        with torch.compiler.set_stance("fail_on_recompile" if t else "default"):
            for optimizer, params in ((slow, a), (fast, b)):
                run(optimizer, params, 1, t)
        equal(a, b, 1e-6)


def test_exact_keeps_what_half_precision_gradients_become_when_scaled():
    """h is in float32; rounding to bf16 before the clip's factor would show."""
    params = parameters((8, 8), dtype=torch.bfloat16)
    kw = dict(lr=LR, is_approx=False, state_dtype=torch.float32, max_norm=0.3)
    optimizer = eager(params, **kw)
    fill(params, 0)
    optimizer.update_previous_grad()
    optimizer.step()
    optimizer.update_last_grad()
    (p,) = params
    g = p.grad.float()
    want = g * 0.3 / (g.norm() + 1e-6)
    torch.testing.assert_close(optimizer.state[p]["last_grad"], want, rtol=1e-6, atol=0)


def test_state_replaced_within_the_exact_protocol_is_seen():
    a, b = twins(*SHAPES)
    one, two = (eager(x, lr=LR, is_approx=False) for x in (a, b))
    for t in range(3):
        for optimizer, params in ((one, a), (two, b)):
            fill(params, 100 + t)
            optimizer.update_previous_grad()
            fill(params, t)
            optimizer.step()
            for p in params[:1]:
                m = optimizer.state[p]["exp_avg"]
                if optimizer is one:
                    m.zero_()
                else:
                    optimizer.state[p]["exp_avg"] = torch.zeros_like(m)
            optimizer.update_last_grad()
    equal(a, b)
    equal(*([o.state[p]["exp_avg"] for p in x] for o, x in ((one, a), (two, b))))


def test_a_copy_of_exact_mars_may_take_the_last_step():
    """Before which there is no next batch."""
    params = parameters(*SHAPES)
    optimizer = eager(params, lr=LR, is_approx=False)
    run(optimizer, params, 2)
    twin = copy.deepcopy(optimizer)
    lists = []
    for each in (optimizer, twin):
        lists.append([p for group in each.param_groups for p in group["params"]])
        fill(lists[-1], 2)
        each.step()
    equal(*lists)


def test_exact_differs_from_approximate_and_survives_missing_gradients():
    """4: the authors crash on a parameter that never had a gradient."""
    a, b = twins((4, 3), (2, 2))
    exact, approximate = eager(a, lr=LR, is_approx=False), eager(b, lr=LR)
    for t in range(3):
        for optimizer, params in ((exact, a), (approximate, b)):
            fill(params[:1], 50 + t)
            optimizer.update_previous_grad()
            fill(params[:1], t)
            optimizer.step()
            optimizer.update_last_grad()
    assert not torch.equal(a[0], b[0])
    equal(a[1:], b[1:])


def test_exact_reference_gets_its_own_global_clip():
    a, b = twins((4, 3), (3, 3))
    inside = eager(a, lr=LR, is_approx=False, max_norm=0.5)
    outside = eager(b, lr=LR, is_approx=False)
    for t in range(3):
        for seed, call in ((50 + t, "update_previous_grad"), (t, "step")):
            fill(a, seed)
            getattr(inside, call)()
            fill(b, seed)
            torch.nn.utils.clip_grad_norm_(b, 0.5)
            getattr(outside, call)()
        inside.update_last_grad()
        outside.update_last_grad()
    equal(a, b, 1e-6)


def test_exact_protocol_out_of_order():
    params = parameters((2, 2))
    optimizer = eager(params, is_approx=False)
    with pytest.raises(RuntimeError, match="update_previous_grad"):
        optimizer.update_last_grad()
    fill(params, 0)
    optimizer.update_previous_grad()
    optimizer.state_dict()
    optimizer.step()
    for save in (optimizer.state_dict, partial(copy.deepcopy, optimizer)):
        with pytest.raises(RuntimeError, match="call optimizer.update_last_grad"):
            save()
    optimizer.update_last_grad()
    optimizer.state_dict()


# ---- state -------------------------------------------------------------------------


@pytest.mark.parametrize("mars_type", REGISTRY)
@pytest.mark.parametrize("is_approx", [True, False])
def test_state_dict_round_trip_is_bitwise(mars_type, is_approx):
    """Through a file, into a fresh optimizer; hyperparameters are restored too."""
    a = parameters(*SHAPES)
    optimizer = eager(a, lr=LR, gamma=0.05, mars_type=mars_type, is_approx=is_approx)
    run(optimizer, a, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    b = [nn.Parameter(p.detach().clone()) for p in a]
    resumed = eager(b, lr=0.5, gamma=0.5, mars_type=mars_type, is_approx=is_approx)
    resumed.load_state_dict(torch.load(file))
    assert resumed.param_groups[0]["gamma"] == 0.05
    run(optimizer, a, 3, 3)
    run(resumed, b, 3, 3)
    equal(a, b)


def test_state_is_made_at_construction_and_only_what_is_needed():
    """9: the authors keep three buffers for every parameter of every type."""
    want = {
        "mars-adamw": {"step", "exp_avg", "exp_avg_sq", "last_grad"},
        "mars-lion": {"step", "exp_avg", "last_grad"},
        "mars-shampoo": {"step", "exp_avg", "last_grad"},
        "mars-m": {"step", "exp_avg", "last_grad"},
        "adamw": {"step", "exp_avg", "exp_avg_sq"},
        "lion": {"step", "exp_avg"},
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
    (unclipped,) = parameters((3, 3))
    one_buffer = eager([unclipped], mars_type="mars-m", clip=None)
    assert set(one_buffer.state[unclipped]) == {"step", "grad_avg"}


def test_incomplete_state_is_refused_by_name():
    """6: a resume that silently starts from zeros."""
    params = parameters((3, 3), (3,))
    named = [("weight", params[0]), ("bias", params[1])]
    optimizer = eager(named)
    saved = optimizer.state_dict()
    del saved["state"][0]["last_grad"]
    with pytest.raises(
        ValueError, match=r"without \['last_grad'\] of parameter 'weight'"
    ):
        eager(named).load_state_dict(saved)
    with pytest.raises(ValueError, match="of 1 parameters, expected 2"):
        eager(named).load_state_dict(eager(params[:1]).state_dict())


def test_load_state_dict_hooks_are_honoured():
    a, b = twins((3, 3))
    optimizer, other = eager(a, lr=LR), eager(b, lr=LR)
    run(optimizer, a, 2)

    def zero(_, state_dict):
        out = copy.deepcopy(state_dict)
        out["state"][0]["exp_avg"].zero_()
        return out

    other.register_load_state_dict_pre_hook(zero)
    other.load_state_dict(optimizer.state_dict())
    assert not other.state[b[0]]["exp_avg"].any()
    assert optimizer.state[a[0]]["exp_avg"].any()


def test_deepcopy_and_pickle():
    model = nn.Linear(3, 3)
    optimizer = eager(model.parameters(), lr=LR)
    run(optimizer, list(model.parameters()), 2)
    both = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), both):
        run(o, list(m.parameters()), 2, 2)
    equal(model.parameters(), both[0].parameters())


# ---- bad input and options ---------------------------------------------------------

BAD = {
    "negative lr": (dict(lr=-1e-3), "got lr=-0.001"),
    "betas": (dict(betas=(0.9, 1.0)), r"got betas\[1\]=1.0"),
    "betas_1d": (dict(betas_1d=(-0.1, 0.9)), r"got betas_1d\[0\]|got betas\[0\]=-0.1"),
    "mars_type": (
        dict(mars_type="mars_adam"),
        "got mars_type='mars_adam'.*mean 'mars-adamw'",
    ),
    "clip": (dict(clip=-1.0), "got clip=-1.0"),
    "max_norm": (dict(max_norm=0.0), "got max_norm=0.0"),
    "nonfinite": (dict(nonfinite="ignore"), "got nonfinite='ignore'"),
    "ns_coefficients": (dict(ns_coefficients="cubic"), "got ns_coefficients='cubic'"),
    "lr as text": (dict(lr="1e-3"), "got lr='1e-3'"),
    "eps": (dict(eps=-1.0), "got eps=-1.0"),
    "lr_1d": (dict(lr_1d=-1.0), "got lr_1d=-1.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    kwargs, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        eager(parameters((2, 2), (2,)), **kwargs)


def test_bad_parameters():
    with pytest.raises(ValueError, match="view_as_real"):
        eager([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="to_empty"):
        eager([nn.Parameter(torch.zeros(2, device="meta"))])
    with pytest.raises(ValueError, match="empty parameter list"):
        eager([])


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: [m], lambda m: {"params": m}])
def test_a_module_is_told_from_its_parameters(wrap):
    for module in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))):
        given = wrap(module)
        said = f"got a module \\({type(module).__name__}\\), .*: pass its .parameters"
        with pytest.raises(TypeError, match=said):
            eager([given] if isinstance(given, dict) else given)


def later(key, value):
    """As a tool writes it between steps, or a state dict brings it."""
    params = parameters((2, 2))
    optimizer = eager(params)
    optimizer.param_groups[0][key] = value
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, 1)
    return optimizer


def added(key, value):
    optimizer = eager(parameters((2, 2)))
    optimizer.add_param_group({"params": parameters((2, 2)), key: value})
    return optimizer


def given(key, value):
    return eager([{"params": parameters((2, 2)), key: value}])


@pytest.mark.parametrize("door", [given, added])
@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("weight_deacy", "weight_decay"),
        ("momentum", "betas"),
        ("beta1", "betas"),
        ("wd", "weight_decay"),
    ],
)
def test_a_misspelt_key_of_a_new_group_is_refused(key, meant, door):
    with pytest.raises(TypeError, match=f"did you mean '{meant}' for '{key}'"):
        door(key, 0.5)


OTHERS = dict(initial_lr=1.0, swa_lr=1.0, max_lr=1.0, min_lr=0.0, maximize=False)
OTHERS |= dict(name="head", max_momentum=0.9, fused=True, decoupled_weight_decay=True)
OTHERS |= dict(lr_scale=0.5, differentiable=False, my_key=0.5)


@pytest.mark.parametrize("door", [given, added, later])
def test_keys_of_other_tools_stay_in_groups(door, caplog):
    for key, value in OTHERS.items():
        assert door(key, value).param_groups[-1][key] == value
    assert later("weight_deacy", 0.5).param_groups[0]["weight_deacy"] == 0.5
    assert not warned(caplog)


def warned(caplog):
    return [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "RAdam"])
@pytest.mark.parametrize("schedule", [False, True])
def test_checkpoints_of_torch_are_loaded_in_silence(kind, schedule, caplog):
    a, b = twins((2, 2), (3,))
    options = dict(decoupled_weight_decay=True) if kind != "AdamW" else {}
    source = getattr(torch.optim, kind)(a, lr=LR, **options)
    if schedule:
        torch.optim.lr_scheduler.OneCycleLR(source, 0.1, 10)
    fill(a, 0)
    source.step()
    target = eager(b, mars_type="adamw")
    target.load_state_dict(source.state_dict())
    assert not warned(caplog)
    assert target.param_groups[0]["maximize"] is False


@pytest.mark.parametrize("door", ["constructor", "added", "loaded", "set"])
def test_maximize_is_refused_and_nothing_has_changed(door):
    refused = pytest.raises(ValueError, match="got maximize=True .*negate the loss")
    a, b = twins((2, 2), (3,))
    if door == "constructor":
        with refused:
            eager([{"params": a, "maximize": True}])
        return
    optimizer = eager(a, mars_type="adamw")
    run(optimizer, a, 1)
    before = copy.deepcopy((a, optimizer.state_dict()["state"]))
    with refused:
        if door == "added":
            optimizer.add_param_group({"params": b, "maximize": True})
        elif door == "set":
            optimizer.param_groups[0]["maximize"] = True
            run(optimizer, a, 1)
        else:
            source = torch.optim.AdamW(b, maximize=True)
            fill(b, 0)
            source.step()
            optimizer.load_state_dict(source.state_dict())
    assert len(optimizer.param_groups) == 1
    equal(a, before[0])
    for i, entry in optimizer.state_dict()["state"].items():
        equal(entry.values(), before[1][i].values())


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        (dict(is_approx=False), "exact"),
        ({}, "approximate"),
        (dict(mars_type="moonlight"), "None"),
    ],
)
def test_printed_it_shows_what_holds_for_all_groups(options, correction):
    text = repr(eager(parameters((2, 2)), max_norm=0.5, **options))
    assert f"\n    correction: {correction}\n" in text
    assert "\n    max_norm: 0.5\n" in text and "\nParameter Group 0\n" in text


def test_a_state_dict_of_a_model_is_refused_and_one_of_another_rule_taken():
    params = parameters((2, 2))
    optimizer = eager(params, lr_1d=1e-3, mars_type="moonlight")
    with pytest.raises(ValueError, match=r"of \['0'\], expected one of an optimizer"):
        optimizer.load_state_dict(nn.ParameterList(params).state_dict())
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="which has .* and 'state'"):
        optimizer.load_state_dict({"param_groups": saved["param_groups"]})
    optimizer.load_state_dict(eager(parameters((2, 2)), mars_type="lion").state_dict())
    assert optimizer.param_groups[0]["mars_type"] == "lion"


def test_a_live_value_out_of_range_is_caught():
    params = parameters((2, 2))
    optimizer = eager(params)
    optimizer.param_groups[0]["betas"] = (0.9, 2.0)
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match=r"got betas\[1\]=2.0"):
        run(optimizer, params, 1)
    equal(params, [before])


def test_compile_says_what_it_decided(monkeypatch, caplog):
    monkeypatch.setattr(compiled, "missing_for", lambda device: "no C++ compiler")
    with pytest.raises(RuntimeError, match="got compile=True"):
        MARS(parameters((2, 2)), compile=True)
    with caplog.at_level(logging.WARNING):
        params = parameters((2, 2))
        run(MARS(params), params, 1)
    assert "runs eagerly, since there is no C++ compiler" in caplog.text


def test_the_first_compiled_step_of_a_process_says_so(monkeypatch, caplog):
    """Before it is compiled; nothing is said of what runs eagerly."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled.announce.cache_clear()

    def said():
        ours = [r for r in caplog.records if r.name.startswith("marsopt")]
        return [r.getMessage() for r in ours if r.levelno >= logging.WARNING]

    params = parameters((2, 2))
    run(eager(params), params, 1)
    optimizer = MARS(params, compile=True)
    assert not said()
    run(optimizer, params, 2)
    run(MARS(params, compile=True), params, 1)
    (line,) = said()
    assert "compiling the optimizer's step" in line
    assert "compile=False" in line


def test_an_outer_compile_leaves_the_step_alone(monkeypatch):
    """Its graphs are those of the step alone; they run, and nothing else is traced."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    a, b = twins((4, 3), (3,))
    plain, inside = (MARS(p, lr=LR, compile=True) for p in (a, b))
    traced = []
    for params, step in ((a, plain.step), (b, torch.compile(inside.step))):
        torch._dynamo.reset()
        counters.clear()
        for t in range(3):
            fill(params, t)
            step()
        traced.append(counters["stats"]["unique_graphs"])
    assert traced[0] == traced[1] > 0
    equal(a, b)


def test_two_optimizers_do_not_share_the_limit_on_recompiles(monkeypatch):
    """Other shapes have graphs of their own: the fourth still runs as one graph."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for width in range(2, 6):
        params = parameters((width, 3))
        optimizer = MARS(params, compile=True)
        with torch._dynamo.config.patch(recompile_limit=2):
            run(optimizer, params, 1)


def test_a_first_step_in_inference_mode_leaves_later_steps_possible():
    params = parameters((3, 3), (3,), (3,))
    optimizer = eager(params, mars_type="adamw")
    fill(params, 0)
    with torch.inference_mode():
        optimizer.step()
    fill(params, 1)
    optimizer.step()
    assert all(float(optimizer.state[p]["step"]) == 2 for p in params)


def test_a_refused_learning_rate_leaves_no_other_group_behind():
    params = parameters((3,), (3,))
    groups = [{"params": [p]} for p in params]
    optimizer = eager(groups, mars_type="adamw", lr=LR, weight_decay=0.0)
    fill(params, 0)
    optimizer.step()
    first, second = optimizer.param_groups
    first["lr"], second["lr"] = 0.0, -1.0
    with pytest.raises(ValueError, match="lr=-1.0"):
        optimizer.step()
    second["lr"] = LR
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[1], before[1])


def test_a_parameter_whose_data_is_transposed_is_updated_as_it_lies():
    (ours,), (theirs,) = twins((4, 4))
    mine = eager([ours], mars_type="adamw", lr=LR, weight_decay=0.0)
    other = torch.optim.AdamW([theirs], lr=LR, weight_decay=0.0)
    for t in range(4):
        for p, optimizer in ((ours, mine), (theirs, other)):
            p.data = p.data.t() if t == 2 else p.data
            fill([p], t)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
