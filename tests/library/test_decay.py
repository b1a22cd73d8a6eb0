"""``log_time``: decays that grow with the run, their products, and what a class makes
of them.
"""

from functools import partial

import pytest
import torch

import marsopt
from marsopt import MARS, REGISTRY
from marsopt.optim.groups import values_of
from marsopt.rules.numerics import at, complement, product
from tests import stacking
from tests.stacking import fill

PAIRS = [(d, b) for d in (10.0, 2.5, 0.001, 1e4) for b in (0.9, 0.999, 0.0, 0.5)]
CASES = "adamw", "moonlight", "normuon", "soap", "mars-adamw", "mars-m"
CAP = dict(betas=(0.999, 0.999), betas_1d=(0.999, 0.999))


def optimizer_of(params, mars_type, **more):
    own = dict(precondition_frequency=2) if mars_type == "soap" else {}
    own |= dict(nesterov=False) if mars_type.startswith("mars") else {}
    options = dict(mars_type=mars_type, lr=0.1, lr_1d=0.1, log_time=3.0)
    return MARS(params, **{"compile": False, **options, **own, **more})


def parameters(seed=0):
    shapes = (6, 4), (4, 4), (5,)
    return stacking.parameters(*shapes, seed=seed, dtype=torch.float64)


@pytest.mark.parametrize("log_time, beta", PAIRS)
def test_products_are_those_of_the_decays(log_time, beta):
    t = torch.arange(1, 5001, dtype=torch.float64)
    decays = at(beta, t, log_time)
    assert torch.equal(decays, (t / (t + log_time)).clamp(max=beta))
    products = torch.cumprod(decays, 0)
    torch.testing.assert_close(
        product(beta, t, log_time), products, rtol=2e-9, atol=1e-300
    )
    ones = torch.ones_like(t)
    torch.testing.assert_close(decays + complement(beta, t, log_time), ones)
    (first,) = 1 - product(beta, t[:1], log_time)
    assert float(first) == pytest.approx(1 - float(decays[0]), rel=1e-9)


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-14), (torch.float32, 2e-6)]
)
@pytest.mark.parametrize("beta", [0.999, 0.99999999])
def test_debiasing_is_right_to_ten_million_steps(beta, dtype, bound):
    """Against the sum of logarithms, in float64."""
    t = torch.arange(1, 10_000_001, dtype=torch.float64)
    exact = at(beta, t, 10.0).log_().cumsum_(0).exp_()
    places = torch.logspace(0, 7, 500, dtype=torch.float64).long() - 1
    found = product(beta, t[places].to(dtype), 10.0)
    assert float((found - exact[places]).abs().max()) < bound


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_what_it_sets(mars_type):
    """By every door, and not what its user gives."""
    row = REGISTRY[mars_type]
    weight = 0.2 if "nesterov" in row.table else None
    of_rest = weight if row.fallback == "itself" else 0.2
    by_group = MARS([{"params": parameters(), "log_time": 8}], mars_type=mars_type)
    for optimizer in (MARS(parameters(), mars_type=mars_type, log_time=8), by_group):
        (group,) = optimizer.param_groups
        assert (group["betas"], group.get("nesterov")) == (CAP["betas"], weight)
        rest = values_of(group, is_matrix=False)
        assert (rest["betas"], rest.get("nesterov")) == (CAP["betas"], of_rest)
        assert group["log_time"] == rest["log_time"] == 8
    given = dict(betas=(0.9, 0.95), betas_1d=(0.8, 0.9), nesterov_1d=0.5)
    given |= {} if weight is None else dict(nesterov=0.4)
    if row.fallback == "itself":
        del given["betas_1d"], given["nesterov_1d"]
    optimizer = MARS(parameters(), mars_type=mars_type, log_time=8, **given)
    (group,) = optimizer.param_groups
    assert group["betas"] == (0.9, 0.95)
    assert group.get("nesterov") == given.get("nesterov")
    if row.fallback != "itself":
        rest = values_of(group, is_matrix=False)
        assert (rest["betas"], rest["nesterov"]) == ((0.8, 0.9), 0.5)
    alone = marsopt.rule(mars_type, log_time=8).matrix
    assert getattr(alone.preconditioner, "nesterov", None) == weight
    routed = marsopt.mars(mars_type=mars_type, log_time=8)
    for algorithm in filter(None, (alone, routed.matrix, routed.rest)):
        numbers = algorithm.read(algorithm.defaults(0.1, None))
        assert algorithm.preconditioner.beta1(numbers) == 0.999
        assert numbers.log_time == 8


@pytest.mark.parametrize("w", [False, 0.2])
def test_a_constant_gradient_is_its_own_debiased_average(w):
    """So that AdamW's step is lr at every t."""
    rule = marsopt.rule("adamw", log_time=10, nesterov=w, weight_decay=0.0, eps=0.0)
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
    both = (0.0, 0.999)
    bare = run(nesterov=False, nesterov_1d=False, betas=both, betas_1d=both)
    torch.testing.assert_close(run(nesterov=1.0, nesterov_1d=1.0), bare)


@pytest.mark.parametrize(
    ("mars_type", "backend"), [("adamw", "inductor"), ("moonlight", "eager")]
)
def test_forty_steps_compile_once_and_equal_eager(mars_type, backend, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, fast = parameters(), parameters()
    own = dict(ns_dtype=torch.float64, ns_steps=2)
    slow, quick = (
        optimizer_of(params, mars_type, compile=compile, **own)
        for params, compile in ((plain, False), (fast, True))
    )
    for t in range(40):
        for optimizer, params in ((slow, plain), (quick, fast)):
            fill(params, t)
            for group in optimizer.param_groups:
                group["log_time"] = 3 + t / 10
            with torch.compiler.set_stance("fail_on_recompile" if t else "default"):
                optimizer.step()
    torch.testing.assert_close(plain, fast, rtol=1e-9, atol=1e-12)


def test_a_parameter_counts_its_own_steps():
    """A later group starts with a short memory beside an older one."""
    params, late, apart = parameters(), parameters(1), parameters(1)
    optimizer, alone = (optimizer_of(each, "adamw") for each in (params, apart))
    for t in range(3):
        fill(params, t)
        optimizer.step()
    optimizer.add_param_group({"params": late})
    for t in range(3):
        for group in (params, late, apart):
            fill(group, t)
        optimizer.step()
        alone.step()
    torch.testing.assert_close(late, apart)


def test_for_model_gives_it_to_both_parts():
    model = torch.nn.Sequential(torch.nn.Embedding(12, 4), torch.nn.Linear(4, 4))
    options = dict(log_time=10, nesterov_1d=0.3, compile=False)
    optimizer = marsopt.for_model(model, lr=0.01, **options)
    found = [(g["mars_type"], g.get("nesterov")) for g in optimizer.param_groups]
    assert found == [("moonlight", 0.2), ("adamw", 0.3), ("adamw", 0.3)]
    for group in optimizer.param_groups:
        assert (group["betas"], group["log_time"]) == (CAP["betas"], 10)
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
    (group,) = optimizer.param_groups
    del group["params"][2:]
    other = MARS(fresh[:2], mars_type=mars_type, compile=False, **options)
    group.update(other.param_groups[0] | {"params": params[:2]})
    for t in range(20, 23):
        fill(params, t)
        fill(fresh, t)
        optimizer.step()
        other.step()
    torch.testing.assert_close(params[:2], fresh[:2], rtol=0, atol=0.02)
    assert float(optimizer.state[params[0]]["step"]) == 3
