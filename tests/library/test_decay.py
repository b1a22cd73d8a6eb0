"""LogTime as a value, its products, and what a class makes of it."""

import io
import logging
import math
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import marsopt
from marsopt import MARS, LogTime
from marsopt.rules import decay
from marsopt.rules.decay import from_text

DECAYS = LogTime(10), LogTime(2.5), LogTime(10, 0.9), LogTime(8, cap=0.99)
DECAYS += (LogTime(10, 0.5, 0.95), LogTime(10, 0.9, 0.9), LogTime(10, start=300))
DECAYS += (LogTime(10, 0.5, 0.95, 50), LogTime(10, 0.9, 0.95, 500))
CASES = "adamw", "moonlight", "normuon", "soap", "mars-adamw", "mars-m"


def optimizer_of(params, mars_type, **more):
    own = {} if mars_type.startswith("mars") else dict(nesterov=0.2)
    own |= dict(precondition_frequency=2) if mars_type == "soap" else {}
    both = dict(betas=(LogTime(3), LogTime(3)), betas_1d=(LogTime(3), LogTime(3)))
    options = dict(mars_type=mars_type, lr=0.1, lr_1d=0.1, nesterov_1d=0.2, **both)
    return MARS(params, **{"compile": False, **options, **own, **more})


def parameters(seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (6, 4), (4, 4), (5,)
    return [
        torch.nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64))
        for s in shapes
    ]


def fill(params, t):
    g = torch.Generator().manual_seed(100 + t)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype)


def test_it_is_a_value():
    assert LogTime(10) == LogTime(10.0) != LogTime(10, 0.5)
    assert len({LogTime(10), LogTime(10.0), LogTime(8)}) == 2
    for value in DECAYS:
        assert eval(repr(value)) == value == pickle.loads(pickle.dumps(value))
        assert from_text(repr(value)) == value
    with pytest.raises(AttributeError):
        LogTime(10).delta = 3.0


@pytest.mark.parametrize(
    "arguments",
    [(0,), (-1,), (math.inf,), (10, 0.5, 0.4), (10, 1.0), (10, 0, 1.1), ("9",)]
    + [(10, 0, 1, -1), (10, 0, 1, math.inf)],
)
def test_it_refuses_what_is_no_decay(arguments):
    with pytest.raises(ValueError, match="^got .*expected"):
        LogTime(*arguments)


@pytest.mark.parametrize("text", ["10", "LogTime(x)", "LogTime(-1)", "Log", "", "f(1)"])
def test_a_text_that_spells_none_is_refused(text):
    with pytest.raises(ValueError, match="write LogTime"):
        from_text((0.9, text))


@pytest.mark.parametrize("value", DECAYS, ids=map(str, DECAYS))
def test_products_are_those_of_its_decays(value):
    t = torch.arange(1, 5001, dtype=torch.float64)
    products = torch.cumprod(value.at(t), 0)
    torch.testing.assert_close(value.product(t), products, rtol=1e-11, atol=1e-300)
    torch.testing.assert_close(value.at(t) + value.complement(t), torch.ones_like(t))


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-14), (torch.float32, 2e-6)]
)
def test_debiasing_is_right_to_ten_million_steps(dtype, bound):
    """Against the sum of logarithms, in float64."""
    t = torch.arange(1, 10_000_001, dtype=torch.float64)
    exact = LogTime(10).at(t).log_().cumsum_(0).exp_()
    at = torch.logspace(0, 7, 500, dtype=torch.float64).long() - 1
    found = LogTime(10).product(t[at].to(dtype))
    assert float((found - exact[at]).abs().max()) < bound
    share = LogTime(10).complement(t[at].to(dtype)).double() * (t[at] + 10) / 10
    assert float((share - 1).abs().max()) < max(bound, 1e-6 * (dtype == torch.float32))


@pytest.mark.parametrize("w", [False, 0.2])
def test_a_constant_gradient_is_its_own_debiased_average(w):
    """So that AdamW's step is lr at every t."""
    rule = marsopt.rule(
        "adamw", betas=(LogTime(10), LogTime(10)), nesterov=w, weight_decay=0.0, eps=0.0
    )
    params = {"w": torch.zeros(3, dtype=torch.float64)}
    grads, state = {"w": torch.tensor([1e-3, 1.0, -7.0]).double()}, rule.init(params)
    for _ in range(40):
        before = params["w"]
        params, state = rule.step(params, grads, state, lr=0.1)
        steps = (before - params["w"]) / torch.sign(grads["w"])
        torch.testing.assert_close(
            steps, torch.full_like(steps, 0.1), rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("mars_type", CASES[:4])
def test_weights_of_zero_and_one(mars_type):
    """0 is the plain rule, and 1 the rule whose first moment is the gradient."""

    def run(**more):
        params = parameters()
        optimizer = optimizer_of(params, mars_type, **more)
        for t in range(6):
            fill(params, t)
            optimizer.step()
        return [p.detach() for p in params]

    plain = run(nesterov=False, nesterov_1d=False)
    torch.testing.assert_close(run(nesterov=0.0, nesterov_1d=0.0), plain)
    both = (0.0, LogTime(3))
    bare = run(nesterov=False, nesterov_1d=False, betas=both, betas_1d=both)
    torch.testing.assert_close(run(nesterov=1.0, nesterov_1d=1.0), bare)


@pytest.mark.parametrize("mars_type", CASES)
@pytest.mark.parametrize("at", [1, 4])
def test_a_run_goes_on_from_any_step(mars_type, at):
    """By a file, which torch.load reads by default."""
    params = parameters()
    optimizer = optimizer_of(params, mars_type)
    for t in range(8):
        if t == at:
            kept = [p.detach().clone() for p in params]
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
        fill(params, t)
        optimizer.step()
    resumed = [torch.nn.Parameter(p) for p in kept]
    other = optimizer_of(resumed, mars_type, betas=(0.9, 0.9))
    file.seek(0)
    other.load_state_dict(torch.load(file))
    for t in range(at, 8):
        fill(resumed, t)
        other.step()
    for p, q in zip(params, resumed, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("mars_type", ["adamw", "moonlight", "mars-m"])
def test_two_hundred_steps_compile_once_and_equal_eager(mars_type):
    plain, fast = parameters(), parameters()
    slow, quick = (
        optimizer_of(params, mars_type, compile=compile, ns_dtype=torch.float64)
        for params, compile in ((plain, False), (fast, True))
    )
    for t in range(200):
        for optimizer, params in ((slow, plain), (quick, fast)):
            fill(params, t % 7)
            group = optimizer.param_groups[0]
            group["betas"] = (LogTime(3 + t / 50), LogTime(3 + t / 50))
            stance = "fail_on_recompile" if t else "default"
            if t < 12 or optimizer is quick:
                with torch.compiler.set_stance(stance):
                    optimizer.step()
        if t == 11:
            torch.testing.assert_close(plain, fast, rtol=1e-9, atol=1e-12)


def test_groups_with_decays_of_their_own_equal_optimizers_of_their_own():
    together, apart = parameters(), parameters()
    groups = [
        dict(params=[p], betas=(LogTime(d), LogTime(d)))
        for p, d in zip(together, (3, 10, 30), strict=True)
    ]
    one = optimizer_of(groups, "adamw", compile=True, betas_1d=None)
    several = [
        optimizer_of([p], "adamw", betas=group["betas"], betas_1d=None)
        for p, group in zip(apart, groups, strict=True)
    ]
    for t in range(5):
        fill(together, t)
        fill(apart, t)
        for optimizer in (one, *several):
            optimizer.step()
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-14)


def test_it_changes_between_steps_like_a_number():
    params = parameters()
    optimizer = optimizer_of(params, "adamw")
    for betas in ((LogTime(3), LogTime(3)), (0.9, 0.99), (LogTime(5), LogTime(5))):
        optimizer.param_groups[0]["betas"] = betas
        fill(params, 0)
        optimizer.step()
    (p,) = params[:1]
    assert float(optimizer.state[p]["step"]) == 3


def test_a_parameter_counts_its_own_steps():
    """A later group starts with a short memory beside an older one."""
    params, late = parameters(), parameters(1)
    optimizer, alone = (
        optimizer_of(params, "adamw"),
        optimizer_of(parameters(1), "adamw"),
    )
    for t in range(3):
        fill(params, t)
        optimizer.step()
    optimizer.add_param_group({"params": late})
    for t in range(3):
        for group in (params, late, alone.param_groups[0]["params"]):
            fill(group, t)
        optimizer.step()
        alone.step()
    torch.testing.assert_close(late, alone.param_groups[0]["params"])


def test_a_schedule_of_the_learning_rate_leaves_it():
    params = parameters()
    optimizer = optimizer_of(params, "adamw")
    scheduler = LambdaLR(optimizer, lambda t: 1 / (1 + t))
    fill(params, 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["betas"] == (LogTime(3), LogTime(3))


def test_a_scheduler_that_cycles_momentum_is_refused():
    params = parameters()
    optimizer = optimizer_of(params, "adamw")
    OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    fill(params, 0)
    with pytest.raises(ValueError, match="cycle_momentum=False"):
        optimizer.step()
    OneCycleLR(optimizer_of(params, "adamw"), 0.1, total_steps=9, cycle_momentum=False)


def test_one_warning_where_one_of_two_grows(caplog):
    decay.warn_of_one.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            optimizer_of(parameters(), "adamw", betas=(LogTime(3), 0.99))
        optimizer_of(parameters(), "lion", betas=(LogTime(3), 0.9), nesterov=None)
    assert [r for r in caplog.text.splitlines() if "one of two betas" in r][1:] == []
    assert "one of two betas" in caplog.text


def test_for_model_gives_it_to_both_parts():
    model = torch.nn.Sequential(torch.nn.Embedding(12, 4), torch.nn.Linear(4, 4))
    both = dict(betas=(LogTime(10), LogTime(10)), betas_1d=(LogTime(10), LogTime(10)))
    optimizer = marsopt.for_model(
        model, lr=0.01, correction=None, nesterov=0.2, nesterov_1d=0.3, compile=False,
        **both,
    )  # fmt: skip
    found = [(g["mars_type"], g.get("nesterov")) for g in optimizer.param_groups]
    assert found == [("moonlight", 0.2), ("adamw", 0.3), ("adamw", 0.3)]
    assert all(g["betas"][0] == LogTime(10) for g in optimizer.param_groups)
    model(torch.arange(12)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("mars_type", ["muon", "moonlight", "normuon"])
def test_an_average_that_is_debiased_starts_with_the_count_of_steps(mars_type):
    """Also in a group that goes over to the rule after many steps of another."""
    params, fresh = parameters(), parameters()
    options = dict(nesterov=0.2, ns_dtype=torch.float64, lr=0.1)
    optimizer = MARS(params, mars_type="adamw", lr=0.1, compile=False)
    for t in range(20):
        fill(params, t)
        optimizer.step()
    with torch.no_grad():
        for p, q in zip(params, fresh, strict=True):
            q.copy_(p)
    group = optimizer.param_groups[0]
    other = MARS(fresh[:2], mars_type=mars_type, compile=False, **options)
    group.update(other.param_groups[0] | {"params": params, "nesterov": 0.2})
    for t in range(20, 23):
        fill(params, t)
        fill(fresh, t)
        optimizer.step()
        other.step()
    torch.testing.assert_close(params[:2], fresh[:2], rtol=0, atol=0.02)
    assert float(optimizer.state[params[0]]["step"]) == 3
