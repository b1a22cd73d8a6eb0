"""The table of hyperparameters: what a rule or a correction says of its own is known to
every door, with nothing but its line in the registry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import get_args, get_type_hints

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters

import marsopt
from marsopt import MARS, REGISTRY
from marsopt.functional.authors import all_options
from marsopt.functional.keywords import ModelOptions, Options
from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.component import Average, Correction
from marsopt.rules.options import number, structure
from marsopt.rules.registry import CORRECTIONS, NamedRule
from tests.components import check_component
from tests.factors import Factors

LR = 0.1
DRAWN = hypothesis.settings(
    max_examples=30, derandomize=True, database=None, deadline=None
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Power(Average):
    """With c the gradient: x <- (1 - lr weight_decay) x - lr sign(m) |m|^alpha.

    Args:
        alpha: exponent of the average.
        is_cubic: three times that.
    """

    alpha: Number = number(0.5, checks.at_least_zero)
    is_cubic: bool = False

    def scalars(self, t, n):
        return *super().scalars(t, n), 3 * n.alpha if self.is_cubic else n.alpha

    def update(self, x, c, buffers, s):
        rate, decay, mu, weight, alpha = s
        m = mu * buffers["m"] + weight * c
        return decay * x - rate * torch.sign(m) * m.abs() ** alpha, {"m": m}


@dataclass(frozen=True, kw_only=True, eq=False)
class Damped(Correction):
    """c = g + rho (g - h).

    Args:
        rho: scale of the difference, whatever beta1 is.
        is_signed: subtract the difference.
    """

    rho: Number = number(0.5, checks.finite)
    is_signed: bool = structure(False, whole=True)

    name = "damped"
    h_from = "step"

    def coefficients(self, beta1, n):
        rho = -n.rho if self.is_signed else n.rho
        return 1 + rho, -rho


@pytest.fixture(autouse=True)
def registered():
    """Their lines in the registry; what a test registers is gone after it."""
    tables = REGISTRY, CORRECTIONS
    before = [dict(table) for table in tables]
    marsopt.register(
        NamedRule("power", Power, False, "itself", source="of these tests")
    )
    one = dict(alpha=1.0)
    marsopt.register(NamedRule("mars-power", Power, True, "adamw_1d", one))
    marsopt.register(Damped)
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


def parameters(*shapes):
    g = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]


def gradient(p, seed):
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))


def by_hand(p, alphas, *, mu=0.95, decay=0.0):
    """The trajectory of Power, in float64."""
    x, m = p.detach().double().clone(), torch.zeros_like(p, dtype=torch.float64)
    for t, alpha in enumerate(alphas):
        m = mu * m + (1 - mu) * gradient(p, t).double()
        x = (1 - LR * decay) * x - LR * torch.sign(m) * m.abs() ** alpha
    return x.float()


def test_a_number_of_a_rule_may_be_given_and_changed(of_dynamo):
    """In the constructor, in a group, between steps: and nothing is compiled anew."""
    p, q = parameters((4, 6), (5,))
    alphas = [[0.5, 0.25, 2.0], [1.0, 1.0, 0.5]]
    want = [by_hand(p, alphas[0]), by_hand(q, alphas[1])]
    groups = [{"params": [p]}, {"params": [q], "alpha": 1.0}]
    optimizer = MARS(groups, LR, mars_type="power", alpha=0.5, compile=True)
    for t in range(3):
        for group, own in zip(optimizer.param_groups, alphas, strict=True):
            assert t or group["alpha"] == own[0]
            group["alpha"] = own[t]
        for x in (p, q):
            x.grad = gradient(x, t)
        before = counters["stats"]["unique_graphs"]
        optimizer.step()
        assert t < 1 or counters["stats"]["unique_graphs"] == before
    torch.testing.assert_close(p.detach(), want[0])
    torch.testing.assert_close(q.detach(), want[1])
    optimizer.param_groups[0]["alpha"] = -1.0
    with pytest.raises(ValueError, match="got alpha=-1"):
        optimizer.step()


@pytest.mark.parametrize(
    "door", [partial(marsopt.rule, "power"), partial(marsopt.mars, mars_type="power")]
)
def test_the_functional_doors_know_a_new_rule(door):
    (p,) = parameters((4, 6))
    rule, x = door(alpha=0.25), [p.detach()]
    state = rule.init(x)
    for t in range(3):
        x, state = rule.step(x, [gradient(p, t)], state, lr=LR)
    torch.testing.assert_close(x[0], by_hand(p, [0.25] * 3))


def test_structure_of_a_rule_changes_its_formula():
    (p,) = parameters((4, 6))
    want = by_hand(p, [0.5, 1.5])
    optimizer = MARS([p], LR, mars_type="power", is_cubic=False, compile=False)
    for t in range(2):
        optimizer.param_groups[0]["is_cubic"] = t == 1
        p.grad = gradient(p, t)
        optimizer.step()
    torch.testing.assert_close(p.detach(), want)


def test_groups_have_what_their_rule_has():
    shapes = [(4, 6)] * 4
    groups = [{"params": [p]} for p in parameters(*shapes)]
    groups[1] |= {"mars_type": "adamw"}
    groups[2] |= {"mars_type": "mars-power"}
    groups[3] |= {"mars_type": "lion"}
    optimizer = MARS(groups, mars_type="power", alpha=0.75, nesterov=None)
    found = [group.get("alpha") for group in optimizer.param_groups]
    assert found == [0.75, None, 0.75, None]  # what the constructor has said
    by_itself = MARS(parameters((2, 2)), mars_type="mars-power")
    assert by_itself.param_groups[0]["alpha"] == 1.0
    groups = [{"params": parameters((2, 2)), "mars_type": "muon"}]
    groups.append({"params": parameters((2, 2)), "mars_type": "lion"})
    groups[0]["nesterov"] = False
    assert "nesterov" not in MARS(groups).param_groups[1]


@pytest.mark.parametrize(
    "door",
    [
        lambda **own: MARS(parameters((2, 2)), **own),
        lambda **own: MARS([{"params": parameters((2, 2)), **own}]),
        marsopt.mars,
    ],
    ids=["class", "group", "mars"],
)
@pytest.mark.parametrize(
    "own",
    [
        dict(alpha=0.5),
        dict(mars_type="lion", alpha=0.5),
        dict(mars_type="lion", nesterov=True),
        dict(mars_type="adamw", adjust_lr_fn="original"),
        dict(rho=0.5),
    ],
    ids=str,
)
def test_a_number_of_another_rule_is_refused(door, own):
    name = [*own][-1]
    with pytest.raises(ValueError, match=f"got {name}=.*leave it out"):
        door(**own)


MISSPELT = [
    lambda **own: MARS(parameters((2, 2)), **own),
    lambda **own: marsopt.for_model(nn.Linear(2, 2), lr=LR, **own),
    marsopt.mars,
]


NEAREST = {
    "weight_deacy": "weight_decay",
    "mars_typ": "mars_type",
    "momentum": "betas",
    "grad_clip": "max_norm",  # in other libraries
}


@pytest.mark.parametrize(("name", "meant"), NEAREST.items())
@pytest.mark.parametrize("door", MISSPELT)
def test_a_misspelt_argument_is_answered_with_the_nearest(door, name, meant):
    said = rf"got \['{name}'\], expected arguments of [\w.]+: did you mean '{meant}'\?"
    with pytest.raises(TypeError, match=said):
        door(**{name: 3})


@pytest.mark.parametrize("door", MISSPELT)
def test_an_argument_that_is_like_none_is_left_out(door):
    with pytest.raises(TypeError, match="got .'whatever'.*: leave it out"):
        door(whatever=3)


def test_a_misspelt_rule_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="got name='mars_adam'.* mean 'mars-adamw'"):
        marsopt.rule("mars_adam")
    with pytest.raises(AttributeError, match="no attribute 'mars_adamw'"):
        marsopt.mars_adamw  # noqa: B018


def test_a_rule_prints_every_option_with_its_default_and_its_sentence():
    for row in REGISTRY.values():
        for name, option in row.options.items():
            assert option.text, f"{name} of {row.name} is in no docstring under Args"
            assert f"\n    {name} = {option.default!r}: " in str(row)
    assert all(option.text for option in all_options().values())


def test_a_correction_needs_its_line_alone(of_dynamo):
    """The class, changed between steps without compiling anew, is the rule by hand."""
    (p,) = parameters((4, 6))
    rhos = [0.5, 2.0, -1.0]
    x, m, h = p.detach().double(), 0.0, 0.0
    for t, rho in enumerate(rhos):
        g = gradient(p, t).double()
        m = 0.95 * m + 0.05 * (g + rho * (g - h))
        x, h = x - LR * torch.sign(m), g
    own = dict(mars_type="mars-lion", correction="damped", clip=None)
    optimizer = MARS([p], LR, **own, compile=True)
    assert optimizer.param_groups[0]["rho"] == 0.5
    for t, rho in enumerate(rhos):
        optimizer.param_groups[0]["rho"] = rho
        p.grad = gradient(p, t)
        before = counters["stats"]["unique_graphs"]
        optimizer.step()
        assert t < 1 or counters["stats"]["unique_graphs"] == before
    torch.testing.assert_close(p.detach(), x.float())
    with pytest.raises(ValueError, match="is_signed.* in a param group"):
        MARS([{"params": [p], "is_signed": True}], **own)


@dataclass(frozen=True, kw_only=True, eq=False)
class FromMean(Correction):
    """c = g + gamma (g - mean), mean <- 0.9 mean + 0.1 g."""

    name = "from-mean"
    h_from = "step"

    def coefficients(self, beta1, n):
        return 1 + n.gamma, -n.gamma

    def next_h(self, g, h):
        return 0.9 * h + 0.1 * g


def test_a_correction_may_build_on_what_it_keeps():
    algorithm = marsopt.Algorithm(
        preconditioner=marsopt.AdamW(weight_decay=0.0),
        correction=FromMean(gamma=0.5, clip=None),
    )
    rule = marsopt.Rule(matrix=algorithm)
    plain = marsopt.rule("adamw", weight_decay=0.0)
    x = y = [torch.ones(3, dtype=torch.float64)]
    state, twin, mean = rule.init(x), plain.init(y), torch.zeros(3, dtype=torch.float64)
    for seed in range(3):
        made = torch.Generator().manual_seed(seed)
        g = torch.randn(3, generator=made, dtype=torch.float64)
        x, state = rule.step(x, [g], state, lr=0.1)
        y, twin = plain.step(y, [g + 0.5 * (g - mean)], twin, lr=0.1)
        mean = 0.9 * mean + 0.1 * g
        torch.testing.assert_close(x[0], y[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(state.h[0], mean, rtol=0, atol=1e-14)


OF_NO_KIND = [  # values that no option has
    *("yes", b"yes", [], {1}, (0.9, 2.0), 3 + 1j, object(), float),
    *(math.nan, math.inf, -math.inf, -1e300, 1e300),
    *(torch.ones(2), torch.tensor(math.nan), torch.empty((), device="meta")),
]
OF_SOME = [  # values that some options have
    *(True, False, None, 0, 1, 2, -1, 101, 10**31, 0.5, 1.5, -0.1),
    *(1e-300, 1e-30, 1e15, 1e30, torch.tensor(0.5, requires_grad=True)),
]
# a step multiplies by these: several steps at the largest may overflow
RATES = {"lr", "lr_1d", "base_lr", "weight_decay", "weight_decay_1d"}
TYPES = get_type_hints(Options)
# arguments of the class and of ``param_groups`` that are no hyperparameters
ARGUMENTS = {n: t for n, t in get_type_hints(ModelOptions).items() if n not in TYPES}


def is_no_value(name, value):
    """Whether an option has to refuse a value, by its type and by its own check."""
    option = all_options().get(name)
    hint = option.hint if option else ARGUMENTS[name]
    kinds = {hint, *get_args(hint)}
    if any(value is other for other in OF_NO_KIND):
        return True
    if value is None:
        return False
    if isinstance(value, bool) or kinds <= {bool, bool | None, type(None)}:
        return not (isinstance(value, bool) and bool in kinds)
    if option is None or option.check is None:
        return False
    try:
        option.check(name, value)
    except ValueError:
        return True
    return False


def train(optimizer, num_steps):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for t in range(num_steps):
        for p in params:
            p.grad = gradient(p, t)
        optimizer.step()
    assert optimizer.num_skipped or all(p.isfinite().all() for p in params)


def model_with_embeddings():
    head = nn.Linear(4, 9, bias=False)
    return nn.ModuleDict(dict(a=nn.Embedding(9, 4), b=nn.Linear(4, 4), head=head))


def by_class(mars_type, own):
    own = dict(mars_type=mars_type, compile=False) | own
    return partial(train, MARS(parameters((4, 6), (3,)), **own))


def by_group(mars_type, own):
    hypothesis.assume(own.keys().isdisjoint(("experts", "convolutions", "adapters")))
    groups = [dict(params=parameters((4, 6), (3,)), **own)]
    return partial(train, MARS(groups, mars_type=mars_type, compile=False))


def by_for_model(mars_type, own):
    own = dict(mars_type=mars_type, lr=LR, compile=False) | own
    return partial(train, marsopt.for_model(model_with_embeddings(), **own))


def by_param_groups(mars_type, own):
    known = signature(marsopt.param_groups).parameters
    hypothesis.assume(own.keys() <= known.keys())
    own = dict(mars_type=mars_type, lr=LR) | own
    groups = marsopt.param_groups(model_with_embeddings(), **own)
    return partial(train, MARS(groups, compile=False))


def between_steps(mars_type, own):
    """Which changes nothing where it is refused."""
    params = parameters((4, 6), (3,))
    optimizer = MARS(params, mars_type=mars_type, compile=False)
    train(optimizer, 2)
    before = [p.detach().clone() for p in params]
    hypothesis.assume(own.keys() <= optimizer.param_groups[0].keys())
    optimizer.param_groups[0].update(own)
    try:
        optimizer.step()
    except (ValueError, TypeError):
        assert all(map(torch.equal, params, before))
        raise
    assert all(p.isfinite().all() for p in params)
    return lambda num_steps: None


def by_loading(mars_type, own):
    """Which changes nothing where it is refused."""
    optimizer = MARS(parameters((4, 6), (3,)), mars_type=mars_type, compile=False)
    saved, before = optimizer.state_dict(), optimizer.param_groups
    hypothesis.assume(own.keys() <= before[0].keys())
    saved["param_groups"][0].update(own)
    try:
        optimizer.load_state_dict(saved)
    except (ValueError, TypeError):
        assert optimizer.param_groups is before
        raise
    return partial(train, optimizer)


def by_function(make, mars_type, own):
    rule, x = make(mars_type=mars_type, **own), [parameters((4, 6))[0].detach()]
    state = rule.init(x)

    def run(num_steps):
        nonlocal x, state
        for t in range(num_steps):
            x, state = rule.step(x, [gradient(x[0], t)], state, lr=LR)
        assert x[0].isfinite().all()

    return run


DOORS = [by_class, by_group, by_for_model, by_param_groups, between_steps, by_loading]
DOORS += [partial(by_function, marsopt.mars)]
DOORS += [partial(by_function, lambda mars_type, **own: marsopt.rule(mars_type, **own))]


@pytest.mark.parametrize("name", sorted(all_options() | ARGUMENTS))
@DRAWN
@hypothesis.given(
    door=st.sampled_from(DOORS),
    mars_type=st.sampled_from([*REGISTRY]),
    value=st.sampled_from(OF_NO_KIND + OF_SOME),
)
def test_any_value_is_refused_by_name_or_leaves_a_step_finite(
    name, door, mars_type, value
):
    hypothesis.assume(name != "mars_type" or door in DOORS[:4])
    # a group has False already, which equals 0
    is_equal = type(value) is int and value in (0, 1)
    hypothesis.assume(not (is_equal and door in (by_group, between_steps)))
    try:
        run = door(mars_type, {name: value})
    except (ValueError, TypeError) as refused:
        assert name.removesuffix("_1d") in str(refused)
        assert "expected" in str(refused)
        return
    assert not is_no_value(name, value)
    if name not in ("compile", "is_approx"):  # exact MARS asks for a second gradient
        run(1 if name in RATES else 3)


BASELINES = [name for name, row in REGISTRY.items() if not row.is_mars]


@pytest.mark.parametrize("mars_type", BASELINES)
def test_a_correction_that_no_rule_takes_is_refused(mars_type):
    """But beside a MARS rule a baseline stays plain, and where the default is named."""
    correction, match = "exact", r"mars_type='.*', expected None: .*mars-m"
    with pytest.raises(ValueError, match=match):
        marsopt.mars(mars_type=mars_type, correction=correction)
    for make in (MARS, lambda p, **k: MARS([dict(params=p)], **k)):
        with pytest.raises(ValueError, match=match):
            make(parameters((2, 2)), mars_type=mars_type, correction=correction)
    groups = [dict(params=parameters((2, 2)), mars_type=mars_type)]
    groups += [dict(params=parameters((2, 2)), mars_type="mars-m")]
    MARS(groups, correction=correction)
    MARS(groups, correction="approximate")


class Tripled(marsopt.Correction):
    """c = 3 g, with a coefficient of an h that it has not."""

    name = "tripled"

    def coefficients(self, beta1, n):
        return 3.0, n.gamma


def test_a_correction_that_is_no_name_and_one_with_too_many_coefficients():
    for given in (Tripled, Tripled()):
        with pytest.raises(ValueError, match="register its class, and give the name"):
            marsopt.rule("mars-adamw", correction=given)
    rule = marsopt.Rule(
        matrix=marsopt.Algorithm(preconditioner=marsopt.Lion(), correction=Tripled())
    )
    params = [torch.ones(2, 2)]
    with pytest.raises(ValueError, match=r"got 2 coefficients of Tripled, expected 1"):
        rule.step(params, params, rule.init(params), lr=0.1)


class Half(marsopt.Correction):
    """c = g / 2."""

    name = "half"

    def coefficients(self, beta1, n):
        return (0.5,)


class HalfExact(marsopt.Exact):
    name = "half-exact"


def test_a_correction_of_ones_own_has_the_protocol_of_its_h():
    marsopt.register(Half)
    marsopt.register(HalfExact)
    (p,) = params = [nn.Parameter(torch.ones(2, 2))]
    optimizer = MARS(params, correction="half", compile=False)
    p.grad = torch.ones(2, 2)
    optimizer.step(), optimizer.update_last_grad()  # which does nothing
    exact = MARS(params, correction="half-exact", compile=False)
    with pytest.raises(RuntimeError, match="the protocol of exact MARS"):
        exact.step()
    exact.update_previous_grad(), exact.step()


# ---- components do what they declare -----------------------------------------------


@pytest.mark.parametrize("row", REGISTRY.values(), ids=lambda row: row.name)
def test_every_rule_does_what_it_declares(row):
    check_component(row.preconditioner())


@pytest.mark.parametrize("kind", CORRECTIONS.values(), ids=lambda kind: kind.name)
def test_every_correction_does_what_it_declares(kind):
    check_component(kind())


def test_factors_do_what_they_declare():
    check_component(Factors(), (5, 3))


def test_a_name_that_is_taken_is_kept_unless_told():
    rules, corrections = dict(REGISTRY), dict(CORRECTIONS)

    class Approximate(Damped):
        name = "approximate"

    row = NamedRule("Mars_M", Power, True, "itself")
    for component, name in ((row, "mars-m"), (Approximate, "approximate")):
        with pytest.raises(ValueError, match=f"got the name '{name}', which is taken"):
            marsopt.register(component)
        assert rules == REGISTRY
        assert corrections == CORRECTIONS
    marsopt.register(row, replace=True)
    assert REGISTRY["mars-m"].preconditioner is Power
    marsopt.register(Approximate, replace=True)
    assert CORRECTIONS["approximate"] is Approximate
    marsopt.register(NamedRule("Half_Power", Power, False, "itself"))
    optimizer = MARS([torch.ones(2)], mars_type="Half_Power", compile=False)
    assert optimizer.param_groups[0]["mars_type"] == "half-power"
    algorithm = marsopt.rule("half_power", alpha=0.25).matrix
    assert algorithm.preconditioner.alpha == 0.25


class NoScalars(marsopt.rules.component.Preconditioner):
    beta1 = 0.9

    def update(self, x, c, buffers, s):
        return x, {}


class NoCoefficients(Correction):
    name = "none"


@pytest.mark.parametrize(
    ("component", "told"),
    [
        (Correction, "expected a NamedRule, or a subclass of Corr"),
        (marsopt.AdamW, "expected a NamedRule, or a subclass of Corr"),
        (Tripled(), "expected a NamedRule, or a subclass of Corr"),
        (NamedRule("mine", Correction, False, "itself"), "expected a NamedRule"),
        (
            NamedRule("no_scalars", NoScalars, False, "itself"),
            "got NoScalars without scalars, expected a class .*: define scalars",
        ),
        (NoCoefficients, "got NoCoefficients without coefficients"),
    ],
)
def test_what_cannot_be_registered_is_refused(component, told):
    before = dict(REGISTRY), dict(CORRECTIONS)
    with pytest.raises(TypeError, match=told):
        marsopt.register(component)
    assert before == (REGISTRY, CORRECTIONS)
