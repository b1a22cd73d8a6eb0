"""Transport in the class: what parameters and state hold, and who may change it."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
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
    run,
    traced,
)

TYPES = list(marsopt.REGISTRY)
ELEMENTWISE = [n for n, row in marsopt.REGISTRY.items() if row.fallback == "itself"]
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


# y that is computed from x, and not kept
ROUNDING = {"stored": 0.0, "computed": 1e-6}


def rounding() -> float:
    return ROUNDING["stored" if FORM["store_iterate"] else "computed"]


def held(optimizer) -> list[torch.Tensor]:
    """x, in either mode."""
    found = dict(optimizer.iterates())
    return [found[p].clone() for p in optimizer.state]


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
    if mars_type in ELEMENTWISE:  # nothing is beside the rule
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
def test_eval_and_train_exchange_x_and_y(mode, dtype, monkeypatch):
    """Bit for bit where x is kept, else to rounding."""
    forced(monkeypatch, mode)
    own = params(dtype=dtype)
    optimizer = made(own, mode)
    run(optimizer, own, range(3))
    y, x = copies(own), held(optimizer)
    assert not any(map(torch.equal, x, y))
    for _ in range(2):  # called twice as well, as trainers do
        optimizer.eval()
    equal(own, x)
    equal(held(optimizer), x)
    for _ in range(2):
        optimizer.train()
    equal(own, y, rounding())
    equal(held(optimizer), x, rounding())


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
        rule, x = marsopt.rule("mars-adamw", correction="transport"), [torch.ones(2)]
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
    equal(new, own, 2 * rounding())
    equal(held(other), held(optimizer), 2 * rounding())


SAVED_BY = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "pickle": pickle.dumps,
}


@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("save", SAVED_BY.values(), ids=SAVED_BY)
def test_saving_in_train_mode_says_so_once(save, caplog):
    own = params()
    optimizer = made(own, lr_1d=LR)
    with caplog.at_level(logging.WARNING):
        save(optimizer)  # before the first step y is x
        run(optimizer, own, range(2))
        optimizer.eval()
        save(optimizer)
        assert not caplog.records
        optimizer.train()
        save(optimizer)
        save(optimizer)
    (record,) = caplog.records
    assert "saved in train mode" in record.getMessage()
    assert "optimizer.eval()" in record.getMessage()


@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("to", ["transport", "approximate"])
def test_another_correction_restarts_what_the_two_do_not_share(to):
    """Moments go on; x starts where the parameters are, h at zero."""
    since = {"transport": "approximate", "approximate": "transport"}[to]
    own, new = params(), params(1)
    optimizer = made(own, correction=since)
    run(optimizer, own, range(3))
    optimizer.eval()
    other = made(new, correction=to)
    run(other, new, [7])
    other.load_state_dict(optimizer.state_dict())
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
            beside = p.ndim < 2 and mars_type not in ELEMENTWISE
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


def test_a_rule_that_computes_x_refuses_a_state_that_has_it():
    x = [torch.ones(3)]
    stored = marsopt.rule("mars-adamw", correction="transport", store_iterate=True)
    computed = marsopt.rule("mars-adamw", correction="transport")
    state = stored.init(x)
    with pytest.raises(ValueError, match="store_iterate=True takes a state"):
        computed.step(x, x, state, lr=LR)
    with pytest.raises(ValueError, match="store_iterate=True takes a state"):
        computed.iterate(x, state)
    with pytest.raises(ValueError, match="got a state without x"):
        stored.step(x, x, computed.init(x), lr=LR)
    with pytest.raises(ValueError, match="got store_iterate=1, expected True or False"):
        marsopt.rule("mars-adamw", correction="transport", store_iterate=1)


# ---- what others write ---------------------------------------------------------------


@pytest.mark.usefixtures("both_forms")
@pytest.mark.usefixtures("both_layouts")
def test_weights_written_in_eval_mode_are_x():
    """Loaded, averaged or clamped; the next gradient is taken ahead of them."""
    own = params()
    optimizer = made(own)
    run(optimizer, own, range(3))
    optimizer.eval()
    written = [p.detach() + 1 for p in own]
    write(own, written)
    optimizer.train()
    assert not any(map(torch.equal, own, written))
    optimizer.param_groups[0].update(lr=0.0, base_lr=1.0)
    run(optimizer, own, [3])
    optimizer.eval()
    equal(own, written, rounding())


@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("in_eval", [False, True])
def test_a_layout_that_changes_keeps_x(in_eval):
    own, reference = params(), params()
    late = own.pop(1), reference.pop(1)
    optimizer, other = made(own, lr_1d=LR), made(reference, lr_1d=LR)
    for each, mine in ((optimizer, own), (other, reference)):
        run(each, mine, range(3))
    if in_eval:
        optimizer.eval()
    optimizer.add_param_group({"params": [late[0]]})
    other.add_param_group({"params": [late[1]]})
    optimizer.train()
    for each, mine in ((optimizer, own), (other, reference)):
        run(each, [*mine, *each.param_groups[1]["params"]], [3])
    equal(own, reference, rounding())
    equal(held(optimizer), held(other), rounding())


@pytest.mark.usefixtures("both_forms")
@pytest.mark.parametrize("in_eval", [False, True])
def test_a_state_of_another_correction_leaves_x_to_the_parameter(in_eval):
    """In either mode, and also where weights are loaded afterwards."""
    own, new = params(), params(1)
    optimizer, other = made(own, correction="approximate"), made(new)
    run(optimizer, own, range(3))
    run(other, new, range(2))
    if in_eval:
        other.eval()
    other.load_state_dict(optimizer.state_dict())
    write(new, own)
    other.train()
    equal(new, own)
    equal(held(other), own)
    other.param_groups[0].update(lr=0.0, base_lr=LR)
    run(other, new, [3])
    equal(held(other), own)


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
def test_loading_its_own_state_dict_changes_nothing():
    own = params()
    optimizer = made(own)
    run(optimizer, own, range(3))
    y, x = copies(own), held(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    equal(own, y)
    optimizer.eval()
    equal(own, x)
    optimizer.train()
    equal(own, y, rounding())


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
    equal(own, y, rounding())


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


def validated(rank, world):
    """Validation leaves a root's parameters gathered: training must gather y anew."""
    model, mesh, whole = sharded_and_whole(world)
    losses = []
    for net, options in (
        (model, dict(collectives=MeshCollectives(mesh))),
        (whole, {}),
    ):
        optimizer = made(net.parameters(), compile=False, **options)
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        mine = []
        for _ in range(4):
            loss = net(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.eval()
            with torch.no_grad():
                held_out = net(inputs).square().mean()
            saved = net.state_dict()["1.weight"]
            if options:
                saved = saved.full_tensor()
            mine += saved.flatten().tolist()
            optimizer.train()
            mine += [float(loss), float(held_out)]
        losses.append(mine)
    return losses


@pytest.mark.processes
def test_validation_between_steps_under_fsdp2():
    sharded, whole = spawn(validated, 2)[0]
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
    equal(own, slow, 1e-6)


def test_schedule_free_loops_find_their_methods():
    """Hugging Face's Trainer looks for callables of these names."""
    optimizer = made(params())
    assert callable(optimizer.train) and callable(optimizer.eval)
    with traced():
        optimizer.eval()
        optimizer.train()


def test_a_closure_that_ends_in_eval_mode_is_refused():
    model = nn.Linear(4, 2)
    optimizer = made(model.parameters())
    before = copies(model.parameters())

    def closure():
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.eval()

    with pytest.raises(RuntimeError, match="got step\\(\\) in eval mode"):
        optimizer.step(closure)
    equal(model.parameters(), before)


@pytest.mark.parametrize("mars_type", ["muon", "lion", "adamw"])
def test_weights_loaded_after_a_skipped_first_step_are_x(mars_type):
    (p,) = params = [nn.Parameter(torch.zeros(4, 4))]
    optimizer = MARS(
        params, lr=0.1, mars_type=mars_type, correction="transport", gamma=0.05,
        weight_decay=0.0, compile=False,
    )  # fmt: skip
    p.grad = torch.full((4, 4), float("inf"))
    optimizer.step()
    with torch.no_grad():
        p.fill_(10.0)
    p.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.eval()
    assert optimizer.num_skipped == 1
    assert float((p.detach() - 10.0).abs().max()) < 1.0
