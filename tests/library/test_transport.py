"""Transport in the class: what parameters and state hold, and who may change it."""

from __future__ import annotations

import copy
import gc
import json
import logging
import pickle
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import marsopt
from marsopt import MARS
from marsopt.parallel import MeshCollectives
from tests.processes import spawn
from tests.stacking import (
    MODES,
    build,
    copies,
    equal,
    fill,
    forced,
    in_one_buffer,
    run,
    traced,
)

TYPES = list(marsopt.REGISTRY)
GAMMA, LR = 0.1, 1e-2
GOLDEN = Path(__file__).parents[1] / "golden" / "transport.json"


def params(seed: int = 0, dtype=torch.float32) -> list[nn.Parameter]:
    """Matrices of one shape, another, and two vectors."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(6, 5), (6, 5), (4, 8), (5,), (5,)]
    return [nn.Parameter(torch.randn(s, generator=g, dtype=dtype)) for s in shapes]


# whether the optimizers of a test keep x, or compute it where they can
FORM = {"store_iterate": False}


@pytest.fixture(params=["stored", "computed"])
def both_forms(request, monkeypatch):
    """Everything holds for an x that is kept and for one that is computed."""
    monkeypatch.setitem(FORM, "store_iterate", request.param == "stored")


def made(own, mode: str = "eager", **more) -> MARS:
    kwargs = dict(lr=LR, gamma=GAMMA, correction="transport", ns_dtype=torch.float32)
    return build(own, mode, **{**kwargs, **FORM, **more})


def held(optimizer) -> list[torch.Tensor]:
    """What parameters are not: x in train mode, in eval mode the points ahead."""
    if optimizer.param_groups[0].get("train_mode", True):
        found = dict(optimizer.iterates())
        return [found[p].clone() for p in optimizer.state]
    entries = optimizer.state.values()
    return [entry.get("ahead", entry.get("iterate")).clone() for entry in entries]


@torch.no_grad()
def write(own, values) -> None:
    for p, value in zip(own, values, strict=True):
        p.copy_(value)


# ---- the class is the functional rule ------------------------------------------------


@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mars_type", TYPES)
def test_the_class_is_the_rule(mars_type, mode, monkeypatch):
    forced(monkeypatch, mode)
    mine, theirs = params(), params()
    options = dict(mars_type=mars_type, gamma_1d=0.05, max_norm=2.0)
    if mars_type in ("adamw", "nadamw", "lion"):  # nothing is beside the rule
        del options["gamma_1d"]
    optimizer = made(mine, mode, **options)
    options |= dict(ns_dtype=torch.float32)
    rule = marsopt.mars(correction="transport", gamma=GAMMA, base_lr=LR, **options)
    y = [p.detach() for p in theirs]
    state = rule.init(y)
    for seed in range(4):
        run(optimizer, mine, [seed])
        fill(theirs, seed)
        y, state = rule.step(y, [p.grad for p in theirs], state, lr=LR)
    equal(mine, y, 1e-6)
    optimizer.eval()
    equal(mine, rule.iterate(y, state), 1e-6)


@pytest.mark.parametrize(
    ("both_forms", "mode"),
    [("stored", "leaves"), ("computed", "stacks")],
    indirect=["both_forms"],
)
def test_compiled_is_eager_and_never_recompiles(both_forms, mode, monkeypatch):
    """While gamma moves, per group and scheduled, and a step is skipped."""
    forced(monkeypatch, mode)
    fast, slow = ([own[0], own[1], own[3]] for own in (params(), params()))
    compiled, eager = made(fast, mode, max_norm=1.0), made(slow, max_norm=1.0)
    for t in range(5):
        for optimizer, own in ((compiled, fast), (eager, slow)):
            fill(own, t)
            if t == 3:
                own[0].grad[0, 0] = torch.nan
            optimizer.param_groups[0].update(gamma=0.2 / (1 + t), gamma_1d=0.01 * t)
        stance = "fail_on_recompile" if t else "default"
        with torch.compiler.set_stance(stance):
            compiled.step()
        eager.step()
        equal(fast, slow, 1e-6)
        equal(held(compiled), held(eager), 1e-6)
    assert compiled.num_skipped == eager.num_skipped == 1


def test_a_recorded_trajectory():
    """Twelve steps on recorded losses, as the NumPy oracle computed them once."""
    golden = json.loads(GOLDEN.read_text())
    for name, case in golden.items():
        x = torch.tensor(case["x"], dtype=torch.float64)
        targets = torch.tensor(case["targets"], dtype=torch.float64)
        rule = marsopt.mars(
            mars_type=name,
            correction="transport",
            gamma=case["gamma"],
            base_lr=case["lr"],
            ns_dtype=torch.float64,
        )
        y, state = [x], rule.init([x])
        for target in targets:  # the gradient of sum cosh(y - target)
            g = [torch.sinh(y[0] - target)]
            y, state = rule.step(y, g, state, lr=case["lr"])
        for found, what in ((y, "y"), (rule.iterate(y, state), "iterate")):
            want = torch.tensor(case[what], dtype=torch.float64)
            torch.testing.assert_close(found[0], want, rtol=0, atol=1e-7)


# ---- modes ---------------------------------------------------------------------------


@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_eval_and_train_exchange_bit_for_bit(mode, dtype, monkeypatch):
    forced(monkeypatch, mode)
    own = params(dtype=dtype)
    optimizer = made(own, mode)
    run(optimizer, own, range(3))
    y, x = copies(own), held(optimizer)
    assert not any(map(torch.equal, x, y))
    for _ in range(2):  # called twice as well, as trainers do
        optimizer.eval()
    equal(own, x)
    equal(held(optimizer), y)
    for _ in range(2):
        optimizer.train()
    equal(own, y)
    equal(held(optimizer), x)


@pytest.mark.usefixtures("both_forms")
def test_a_step_in_eval_mode_is_an_error():
    own = params()
    optimizer = made(own)
    run(optimizer, own, range(2))
    optimizer.eval()
    before = copies(own)
    fill(own, 2)
    with pytest.raises(RuntimeError, match=r"step\(\) in eval mode.*call optimizer"):
        optimizer.step()
    equal(own, before)
    optimizer.train()
    optimizer.step()


@pytest.mark.parametrize("correction", ["approximate", "exact"])
def test_other_corrections_have_no_modes(correction):
    own = params()
    optimizer = made(own, correction=correction)
    before = copies(own)
    optimizer.eval()
    equal(own, before)
    optimizer.train()
    assert "train_mode" not in optimizer.param_groups[0]


@pytest.mark.usefixtures("both_forms")
def test_what_is_skipped_or_has_no_gradient_stays():
    own = params()
    optimizer = made(own)
    run(optimizer, own, range(2))
    y, x = copies(own), held(optimizer)
    fill(own, 2)
    own[0].grad[0, 0] = torch.inf
    optimizer.step()
    equal(own, y)
    equal(held(optimizer), x)
    fill(own, 3)
    own[1].grad = None
    optimizer.step()
    equal([own[1], held(optimizer)[1]], [y[1], x[1]])
    assert not torch.equal(own[0], y[0])


def test_gamma_is_that_of_the_step_that_leaves_the_lookahead():
    own = params()
    optimizer = made(own, mars_type="mars-lion", gamma=0.0)
    run(optimizer, own, [0])
    equal(own, held(optimizer))
    before = held(optimizer)
    optimizer.param_groups[0].update(gamma=0.2, gamma_1d=0.4)
    run(optimizer, own, [1])
    for p, x, x_prev in zip(own, held(optimizer), before, strict=True):
        k = 0.2 * 0.95 / 0.05 if p.ndim == 2 else 0.4 * 0.9 / 0.1
        equal([p], [x + k * (x - x_prev)], 1e-6)


@pytest.mark.usefixtures("both_forms")
def test_one_cycle_cycles_the_first_beta_and_with_it_the_lookahead():
    """That of the AdamW beside the rule stays; vectors' rate keeps its proportion."""
    own = params()
    optimizer = made(own, lr=0.02, lr_1d=0.01, weight_decay_1d=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.04, total_steps=9
    )
    group, seen = optimizer.param_groups[0], []
    before = copies(own)
    for t in range(9):
        run(optimizer, own, [t])
        beta1 = group["betas"][0]
        seen.append((beta1, group["lr"]))
        for p, x, x_prev in zip(own, held(optimizer), before, strict=True):
            b = beta1 if p.ndim == 2 else 0.9
            equal([p], [x + GAMMA * b / (1 - b) * (x - x_prev)], 1e-5)
        before = held(optimizer)
        if t < 8:
            scheduler.step()
    betas, rates = zip(*seen, strict=True)
    assert betas[0] == pytest.approx(0.95) and min(betas) < 0.87
    assert group["betas"][1] == 0.99 and group["betas_1d"] == (0.9, 0.95)
    assert rates.index(max(rates)) == betas.index(min(betas))
    optimizer = made(own, lr=0.02, lr_1d=0.01, weight_decay_1d=0.5, gamma=0.0)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.04, total_steps=9)
    for p in own:
        p.grad = torch.zeros_like(p)
    before = copies(own)
    optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    equal(own[3:], [x * (1 - rate * 0.01 / 0.02 * 0.5) for x in before[3:]], 1e-6)


def test_contradictions_are_errors():
    with pytest.raises(ValueError, match="is_approx=False with correction='transport'"):
        made(params(), is_approx=False)
    with pytest.raises(ValueError, match="gamma_1d=0.1 with correction='approximate'"):
        MARS(params(), gamma_1d=0.1)
    with pytest.raises(ValueError, match="got gamma_1d=0.1 with correction='exact'"):
        marsopt.mars(gamma_1d=0.1, is_approx=False)
    with pytest.raises(ValueError, match="'none', expected None or .* baseline as it"):
        MARS(params(), mars_type="moonlight", correction="none")
    with pytest.raises(ValueError, match="got gamma_1d=nan"):
        marsopt.mars(correction="transport", gamma_1d=float("nan"))
    with pytest.raises(ValueError, match="got a reference"):
        rule, x = marsopt.mars_adamw(correction="transport"), [torch.ones(2)]
        rule.step(x, x, rule.init(x), lr=LR, reference=x)


def test_the_protocol_of_exact_mars_does_nothing():
    own = params()
    optimizer = made(own)
    fill(own, 0)
    optimizer.update_previous_grad()
    optimizer.step()
    optimizer.update_last_grad()


# ---- saved and loaded ----------------------------------------------------------------


@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("model_first", [False, True])
@pytest.mark.parametrize("in_eval", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_is_the_run(mode, in_eval, model_first, monkeypatch):
    """Saved in either mode, loaded in either order, into other parameters."""
    forced(monkeypatch, mode)
    own, new = params(), params(1)
    optimizer = made(own, mode)
    run(optimizer, own, range(3))
    if in_eval:
        optimizer.eval()
    weights, state = copies(own), copy.deepcopy(optimizer.state_dict())
    optimizer.train()
    run(optimizer, own, range(3, 6))

    other = made(new, mode)

    if model_first:
        write(new, weights)
    other.load_state_dict(state)
    if not model_first:
        write(new, weights)
    assert other.param_groups[0]["train_mode"] is not in_eval
    other.train()
    run(other, new, range(3, 6))
    equal(new, own)
    equal(held(other), held(optimizer))


@pytest.mark.usefixtures("both_forms")
def test_saving_in_train_mode_says_so_once(caplog):
    own = params()
    optimizer = made(own, lr_1d=LR)
    with caplog.at_level(logging.WARNING):
        optimizer.state_dict()  # before the first step y is x
        run(optimizer, own, range(2))
        optimizer.eval()
        optimizer.state_dict()
        assert not caplog.records
        optimizer.train()
        optimizer.state_dict()
        optimizer.state_dict()
    (record,) = caplog.records
    assert "state_dict() in train mode" in record.getMessage()
    assert "optimizer.eval()" in record.getMessage()


@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("to", ["transport", "approximate"])
def test_another_correction_restarts_what_the_two_do_not_share(to, caplog):
    """Moments go on; x starts where the parameters are, h at zero; said once."""
    since = {"transport": "approximate", "approximate": "transport"}[to]
    own, new = params(), params(1)
    optimizer = made(own, correction=since)
    run(optimizer, own, range(3))
    optimizer.eval()
    other = made(new, correction=to)
    run(other, new, [7])
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(optimizer.state_dict())
    (record,) = [r for r in caplog.records if "another correction" in r.getMessage()]
    x = "iterate" if FORM["store_iterate"] else "lookahead"
    anew = {"transport": x, "approximate": "last_grad"}[to]
    assert anew in record.getMessage()
    write(new, own)
    for p, q in zip(new, own, strict=True):
        equal([other.state[p]["exp_avg"]], [optimizer.state[q]["exp_avg"]])
    if to == "approximate":
        assert not any(other.state[p]["last_grad"].any() for p in new[:3])
        assert "train_mode" not in other.param_groups[0]
    before = copies(new)
    run(other, new, [3])
    other.eval()
    moved = [
        float((p.detach() - x).abs().max()) for p, x in zip(new, before, strict=True)
    ]
    assert all(0 < size < 3 * LR for size in moved)  # from where the weights were


@pytest.mark.usefixtures("both_forms")
def test_copies_and_pickles_go_on():
    own = params()
    optimizer = made(own)
    run(optimizer, own, range(3))
    again = copy.deepcopy(optimizer)
    new = again.param_groups[0]["params"]
    run(optimizer, own, [3])
    run(again, new, [3])
    equal(new, own)
    equal(held(again), held(optimizer))


# ---- x that is computed --------------------------------------------------------------

COMPUTED = ("adamw", "mars-adamw")  # as the AdamW beside other rules


def moments(optimizer, p) -> set[str]:
    return set(optimizer.state[p]) - {"step"}


@pytest.mark.parametrize("mars_type", TYPES)
def test_adamw_keeps_its_moments_and_four_numbers(mars_type):
    """In place of x, which other rules keep, and all where it would be rounded."""
    own = params()
    for dtype, state_dtype in (
        (torch.float32, None),
        (torch.float64, None),
        (torch.float32, torch.float64),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
    ):
        own = params(dtype=dtype)
        optimizer = made(own, mars_type=mars_type, state_dtype=state_dtype)
        exact = state_dtype is None and dtype.itemsize >= 4
        for p in own:
            beside = p.ndim < 2 and mars_type not in ("nadamw", "lion")
            computed = exact and (mars_type in COMPUTED or beside)
            assert ("lookahead" in optimizer.state[p]) is computed
            assert ("iterate" in optimizer.state[p]) is not computed
            if computed:
                assert optimizer.state[p]["lookahead"].shape == (4,)
                assert moments(optimizer, p) >= {"exp_avg", "exp_avg_sq", "lookahead"}


HARD = [
    dict(),
    dict(amsgrad=True),
    dict(epsilon_hat=True, eps=1e-3),
    dict(weight_decay=0.0),
    dict(weight_decay=5.0),
    dict(gamma=-0.1),
    dict(gamma=0.0),
    dict(clip=None, max_norm=0.5),
    dict(clip=1e-2, matrices="batched"),
    dict(betas=(0.0, 0.9)),
    dict(optimize_1d=True),
]


@pytest.mark.parametrize("options", HARD, ids=str)
def test_x_that_is_computed_is_x(options):
    """In float64 to rounding, with a schedule to zero and back, skipped steps and
    gradients that are missing.
    """
    both = params(dtype=torch.float64), params(dtype=torch.float64)
    forms = dict(weight_decay=0.1) | options
    optimizers = [
        made(own, store_iterate=stores, **forms)
        for own, stores in zip(both, (True, False), strict=True)
    ]
    for t in range(12):
        for optimizer, own in zip(optimizers, both, strict=True):
            fill(own, t)
            optimizer.param_groups[0]["lr"] = LR * (0, 1, 0.5, 2)[t % 4]
            if t == 5:
                own[0].grad[0, 0] = torch.inf
            if t == 7:
                own[1].grad = None
            optimizer.step()
        equal(*both, 1e-12)
        equal(held(optimizers[1]), held(optimizers[0]), 1e-12)


def test_a_step_that_halves_x_leaves_no_lookahead():
    """x would follow from y with all its digits lost; nothing is told from such y."""
    own = params()
    optimizer = made(own, weight_decay=0.5, lr=0.5, weight_decay_1d=1.0, lr_1d=0.5)
    run(optimizer, own, range(3))  # (1 + k) lr weight_decay = 2.9 * 0.25
    equal(own, held(optimizer))
    optimizer.param_groups[0].update(lr=0.05, base_lr=0.5)
    run(optimizer, own, [3])
    assert not any(map(torch.equal, own[:3], held(optimizer)))
    assert all(p.isfinite().all() for p in own)
    optimizer.param_groups[0].update(lr=2.0)  # nothing is left of x
    run(optimizer, own, range(4, 6))
    equal(own[:3], held(optimizer)[:3])
    assert all(p.isfinite().all() for p in (*own, *held(optimizer)))


def clamped(*args) -> torch.Tensor:
    """AdamW's new x, but for steps that are cut."""
    return args[1] + (marsopt.AdamW.x_after(*args) - args[1]).clamp(-1e-4, 1e-4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Update(marsopt.AdamW):
    def update(self, x, c, buffers, s):
        _, new = super().update(x, c, buffers, s)
        return clamped(self, x, c, new, s), new


@dataclass(frozen=True, kw_only=True, eq=False)
class After(marsopt.AdamW):
    x_after = clamped


@pytest.mark.parametrize("kind", [Update, After])
@pytest.mark.parametrize("rounds", [False, True])
def test_x_is_kept_for_formulas_of_ones_own(kind, rounds):
    narrow = dict(state_dtype=torch.bfloat16, stochastic_rounding=True)
    algorithm = marsopt.Algorithm(
        preconditioner=kind(),
        correction=marsopt.Transport(gamma=0.05),
        **(narrow if rounds else {}),
    )
    rule, x = marsopt.Rule(matrix=algorithm), {"w": torch.zeros(3)}
    y, state = rule.step(x, {"w": torch.ones(3)}, rule.init(x), lr=0.01)
    torch.testing.assert_close(rule.iterate(y, state)["w"], torch.full((3,), -1e-4))


def test_x_that_restarts_is_said(caplog):
    own = params()[:2]
    optimizer = made(own, mars_type="adamw")
    optimizer.param_groups[0]["amsgrad"] = True  # before the first step
    run(optimizer, own, range(2))
    new = [nn.Parameter(p) for p in copies(own)]  # of another rule until it is loaded
    made(new, mars_type="lion").load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": params(dtype=torch.bfloat16)[2:]})
    run(optimizer, own, [2])
    assert "restarts" not in caplog.text
    other = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optimizer.param_groups[0]["params"].append(other)
    run(optimizer, own, [3])
    assert caplog.text.count("x of transport restarts from what parameters hold") == 1
    optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[0]["amsgrad"] = False
    run(optimizer, own, [4])
    assert caplog.text.count("x of transport restarts from what parameters hold") == 2
    optimizer.param_groups[0]["amsgrad"] = True
    run(optimizer, own, [5])
    assert caplog.text.count("x of transport restarts from what parameters hold") == 3


@pytest.mark.parametrize("change", [dict(amsgrad=True), dict(mars_type="lion")])
def test_x_restarts_where_its_moments_do(change):
    """It followed from them; parameters are the truth then."""
    own = params()
    optimizer = made(own, mars_type="adamw", lr=LR)
    group = optimizer.param_groups[0]
    for now in (change, dict(amsgrad=False, mars_type="adamw")):
        run(optimizer, own, range(3))
        y = copies(own)
        group.update(now, lr=0.0, base_lr=LR)
        fill(own, 3)
        optimizer.step()
        equal(own, y)
        equal(held(optimizer), y)
        group.update(lr=LR)


@pytest.mark.usefixtures("both_forms")
def test_our_writes_into_pieces_of_one_buffer_are_ours(caplog):
    own, apart = in_one_buffer(params()), params()
    optimizer, expected = made(own), made(apart)
    for each, mine in ((optimizer, own), (expected, apart)):
        run(each, mine, range(3))
    y = copies(own)
    optimizer.eval()
    optimizer.state_dict()
    optimizer.train()
    equal(own, y)
    for each, mine in ((optimizer, own), (expected, apart)):
        run(each, mine, [3])
    equal(own, apart)
    assert "was written between" not in caplog.text


@pytest.mark.parametrize("in_eval", [False, True])
@pytest.mark.parametrize(
    ("saved", "present"),
    [
        (dict(store_iterate=True), dict()),
        (dict(), dict(store_iterate=True)),
        (dict(), dict(state_dtype=torch.float64)),
    ],
    ids=["x, computed", "computed, x", "computed, x by dtype"],
)
def test_a_state_dict_of_the_other_form_is_refused_and_changes_nothing(
    saved, present, in_eval
):
    own, new = params(), params(1)
    optimizer, other = made(own, **saved), made(new, **present)
    run(optimizer, own, range(3))
    run(other, new, range(2))
    if in_eval:
        optimizer.eval()
    state, before = optimizer.state_dict(), copy.deepcopy(other.state_dict())
    y, x = copies(new), held(other)
    keeps = "store_iterate=True, or with " if "store_iterate" in saved else ""
    said = (
        f"parameter 0 of group 0, expected .* build MARS with {keeps}those of the run"
    )
    with pytest.raises(ValueError, match=said):
        other.load_state_dict(state)
    after = other.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    equal([*new, *held(other)], [*y, *x])
    run(other, new, [2])


def test_moments_of_python_numbers_are_loaded():
    own = [nn.Parameter(torch.tensor(0.5))]
    optimizer = made(own, mars_type="adamw")
    run(optimizer, own, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        saved["state"][0][key] = saved["state"][0][key].item()
    before = copies(own)
    optimizer.load_state_dict(saved)
    run(optimizer, own, [2])
    assert not torch.equal(own[0], before[0])


def test_the_point_ahead_takes_memory_in_eval_mode_alone():
    own = params()
    optimizer = made(own, optimize_1d=True)

    def num_bytes():
        every = [v for entry in optimizer.state.values() for v in entry.values()]
        return sum(v.nbytes for v in every if v.numel() > 4)

    size = sum(p.nbytes for p in own)
    run(optimizer, own, range(2))
    assert num_bytes() == 2 * size
    optimizer.eval()
    assert num_bytes() == 3 * size
    optimizer.train()
    assert num_bytes() == 2 * size


def test_a_point_ahead_that_was_not_saved_is_computed():
    """As DCP loads into an optimizer in train mode what was saved in eval mode."""
    own, new = params(), params(1)
    optimizer = made(own)
    run(optimizer, own, range(3))
    y = copies(own)
    optimizer.eval()
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        del entry["ahead"]
    other = made(new)
    write(new, own)
    other.load_state_dict(state)
    other.train()
    equal(new, y, 1e-6)


def test_a_rule_that_computes_x_refuses_a_state_that_has_it():
    x = [torch.ones(3)]
    stored = marsopt.mars_adamw(correction="transport", store_iterate=True)
    computed = marsopt.mars_adamw(correction="transport")
    state = stored.init(x)
    with pytest.raises(ValueError, match="store_iterate=True takes a state"):
        computed.step(x, x, state, lr=LR)
    with pytest.raises(ValueError, match="store_iterate=True takes a state"):
        computed.iterate(x, state)
    with pytest.raises(ValueError, match="got a state without x"):
        stored.step(x, x, computed.init(x), lr=LR)
    with pytest.raises(ValueError, match="got store_iterate=1, expected True or False"):
        marsopt.mars_adamw(correction="transport", store_iterate=1)


# ---- what others write ---------------------------------------------------------------


@pytest.mark.usefixtures("both_forms")
@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("in_eval", [False, True])
@pytest.mark.parametrize("by_data", [False, True])
def test_what_is_written_between_steps_is_not_lost(in_eval, by_data, caplog):
    """Loaded, averaged or clamped weights are the new x, said once."""
    own = params()
    optimizer = made(own)
    run(optimizer, own, range(3))
    written = [p.detach() + 1 for p in own]
    if in_eval:
        optimizer.eval()
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for p, value in zip(own, written, strict=True):
            if by_data:
                p.data = value.clone()
            else:
                p.copy_(value)
        optimizer.train()
        if in_eval:
            equal(own, written)  # y starts there too
        optimizer.param_groups[0].update(lr=0.0, base_lr=1.0)
        run(optimizer, own, [3])
    optimizer.eval()
    equal(own, written)
    told = [r for r in caplog.records if "lookahead restarts" in r.getMessage()]
    assert len(told) == 1


def accelerated(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate's prepare does
    return optimizer


@pytest.mark.usefixtures("both_forms")
@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("handed", [accelerated, copy.deepcopy])
@pytest.mark.parametrize("before", [False, True])
def test_weights_loaded_around_a_copy_of_a_fresh_optimizer_are_kept(handed, before):
    """Before its first step a parameter is the truth, whatever its x is."""
    own = params()
    optimizer = made(own)
    if not before:
        optimizer = handed(optimizer)
        own = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        for p in own:
            p.add_(5)
    if before:
        optimizer = handed(optimizer)
        own = optimizer.param_groups[0]["params"]
    want = copies(own)
    run(optimizer, own, range(2))
    for p, value in zip(own, want, strict=True):
        assert float((p.detach() - value).abs().max()) < 0.5


@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("saved_by", ["state_dict", "deepcopy"])
def test_what_is_written_before_saving_is_saved(saved_by):
    own, new = params(), params(1)
    optimizer = made(own)
    run(optimizer, own, range(3))
    with torch.no_grad():
        for p in own:
            p.add_(5)
    if saved_by == "deepcopy":
        other = copy.deepcopy(optimizer)
        new = other.param_groups[0]["params"]
    else:
        other = made(new)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        write(new, own)
    run(optimizer, own, [3])
    run(other, new, [3])
    equal(new, own)
    equal(held(other), held(optimizer))


@pytest.mark.usefixtures("both_forms")
@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("how", ["thawed", "added"])
def test_a_layout_made_anew_is_no_write(how, caplog):
    own, reference = params(), params()
    late = [own.pop(1), reference.pop(1)]
    optimizers = []
    for each, last in ((own, late[0]), (reference, late[1])):
        last.requires_grad_(how == "added")
        group = each + ([last] if how == "thawed" else [])
        optimizers.append(made(group, lr_1d=LR))
        run(optimizers[-1], each, range(3))
    optimizer, other = optimizers
    x = [x.clone() for p, x in optimizer.iterates() if p is not late[0]]
    if how == "thawed":
        late[0].requires_grad_(True)
        fill([late[0]], 9)
    else:
        optimizer.add_param_group({"params": [late[0]]})
    optimizer.eval()
    equal(own, x)
    optimizer.train()
    equal(own, reference)
    assert not caplog.records
    assert other is not optimizer


@pytest.mark.parametrize("mars_type", ["moonlight", "muon", "normuon", "mars-m"])
def test_averages_go_on_under_another_name(mars_type):
    """A baseline's momentum_buffer, and approximate MARS's average without clip."""
    options = dict(mars_type=mars_type, clip=None)
    own, new = params(), params(1)
    optimizer = made(own, correction="approximate", **options)
    run(optimizer, own, range(3))
    other = made(new, **options)
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(new[:3], own[:3], strict=True):
        (key,) = {"momentum_buffer", "grad_avg"} & set(optimizer.state[q])
        equal([other.state[p]["exp_avg"]], [optimizer.state[q][key]])
    back = made(own, correction="approximate", **options)
    back.load_state_dict(other.state_dict())
    for p, q in zip(new[:3], own[:3], strict=True):
        (key,) = {"momentum_buffer", "grad_avg"} & set(back.state[q])
        equal([back.state[q][key]], [other.state[p]["exp_avg"]])


def test_a_mode_in_a_group_means_nothing_to_other_corrections():
    own, more = params(), params(1)
    groups = [{"params": own}, {"params": more, "train_mode": False}]
    optimizer = made(groups, correction="approximate")
    run(optimizer, own + more, range(2))


@pytest.mark.usefixtures("both_forms")
def test_writing_before_every_step_is_an_error():
    """As SAM does: the step would be taken from y, which is another algorithm."""
    own = params()
    optimizer = made(own)
    run(optimizer, own, range(2))
    for seed in (2, 3):
        with torch.no_grad():
            own[0].mul_(1.0)
        run(optimizer, own, [seed])
    run(optimizer, own, [4])  # not this time
    for seed in (5, 6):
        with torch.no_grad():
            own[0].mul_(1.0)
        run(optimizer, own, [seed])
    before = copies(own)
    with torch.no_grad():
        own[0].mul_(1.0)
    with pytest.raises(RuntimeError, match=r"before each of 3 steps.*optimizer\.eval"):
        run(optimizer, own, [7])
    equal(own, before)


@pytest.mark.usefixtures("both_forms")
@pytest.mark.usefixtures("both_layouts")
def test_weights_loaded_before_the_first_step_are_where_it_starts(caplog):
    own, reference = params(), params(1)
    optimizer = made(own, lr_1d=LR)
    write(own, reference)
    other = made(reference, lr_1d=LR)
    run(optimizer, own, range(3))
    run(other, reference, range(3))
    equal(own, reference)
    equal(held(optimizer), held(other))
    assert not caplog.records


@pytest.mark.usefixtures("both_forms")
def test_a_partial_load_that_passes_x_by_takes_the_loaded_weights():
    """DCP with allow_partial_load, from a checkpoint of another correction: the state
    dict that is loaded is the one that was handed out, x as it was.
    """
    own = params()
    optimizer = made(own)
    run(optimizer, own, range(3))
    template = optimizer.state_dict()
    weights = [p.detach() + 1 for p in own]
    write(own, weights)
    optimizer.load_state_dict(template)
    optimizer.eval()
    equal(own, weights)


@pytest.mark.usefixtures("both_forms")
def test_loading_its_own_state_dict_changes_nothing():
    own = params()
    optimizer = made(own)
    run(optimizer, own, range(3))
    y, x = copies(own), held(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.eval()
    equal(own, x)
    optimizer.train()
    equal(own, y)


@pytest.mark.usefixtures("both_forms")
def test_a_group_added_in_eval_mode_joins_it():
    own, more = params(), params(1)
    optimizer = made(own)
    run(optimizer, own, range(2))
    optimizer.eval()
    optimizer.add_param_group({"params": more})
    weights = copies(more)
    optimizer.train()
    equal(more, weights)
    run(optimizer, own + more, range(2))
    assert {group["train_mode"] for group in optimizer.param_groups} == {True}


# ---- models that are followed --------------------------------------------------------


def pair(follow=True, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = made(model.parameters())
    if follow:
        optimizer.follow(model)
    return model, optimizer


def batch(seed):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def trained(model, optimizer, steps, between=lambda: None):
    """Losses of ordinary steps, with something done after each, or before one."""
    losses = []
    for t in steps:
        loss = model(batch(t)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        between()
        losses.append(loss.detach())
    return losses


@pytest.mark.usefixtures("both_forms")
@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_a_model_in_eval_mode_holds_what_is_trained(inference):
    """Also where its parts are in another mode, and validation comes before training
    and twice.
    """
    model, optimizer = pair()
    plain, other = pair(follow=False)
    held_out = [[], []]

    def validate():
        model.eval()
        model[0].train()
        with inference():
            held_out[0] += [model(batch(99)).square().mean() for _ in range(2)]
        model.train()
        model[2].eval()

    def validate_by_hand():
        other.eval()
        with torch.no_grad():
            held_out[1] += [plain(batch(99)).square().mean() for _ in range(2)]
        other.train()

    validate()
    validate_by_hand()
    found = trained(model, optimizer, range(4), validate)
    equal(found, trained(plain, other, range(4), validate_by_hand))
    equal(*held_out)
    model(batch(4))
    equal(model.parameters(), plain.parameters())


@pytest.mark.usefixtures("both_forms")
@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_state_dicts_are_of_what_is_trained_and_training_resumes_from_them(order):
    model, optimizer = pair()
    plain, other = pair(follow=False)
    saved = {}

    def save():
        sources = dict(model=model, optimizer=optimizer)
        saved.update({name: sources[name].state_dict() for name in order})
        saved.update(copy.deepcopy(saved))

    trained(model, optimizer, range(2), save)
    model(batch(2)).square().mean().backward()  # on top, without a step
    optimizer.zero_grad()
    loss = model(batch(2)).square().mean()
    loss.backward()
    save()  # between a backward pass and its step
    optimizer.step()
    first = trained(model, optimizer, range(3, 6))

    trained(plain, other, range(2))
    other.eval()
    equal(saved["model"].values(), plain.parameters())
    other.train()
    want = trained(plain, other, range(2, 6))
    equal([loss, *first], want)
    equal(model.parameters(), plain.parameters())

    again, resumed = pair(seed=1)
    targets = dict(model=again, optimizer=resumed)
    for name in order:
        targets[name].load_state_dict(saved[name])
    equal(trained(again, resumed, range(2, 6)), want)
    equal(again.parameters(), model.parameters())


@pytest.mark.usefixtures("both_forms")
def test_state_dicts_of_parts_and_with_variables_are_of_what_is_trained():
    model, optimizer = pair()
    trained(model, optimizer, range(3))
    want = [x.clone() for _, x in optimizer.iterates()]
    y = copies(model.parameters())
    assert not any(map(torch.equal, y, want))
    equal(model[0].state_dict().values(), want[:2])
    assert model.state_dict(keep_vars=True)["2.bias"] is model[2].bias
    model(batch(0))
    equal(model.parameters(), y)
    with pytest.raises(RuntimeError, match="in eval mode"):
        model.state_dict()
        optimizer.eval()  # to stay there
        optimizer.step()


@pytest.mark.usefixtures("both_forms")
def test_weights_that_a_followed_model_loads_are_where_it_goes_on():
    model, optimizer = pair()
    trained(model, optimizer, range(2))
    best = copy.deepcopy(model.state_dict())
    trained(model, optimizer, range(2, 4))
    model.load_state_dict(best)
    equal([x for _, x in optimizer.iterates()], best.values())
    for group in optimizer.param_groups:
        group.update(lr=0.0, base_lr=1.0)
    trained(model, optimizer, [4])
    equal(model.state_dict().values(), best.values())


@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("how", ["written", "in eval mode", "before", "after"])
@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_other_weights_beside_a_loaded_state_are_where_it_goes_on(order, how):
    """An average, or a head that starts anew, in place of what was saved: whoever came
    first, and also where one half of a tensor alone is other.
    """
    model, optimizer = pair()
    trained(model, optimizer, range(3))
    saved = copy.deepcopy(
        dict(model=model.state_dict(), optimizer=optimizer.state_dict())
    )
    others = copy.deepcopy(saved["model"])
    for tensor in others.values():
        tensor[: len(tensor) // 2] += 5
    again, resumed = pair(seed=1)
    if how == "before":
        saved["model"] = others
    for name in order:
        dict(model=again, optimizer=resumed)[name].load_state_dict(saved[name])
    if how == "after":
        again.load_state_dict(others)
    elif how != "before":
        if how == "in eval mode":
            again.eval()
            again(batch(0))
        for p, value in zip(again.parameters(), others.values(), strict=True):
            write([p], [value])
    again.train()
    equal([x for _, x in resumed.iterates()], others.values())
    for group in resumed.param_groups:
        group.update(lr=0.0, base_lr=1.0)
    trained(again, resumed, [3])
    equal(again.state_dict().values(), others.values(), atol=1e-6)


def forwards(kind, model):
    """Call the model where parameters must not be written, or are recorded."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    if kind == "grad":
        torch.func.grad(
            lambda params: torch.func.functional_call(model, params, batch(0)).sum()
        )(params)
    elif kind == "jacrev":
        torch.func.jacrev(lambda x: model(x))(batch(0))
    elif kind == "trace":
        torch.jit.trace(model, batch(0))
    else:
        with FakeTensorMode():
            model(batch(0))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("kind", ["grad", "jacrev", "trace", "fake"])
def test_modes_are_not_switched_where_writes_are_forbidden_or_recorded(kind):
    """... and the optimizer is as it was."""
    model, optimizer = pair()
    trained(model, optimizer, range(3))
    y = copies(model.parameters())
    model.eval()
    with pytest.raises(RuntimeError, match="nothing has changed; call it before"):
        forwards(kind, model)
    equal(model.parameters(), y)
    model.eval()
    model(batch(0))  # x from here on
    x = copies(model.parameters())
    if kind != "fake":
        forwards(kind, model)
    equal(model.parameters(), x)
    model.train()
    trained(model, optimizer, range(3, 5))


@pytest.mark.usefixtures("both_forms")
def test_autocast_keeps_no_casts_of_what_parameters_were():
    model, optimizer = pair()
    trained(model, optimizer, range(3))
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        y_loss = model(batch(0)).sum()
        model.eval()
        x_loss = model(batch(0)).sum()
        model.train()
        assert model(batch(0)).sum() == y_loss != x_loss
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(batch(0)).sum() == x_loss


@pytest.mark.parametrize(
    "how", ["followed, wrapped", "wrapped, followed", "wrapped, full graph", "in place"]
)
def test_a_compiled_model_is_followed(how):
    model, optimizer = pair(follow=False)
    plain, other = pair()
    options = dict(backend="eager", fullgraph="full" in how)
    if how == "followed, wrapped":
        optimizer.follow(model)
    if how == "in place":
        model.compile(**options)
    else:
        model = torch.compile(model, **options)
    if how != "followed, wrapped":
        optimizer.follow(model)
    seen = [[], []]
    for losses, each, mars in zip(
        seen, (model, plain), (optimizer, other), strict=True
    ):
        for t in range(3):
            losses += trained(each, mars, [t])
            each.eval()
            with torch.no_grad():
                losses.append(each(batch(99)).square().mean())
            each.train()
    equal(*seen)
    trained(model, optimizer, [3])
    weights = model.state_dict()
    trained(plain, other, [3])
    equal(weights.values(), plain.state_dict().values())


@pytest.mark.usefixtures("both_forms")
def test_copies_and_pickles_of_a_followed_model_are_nobodys():
    model, optimizer = pair()
    trained(model, optimizer, range(3))
    y = copies(model.parameters())
    again = pickle.loads(pickle.dumps(model))
    for twin in (copy.deepcopy(model), again):
        twin.eval()(batch(0))
        twin.state_dict()
        equal(model.parameters(), y)
        assert len(pickle.dumps(twin)) < 10_000
    with pytest.raises(ValueError, match="none of this optimizer's parameters"):
        optimizer.follow(again)
    with pytest.raises(TypeError, match="got list, expected the model"):
        optimizer.follow(list(model.parameters()))


@pytest.mark.usefixtures("both_forms")
def test_a_followed_optimizer_lives_while_parameters_are_ahead():
    model, optimizer = pair()
    trained(model, optimizer, range(3))
    x = [x.clone() for _, x in optimizer.iterates()]
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    model.eval()(batch(0))
    equal(model.parameters(), x)
    gc.collect()
    assert seen() is None
    model.train()(batch(0))
    equal(model.parameters(), x)


@pytest.mark.usefixtures("both_forms")
def test_the_next_optimizer_of_a_model_starts_from_what_was_trained():
    model, first = pair()
    trained(model, first, range(3))
    x = [x.clone() for _, x in first.iterates()]
    second = MARS(model.parameters(), correction="transport", compile=False)
    second.follow(model)
    equal(model.parameters(), x)
    trained(model, second, [3])
    y = copies(model.parameters())
    expected = [x.clone() for _, x in second.iterates()]
    model.eval()(batch(0))
    equal(model.parameters(), expected)
    model.train()(batch(0))
    equal(model.parameters(), y)


def test_following_twice_several_models_and_more_than_is_optimized():
    model, optimizer = pair()
    frozen, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer.add_param_group({"params": second.parameters()})
    whole = nn.Sequential(model, frozen)
    for each in (whole, whole, second):
        optimizer.follow(each)
    trained(nn.Sequential(whole, second), optimizer, range(3))
    x = {p: x.clone() for p, x in optimizer.iterates()}
    y = {p: p.detach().clone() for p in x}
    second.eval()(torch.ones(1, 2))
    equal(x, x.values())
    whole(batch(0))
    equal(y, y.values())
    equal(second.state_dict().values(), [x[p] for p in second.parameters()])
    equal(whole.state_dict().values(), whole.parameters())
    equal(x, x.values())


@pytest.mark.parametrize("correction", ["approximate", "exact"])
def test_following_is_nothing_to_other_corrections(correction):
    model = nn.Linear(4, 2)
    optimizer = made(model.parameters(), correction=correction)
    optimizer.follow(model)
    assert not model._forward_pre_hooks and not model._state_dict_pre_hooks
    pairs = list(optimizer.iterates())
    assert all(p.data_ptr() == x.data_ptr() for p, x in pairs)
    assert [p for p, _ in pairs] == list(model.parameters())
    assert not any(x.requires_grad for _, x in pairs)


@pytest.mark.usefixtures("both_forms")
@pytest.mark.usefixtures("both_layouts")
def test_iterates_are_what_is_trained_in_any_mode():
    own = params()
    own[1].requires_grad_(False)
    optimizer = made(own)
    with torch.no_grad():
        own[0].add_(1)  # before the first step a parameter is the truth
    equal(own, [x for _, x in optimizer.iterates()])
    moving = own[:1] + own[2:]
    run(optimizer, moving, range(3))
    found = dict(optimizer.iterates())
    before = {p: x.clone() for p, x in found.items()}
    y = copies(own)
    kept = optimizer.state[own[0]].get("iterate")
    assert (kept is None) != FORM["store_iterate"] and kept in (None, found[own[0]])
    optimizer.eval()
    equal(own, before.values())
    equal(own, [x for _, x in optimizer.iterates()])
    optimizer.train()
    equal(own, y)
    with torch.no_grad():
        own[0].zero_()
    assert not dict(optimizer.iterates())[own[0]].any()


# ---- sharded -------------------------------------------------------------------------


def sharded_and_whole(world):
    """A model under FSDP2, its mesh, and the same on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    whole = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_gradient_divide_factor(world)
            module.set_force_sum_reduction_for_comms(True)
    return model, mesh, whole


def validated(rank, world, follows):
    """Validation leaves a root's parameters gathered: training must gather y anew."""
    model, mesh, whole = sharded_and_whole(world)
    losses = []
    for net, options in (
        (model, dict(collectives=MeshCollectives(mesh))),
        (whole, {}),
    ):
        optimizer = made(net.parameters(), compile=False, **options)
        if follows:
            optimizer.follow(net)
        modes = net if follows else optimizer
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        mine = []
        for _ in range(4):
            loss = net(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            modes.eval()
            with torch.no_grad():
                held_out = net(inputs).square().mean()
            modes.train()
            mine += [float(loss), float(held_out)]
            if follows:
                net(inputs)  # y again
                saved = net.state_dict()["1.weight"]
                if options:
                    saved = saved.full_tensor()
                mine += saved.flatten().tolist()
        losses.append(mine)
    return losses


@pytest.mark.processes
@pytest.mark.parametrize("follows", [False, True])
def test_validation_between_steps_under_fsdp2(follows):
    sharded, whole = spawn(validated, 2, follows)[0]
    assert sharded == pytest.approx(whole, rel=1e-5)


# ---- with tools of others ------------------------------------------------------------


def test_torch_compiles_nothing_of_the_modes():
    """A step inside somebody's compiled train step, modes outside of it."""
    own, slow = params(), params()
    compiled, eager = made(own), made(slow)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = torch.compile(compiled.step, backend="eager")
        for t in range(3):
            fill(own, t)
            step()
            fill(slow, t)
            eager.step()
            compiled.eval()
            compiled.train()
    equal(own, slow)


def test_schedule_free_loops_find_their_methods():
    """Hugging Face's Trainer looks for callables of these names."""
    optimizer = made(params())
    assert callable(optimizer.train) and callable(optimizer.eval)
    with traced():
        optimizer.eval()
        optimizer.train()


@pytest.mark.usefixtures("both_layouts")
def test_closures_of_a_followed_model_train_as_a_loop_does():
    """After a validation, whose mode only the closure's forward pass ends, and where
    the closure itself takes a state dict after its backward pass.
    """
    (model, optimizer), (plain, other) = pair(), pair(follow=False)
    for t in range(5):

        def closure(t=t):
            optimizer.zero_grad()
            loss = model(batch(t)).square().mean()
            loss.backward()
            model.state_dict()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            model.eval()
            model(batch(9))
            model.train()
    trained(plain, other, range(5))
    optimizer.eval(), other.eval()
    equal(model.parameters(), plain.parameters())


def test_a_closure_that_ends_in_eval_mode_is_refused():
    model, optimizer = pair(follow=False)
    before = copies(model.parameters())

    def closure():
        model(batch(0)).square().mean().backward()
        optimizer.eval()

    with pytest.raises(RuntimeError, match="got step\\(\\) in eval mode"):
        optimizer.step(closure)
    equal(model.parameters(), before)
