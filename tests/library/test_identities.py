"""Limits and identities of the algorithms (MARS and MARS-M papers), one test each."""

from __future__ import annotations

import pytest
import torch

import marsopt
from marsopt import Algorithm, Approximate, Exact, Rule
from marsopt.rules.adamw import AdamW
from marsopt.rules.lion import Lion, SignAverage
from marsopt.rules.normuon import NorMuon
from marsopt.rules.orthogonal import Orthogonal
from tests.table import MATRICES, NS, SHAPES, tensors

STEPS = 30
LR = 0.01


def trajectory(rule, names=SHAPES, scale=1.0, dtype=torch.float64, steps=STEPS):
    """Parameters after each step on a fixed sequence of gradients."""
    x = tensors(names, 0, dtype=dtype)
    state, out = rule.init(x), []
    for t in range(steps):
        g = tensors(names, 1 + t, scale, dtype)
        x, state = rule.step(x, g, state, lr=LR)
        out.append(x)
    return out, state


def assert_same(a, b, atol=1e-12):
    for t, (x, y) in enumerate(zip(a, b, strict=True)):
        for n in x:
            torch.testing.assert_close(
                x[n],
                y[n],
                rtol=0,
                atol=atol,
                msg=lambda m, n=n, t=t: f"{n}, step {t}: {m}",
            )


def test_gamma_zero_without_clip_is_adamw():
    betas = dict(betas=(0.9, 0.99), weight_decay=0.1)
    mars, _ = trajectory(marsopt.rule("mars-adamw", gamma=0.0, clip=None, **betas))
    adamw, _ = trajectory(marsopt.rule("adamw", **betas))
    assert_same(mars, adamw)


def test_moonlight_is_mars_m_with_gamma_one_minus_mu():
    mars, _ = trajectory(
        marsopt.rule("mars-m", gamma=0.05, clip=None, ns_dtype=torch.float64), MATRICES
    )
    moonlight, _ = trajectory(
        marsopt.rule("moonlight", weight_decay=0.0, ns_dtype=torch.float64), MATRICES
    )
    assert_same(mars, moonlight, 1e-9)


def test_lion_is_mars_lion_in_its_own_betas():
    """gamma = (beta2 - beta1) / beta2, momentum = beta2."""
    beta1, beta2 = 0.9, 0.99
    own = dict(momentum=beta2, gamma=(beta2 - beta1) / beta2, clip=None)
    mars, _ = trajectory(marsopt.rule("mars-lion", **own))
    lion, _ = trajectory(marsopt.rule("lion", betas=(beta1, beta2)))
    assert_same(mars, lion)


@pytest.mark.parametrize("name", ["adamw", "normuon", "soap"])
def test_an_eps_of_zero_leaves_what_has_no_gradient(name):
    """In a tensor without any, and in a row of one with some."""
    rule, x = marsopt.rule(name, eps=0.0, weight_decay=0.0), torch.ones(2, 3, 3)
    x, g = {"none": x[0], "some": x[1]}, torch.zeros(2, 3, 3)
    g[1, 0] = torch.tensor([1.0, -2.0, 3.0])
    state = rule.init(x)
    for _ in range(3):
        new, state = rule.step(x, {"none": g[0], "some": g[1]}, state, lr=0.1)
    assert torch.equal(new["none"], x["none"])
    assert new["some"].isfinite().all()
    assert not torch.equal(new["some"], x["some"])


def test_momentum_is_quasi_hyperbolic():
    """m_t = gamma g_t + (1 - gamma) EMA(g)_t."""
    rule, gamma, e = marsopt.rule("mars-lion", clip=1e9, gamma=0.1), 0.1, 0.0
    x = tensors(SHAPES, 0, dtype=torch.float64)
    state = rule.init(x)
    for t in range(STEPS):
        g = tensors(SHAPES, 1 + t, dtype=torch.float64)
        x, state = rule.step(x, g, state, lr=LR)
        e = 0.95 * e + 0.05 * g["wide"]
        want = gamma * g["wide"] + (1 - gamma) * e
        torch.testing.assert_close(state.m["wide"], want, rtol=0, atol=1e-12)


def test_a_norm_below_one_leaves_the_clip_idle():
    idle, _ = trajectory(marsopt.rule("mars-adamw", clip=1.0), scale=1e-3)
    off, _ = trajectory(marsopt.rule("mars-adamw", clip=None), scale=1e-3)
    assert_same(idle, off, 0.0)


def test_the_clip_bounds_the_corrected_gradient():
    """The first moment after one step is (1 - beta1) c with ||c|| = clip."""
    rule = marsopt.rule("mars-lion", clip=0.25)
    x = tensors(SHAPES, 0)
    _, state = rule.step(x, tensors(SHAPES, 1, 50.0), rule.init(x), lr=LR)
    for m in state.m.values():
        assert float(m.norm()) == pytest.approx(0.05 * 0.25, rel=1e-5)


def test_approximate_is_exact_on_the_previous_gradient():
    approximate = marsopt.rule("mars-adamw")
    exact = marsopt.rule("mars-adamw", is_approx=False)
    x = y = tensors(SHAPES, 0)
    s, e = approximate.init(x), exact.init(y)
    h = {n: torch.zeros_like(v) for n, v in x.items()}
    for t in range(5):
        g = tensors(SHAPES, 1 + t)
        x, s = approximate.step(x, g, s, lr=LR)
        y, e = exact.step(y, g, e, lr=LR, reference=h)
        h = g
        assert all(torch.equal(x[n], y[n]) for n in x)


def test_the_global_clip_inside_is_clip_grad_norm_before():
    inside = marsopt.rule("mars-adamw", max_norm=0.5)
    outside = marsopt.rule("mars-adamw")
    x = y = tensors(SHAPES, 0)
    s, o = inside.init(x), outside.init(y)
    for t in range(5):
        g = tensors(SHAPES, 1 + t)
        x, s = inside.step(x, g, s, lr=LR)
        shells = [torch.nn.Parameter(v) for v in y.values()]
        for p, v in zip(shells, g.values(), strict=True):
            p.grad = v.clone()
        torch.nn.utils.clip_grad_norm_(shells, 0.5)
        clipped = {n: p.grad for n, p in zip(g, shells, strict=True)}
        y, o = outside.step(y, clipped, o, lr=LR)
        for n in x:
            torch.testing.assert_close(x[n], y[n], rtol=0, atol=1e-6)
            torch.testing.assert_close(s.h[n], o.h[n], rtol=0, atol=1e-6)


@pytest.mark.parametrize("max_norm", [None, 0.7])
def test_the_clip_norm_from_three_inner_products(max_norm):
    """||c||^2 = (1+k)^2 a^2 gg - 2k(1+k) a gh + k^2 hh, to 1.5e-7 in float32: as the
    first moment after a step shows it.
    """
    own = dict(is_approx=False, clip=1e-3, gamma=0.025, max_norm=max_norm)
    rule = marsopt.rule("mars-lion", **own)
    g, h = torch.randn(64, 96), torch.randn(64, 96)
    _, state = rule.step([g], [g], rule.init([g]), lr=LR, reference=[h])
    a = 1.0 if max_norm is None else max_norm / (g.double().norm() + 1e-6)
    k = 0.025 * 0.95 / 0.05
    c = a * g.double() + k * (a * g.double() - h.double())
    want = 0.05 * 1e-3 * c / c.norm()
    torch.testing.assert_close(state.m[0].double(), want, rtol=1e-6, atol=1e-12)


def test_first_step_is_scaled_by_one_plus_k():
    """h = 0 at t = 1, so that c_1 = 1.475 g_1 at the defaults (the authors' code)."""
    rule = marsopt.rule("mars-lion", clip=1e9)
    x = tensors(SHAPES, 0, dtype=torch.float64)
    g = tensors(SHAPES, 1, dtype=torch.float64)
    _, state = rule.step(x, g, rule.init(x), lr=LR)
    torch.testing.assert_close(state.m["wide"], 0.05 * 1.475 * g["wide"])


PAGES = {
    "adamw": AdamW(),
    "lion": Lion(),
    "sign": SignAverage(),
    "muon": Orthogonal(nesterov=True, ns=NS),
    "orthogonal": Orthogonal(ns=NS),
    "normuon": NorMuon(ns=NS),
}


@pytest.mark.parametrize("clip", [None, 1e9])
@pytest.mark.parametrize("kind", [Approximate, Exact])
@pytest.mark.parametrize("page", PAGES)
def test_every_correction_of_nothing_leaves_every_preconditioner(page, kind, clip):
    """gamma = 0 and a clip that is off or idle: c is the gradient."""
    correction = kind(gamma=0.0, clip=clip)
    corrected = Rule(
        matrix=Algorithm(preconditioner=PAGES[page], correction=correction)
    )
    plain = Rule(matrix=Algorithm(preconditioner=PAGES[page]))
    takes = corrected.matrix.h_from == "caller"
    x = y = tensors(MATRICES, 0, dtype=torch.float64)
    s, t = corrected.init(x), plain.init(y)
    for i in range(5):
        g = tensors(MATRICES, 1 + i, dtype=torch.float64)
        h = tensors(MATRICES, 50 + i, dtype=torch.float64) if takes else None
        x, s = corrected.step(x, g, s, lr=LR, reference=h)
        y, t = plain.step(y, g, t, lr=LR)
        assert_same([x], [y])


@pytest.mark.parametrize("page", PAGES)
def test_every_preconditioner_sees_the_corrected_gradient(page):
    """A step on g with the reference h is a plain step on c, computed by hand."""
    plain = Rule(matrix=Algorithm(preconditioner=PAGES[page]))
    correction = Exact(gamma=0.05, clip=2.0)
    rule = Rule(matrix=Algorithm(preconditioner=PAGES[page], correction=correction))
    beta1 = PAGES[page].beta1(PAGES[page])
    x = y = tensors(MATRICES, 0, dtype=torch.float64)
    s, t = rule.init(x), plain.init(y)
    for i in range(4):
        g = tensors(MATRICES, 1 + i, dtype=torch.float64)
        h = tensors(MATRICES, 50 + i, dtype=torch.float64)
        c = {n: g[n] + 0.05 * beta1 / (1 - beta1) * (g[n] - h[n]) for n in g}
        c = {n: v / max(1.0, float(v.norm()) / 2.0) for n, v in c.items()}
        x, s = rule.step(x, g, s, lr=LR, reference=h)
        y, t = plain.step(y, c, t, lr=LR)
        assert_same([x], [y], 1e-9)


def test_normuon_with_beta2_zero_normalizes_rows():
    """o' = o / row norms, rescaled to the norm of o; no row remembers the last one."""
    x = tensors(MATRICES, 0, dtype=torch.float64)
    own = dict(ns_dtype=torch.float64, weight_decay=0.0)
    rule = marsopt.rule("normuon", beta2=0.0, **own)
    plain = marsopt.rule("moonlight", nesterov=False, **own)
    state, state_plain = rule.init(x), plain.init(x)
    for t in range(3):
        g = tensors(MATRICES, 1 + t, dtype=torch.float64)
        new, state = rule.step(x, g, state, lr=LR)
        muon, state_plain = plain.step(x, g, state_plain, lr=LR)
        for n in x:
            got, o = x[n] - new[n], x[n] - muon[n]
            norms = got.norm(dim=1)
            assert o.norm(dim=1).std() > 1e-2 * o.norm(dim=1).mean(), n  # not by itself
            torch.testing.assert_close(
                norms, norms.mean().expand_as(norms), rtol=1e-6, atol=0
            )
            want = o / o.norm(dim=1, keepdim=True)
            want = want * o.norm() / want.norm()
            torch.testing.assert_close(got, want, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "normuon", "mars_m"])
def test_cautious_decay_acts_where_step_and_parameter_agree(name):
    """After one step x is that of plain decay there, that of no decay elsewhere."""
    own = dict(ns_dtype=torch.float64) if name not in ("adamw", "lion") else {}
    x, g = (tensors(MATRICES, i, dtype=torch.float64) for i in (0, 1))

    def moved(**options):
        rule = marsopt.rule(name, **own, **options)
        return rule.step(x, g, rule.init(x), lr=LR)[0]

    free, plain = moved(weight_decay=0.0), moved(weight_decay=0.5)
    cautious = moved(weight_decay=0.5, cautious_weight_decay=True)
    for n in x:
        agrees = (x[n] - free[n]) * x[n] >= 0
        assert 0.1 < agrees.double().mean() < 0.9
        want = torch.where(agrees, plain[n], free[n])
        torch.testing.assert_close(cautious[n], want, rtol=0, atol=1e-14)
        assert (cautious[n] - plain[n]).abs().max() > 1e-3
