"""The laws of research/convergence.md: how far momentum is from the true gradient, by
correction, on a loss that is not quadratic and whose batches differ in their curvature.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import marsopt
from marsopt.rules.numerics import at
from research.convergence import (
    CURVATURE,
    CURVES,
    LOSS,
    NOISE_ALONE,
    Case,
    batches,
    best,
    exponent,
    law,
    measured,
    memories,
    modes,
    moments,
    power_law_losses,
)


@pytest.mark.parametrize("form", ["plain", "approximate", "exact"])
def test_what_is_measured_is_the_first_moment_of_the_library(form):
    """Unclipped, on one path and the same batches."""
    case, num = Case(form, 0.1, 0.3), 8
    correction = "approximate" if form == "plain" else form
    options = dict(correction=correction, gamma=0.0 if form == "plain" else 0.3)
    rule = marsopt.rule("mars-adamw", betas=(0.9, 0.99), clip=None, **options)
    path = [np.linspace(-2, 3, num) + 0.1 * t * t for t in range(12)]
    gradients = [g for g, _ in zip(batches(0.5, num), path[1:], strict=False)]
    want = moments(case, path, gradients)
    state = rule.init({"w": torch.from_numpy(path[0])[None]})
    for before, x, g, m in zip(path, path[1:], gradients, want, strict=False):
        tree = {"w": torch.from_numpy(x)[None]}
        given = {}
        if form == "exact":
            given["reference"] = {"w": torch.from_numpy(g(before))[None]}
        gradient = {"w": torch.from_numpy(g(x))[None]}
        _, state = rule.step(tree, gradient, state, lr=0.0, **given)
        found = state.buffers["m"]["w"][0].numpy()
        np.testing.assert_allclose(found, m, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", [*CURVES, *NOISE_ALONE])
def test_closed_forms_are_what_is_measured(case):
    for a, step in ((0.2, 0.1), (0.05, 0.02)):
        there = case._replace(a=a, step=step)
        assert measured(there) == pytest.approx(law(there), rel=0.06)


@pytest.mark.parametrize(
    "form, gamma, slope, in_steps",
    [
        ("plain", 0.0, 1 / 3, 1 / 4),
        ("transport", 0.2, 1 / 3, 1 / 4),
        ("exact", 0.2, 1 / 3, 1 / 4),
        ("transport", 1.0, 2 / 5, 2 / 7),
        ("exact", 1.0, 1 / 2, 1 / 3),
    ],
)
def test_exponents_follow_from_the_best_average(form, gamma, slope, in_steps):
    """The smallest error by step length; and of steps T, where that error balances
    1 / (T step).
    """
    lengths = np.geomspace(1e-5, 1e-3, 9)
    errors = [law(best(Case(form, 0.5, gamma, s, 1.0))) for s in lengths]
    assert exponent(lengths, errors) == pytest.approx(slope, abs=0.01)
    num_steps = 1 / (np.array(errors) * lengths)
    assert exponent(num_steps, errors) == pytest.approx(-in_steps, abs=0.01)
    if gamma == 0.2:  # the same rate, for 1 - gamma of the steps
        plain = [law(best(Case("plain", 0.5, 0.0, s, 1.0))) for s in lengths]
        ratio = np.divide(errors, plain)
        assert ratio == pytest.approx(0.8 ** (1 / 3), abs=0.01)


def test_memory_that_grows_bears_steps_that_grow_and_they_have_the_larger_exponent():
    """Loss falls as T^-s on a power-law spectrum with gradient noise: s is SGD's, 1/2,
    for memory of a fixed age and for log time at one learning rate. Steps along m that
    grow as t^0.4 have 0.5 * 1.4 in log time, and diverge with a fixed age.
    """
    t, losses = memories(2048)
    growing = at(1.0, torch.from_numpy(t), log_time=8.0)
    np.testing.assert_allclose(growing, t / (t + 8))
    slopes = [-exponent(t[512:], losses[512:, i]) for i in range(3)]
    assert slopes[:2] == pytest.approx([0.5, 0.5], abs=0.02)
    assert slopes[2] == pytest.approx(0.7, abs=0.04)
    assert losses[-1, 2] < 0.6 * losses[-1, :2].min()
    assert losses[-1, 3] > 1.5 * losses[:, 3].min()  # it turned, and rises


def test_expected_losses_without_noise_are_those_of_the_path():
    curvature, num = modes()
    x, m, decays = curvature ** (LOSS / CURVATURE / 2 - 0.5), 0.0, [0.5, 0.8, 0.9, 0.9]
    want = []
    for t, beta in enumerate(decays, start=1):
        want.append((num * curvature * x * x).sum() / 2)
        g = curvature * x
        m = beta * m + (1 - beta) * g
        x = x - 0.3 * (g + t**0.5 * m)
    found = power_law_losses(np.array([decays]), np.array([0.5]), lr=0.3, noise=0.0)
    assert found[:, 0] == pytest.approx(want)
