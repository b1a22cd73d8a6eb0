"""What others do with a trajectory, by their formulas, and momentum without lag."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from train.compare.neighbours import (
    SNOO,
    EMANesterov,
    NearestState,
    QHAdamW,
    TwoAverages,
    lookahead,
)
from train.compare.optimizers import build
from train.gpt2 import GPT2, Shape

STEPS = 40
CURVES = torch.linspace(0.5, 3.0, 5, dtype=torch.float64)


def gradient(x):
    return CURVES * x - 1.0


def sgd(x, lr=0.05):
    made = torch.optim.SGD([x], lr=lr)
    made.train = made.eval = lambda: None
    return made


def run(optimizer, x, steps=STEPS, rate=lambda step: 1.0):
    """Return where gradients were taken, and what was trained, after every step."""
    at, trained = [], []
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rate(step)
        at.append(x.detach().clone())
        x.grad = gradient(x.detach())
        optimizer.step()
        ahead = x.detach().clone()
        optimizer.eval()
        trained.append(x.detach().clone())
        optimizer.train()
        assert torch.equal(x, ahead)  # to the bit
    return at, trained


def start():
    return nn.Parameter(torch.zeros(5, dtype=torch.float64))


def test_ema_nesterov_is_its_authors_recursion():
    """x' = step(x + s e), e' = 0.99 e + 0.01 (x' - x), s with the rate, in a window."""

    def rate(step):
        return 1.0 - step / (2 * STEPS)

    x = start()
    _, trained = run(EMANesterov(sgd(x), scale=0.6, steps=STEPS), x, rate=rate)
    first, last = round(500 / 3150 * STEPS), round(2400 / 3150 * STEPS)
    here = torch.zeros(5, dtype=torch.float64)
    e = torch.zeros_like(here)
    for step in range(STEPS):
        # the lookahead before a step has the rate of the step before
        scale = 0.6 * rate(step - 1) if first <= step < last else 0.0
        y = here + scale * e
        new = y - 0.05 * rate(step) * gradient(y)
        e = 0.99 * e + 0.01 * (new - here)
        here = new
        torch.testing.assert_close(trained[step], here, rtol=1e-12, atol=1e-14)


def test_snoo_is_nesterovs_momentum_on_what_some_steps_have_moved():
    x = start()
    _, trained = run(SNOO(sgd(x), lr=0.6, momentum=0.4, every=4), x)
    slow = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    outer = torch.optim.SGD([slow], lr=0.6, momentum=0.4, nesterov=True)
    fast = torch.zeros(5, dtype=torch.float64)
    for step in range(STEPS):
        fast = fast - 0.05 * gradient(fast)
        if (step + 1) % 4 == 0:
            slow.grad = slow.detach() - fast
            outer.step()
            fast = slow.detach().clone()
        torch.testing.assert_close(trained[step], fast, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("nu1", [1.0, 0.8])
def test_qhadamw_weighs_the_gradient_beside_adamws_average(nu1):
    """With nu1 = 1 it is torch's AdamW."""
    x, own = start(), dict(lr=0.05, betas=(0.9, 0.99), weight_decay=0.1)
    qh = QHAdamW([x], nu1=nu1, **own)
    qh.train = qh.eval = lambda: None
    _, trained = run(qh, x)
    y = start()
    adamw = torch.optim.AdamW([y], **own)
    here = torch.zeros(5, dtype=torch.float64)
    m = v = torch.zeros_like(here)
    for t in range(1, STEPS + 1):
        g = gradient(here)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        mean = nu1 * m / (1 - 0.9**t) + (1 - nu1) * g
        root = (v / (1 - 0.99**t)).sqrt() + 1e-8
        here = here * (1 - 0.05 * 0.1) - 0.05 * mean / root
        torch.testing.assert_close(trained[t - 1], here, rtol=1e-10, atol=1e-12)
        y.grad = gradient(y.detach())
        adamw.step()
        same = torch.allclose(trained[t - 1], y.detach(), rtol=1e-10, atol=1e-12)
        assert t == 1 or same == (nu1 == 1.0)


MIXTURES = [(0.9, 0.98, 0.5), (0.8, 0.99, 0.3), (0.95, 0.95, 0.4), (0.9, 0.99, 0.0)]


@pytest.mark.parametrize("fast, slow, weight", MIXTURES)
def test_a_mixture_of_averages_at_the_points_ahead_has_no_lag(fast, slow, weight):
    """Of a quadratic: whatever the trajectory, its momentum is the gradient at x."""
    a, b, rho = lookahead(fast, slow, weight)
    age = (1 - weight) * fast / (1 - fast) + weight * slow / (1 - slow)
    assert a + b == pytest.approx(age, rel=1e-12)
    torch.manual_seed(0)
    x = torch.randn(4000, 5, dtype=torch.float64).cumsum(0)
    e = m = s = torch.zeros(5, dtype=torch.float64)
    for before, now in zip(x, x[1:], strict=False):
        d = now - before
        e = rho * e + (1 - rho) * d
        g = gradient(now + a * d + b * e)
        m, s = fast * m + (1 - fast) * g, slow * s + (1 - slow) * g
    momentum = (1 - weight) * m + weight * s
    assert (momentum - gradient(x[-1])).abs().max() < 1e-10
    behind = (1 - weight) * m + weight * s - gradient(now + d)
    assert behind.abs().max() > 1e-3  # that would be another trajectory's


def test_two_averages_move_as_adamw_and_look_ahead_as_said():
    """With one decay for both AdamW's, gradients taken at x + gamma age d."""
    x = start()
    own = dict(lr=0.05, betas=(0.9, 0.9, 0.99), weight=0.5, weight_decay=0.1)
    at, trained = run(TwoAverages([x], gamma=0.3, **own), x, rate=lambda s: 1 / (1 + s))
    y = start()
    adamw = torch.optim.AdamW([y], lr=0.05, betas=(0.9, 0.99), weight_decay=0.1)
    before = y.detach().clone()
    for step in range(STEPS):
        adamw.param_groups[0]["lr"] = 0.05 / (1 + step)
        y.grad = gradient(at[step])
        adamw.step()
        torch.testing.assert_close(trained[step], y.detach(), rtol=1e-9, atol=1e-12)
        if step + 1 < STEPS:
            ahead = y.detach() + 0.3 * 9 * (y.detach() - before)
            torch.testing.assert_close(at[step + 1], ahead, rtol=1e-9, atol=1e-12)
        before = y.detach().clone()


@pytest.mark.parametrize("gamma", [0.0, 0.3])
def test_two_averages_follow_their_recursion(gamma):
    """Of two decays, with a rate that falls, and the slower one's weight with it."""
    fast, slow, beta2, lr, decay, eps = 0.8, 0.95, 0.99, 0.05, 0.1, 1e-8

    def rate(step):
        return 1.0 - step / (2 * STEPS)

    x = start()
    own = dict(lr=lr, betas=(fast, slow, beta2), weight=0.5, weight_decay=decay)
    at, trained = run(TwoAverages([x], gamma=gamma, eps=eps, **own), x, rate=rate)
    here = y = torch.zeros(5, dtype=torch.float64)
    m = s = v = e = torch.zeros_like(here)
    for step in range(STEPS):
        torch.testing.assert_close(at[step], y, rtol=1e-12, atol=1e-14)
        g, t, weight = gradient(y), step + 1, 0.5 * rate(step)
        m, s = fast * m + (1 - fast) * g, slow * s + (1 - slow) * g
        v = beta2 * v + (1 - beta2) * g * g
        mean = (1 - weight) * m / (1 - fast**t) + weight * s / (1 - slow**t)
        step_by = mean / ((v / (1 - beta2**t)).sqrt() + eps) + decay * here
        d = -lr * rate(step) * step_by
        here = here + d
        torch.testing.assert_close(trained[step], here, rtol=1e-10, atol=1e-12)
        a, b, rho = lookahead(fast, slow, weight)
        e = rho * e + (1 - rho) * d
        y = here + gamma * (a * d + b * e)
        assert b > 0.1  # or this would not tell e from d


def test_a_state_is_what_a_narrower_dtype_keeps():
    model = GPT2(Shape(1, 1, 8, 8, 8))
    recipe = dict(rule="adamw", lr=1e-3, nearest_state="bfloat16")
    made = build(model, recipe, steps=5, compile=False)
    assert isinstance(made, NearestState)
    torch.manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    made.step()
    seen = 0
    for state in made.inner.state.values():
        for key, value in state.items():
            if key != "step":
                seen += value.numel()
                assert torch.equal(value, value.to(torch.bfloat16).to(value.dtype))
    assert seen >= 2 * sum(p.numel() for p in model.parameters())
