"""The schedules against values computed by hand, and their checks."""

from __future__ import annotations

import pytest
import torch

from train.engine.launch import parse
from train.engine.schedule import cosine, wsd
from train.engine.titan_optim import MarsOptimizers, RateSchedule


def test_cosine_is_the_authors():
    """0 at the first step, the peak after the warm-up, the floor at the end."""
    at = [cosine(t, warmup=10, total=110, floor=0.1) for t in range(130)]
    assert at[:11] == pytest.approx([t / 10 for t in range(11)])
    assert at[35] == pytest.approx(
        0.1 + 0.9 * (1 + 2**-0.5) / 2
    )  # a quarter of the way
    assert at[60] == pytest.approx(0.55)
    assert at[110:] == [0.1] * 20
    assert all(a > b for a, b in zip(at[10:109], at[11:110], strict=True))


def test_wsd_that_decays_at_once_is_a_straight_line():
    at = [wsd(t, warmup=4, total=14, decay=10, floor=0.5) for t in range(17)]
    down = [1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.5, 0.5]
    assert at == pytest.approx([0, 0.25, 0.5, 0.75, *down])


def test_wsd():
    at = [wsd(t, warmup=2, total=10, decay=4, floor=0.2) for t in range(12)]
    assert at == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_wsd_is_the_mars_m_scripts():
    """MARS_M/train_mars_m.py: the last fifth, lr (max_iters - it)/(0.2 max_iters)."""
    for it in (0, 1999, 2000, 50_000, 79_999, 80_000, 90_000, 99_999, 100_000):
        if it < 2000:
            want = it / 2000
        elif it < 80_000:
            want = 1.0
        else:
            want = (100_000 - it) / 20_000
        got = wsd(it, warmup=2000, total=100_000, decay=20_000, floor=0.0)
        assert got == pytest.approx(want), it


def test_no_warm_up():
    assert cosine(0, warmup=0, total=10, floor=0.0) == 1.0
    assert wsd(0, warmup=0, total=10, decay=10, floor=0.0) == 1.0


@pytest.mark.parametrize(
    ("options", "want"),
    [
        (dict(kind="cosine"), [0, 1, 2, 1.853553, 1.5, 1.146447, 1, 1]),
        (dict(kind="linear"), [0, 1, 2, 1.75, 1.5, 1.25, 1, 1]),
        (dict(kind="wsd", decay_ratio=1 / 3), [0, 1, 2, 2, 2, 1.5, 1, 1]),
        (dict(kind="wsd"), [0, 1, 2, 2, 2, 2, 1, 1]),  # a fifth of 6 steps is 1
        (dict(kind="linear", total_steps=4), [0, 1, 2, 1.5, 1, 1, 1, 1]),
    ],
    ids=["cosine", "linear", "wsd", "wsd-default", "total_steps"],
)
def test_rates_of_all_groups(options, want):
    """Peak 2, half of it at the end, warm-up 2 of 6 steps; LayerNorm weights in
    proportion.
    """
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    config = MarsOptimizers.Config(lr=2.0, lr_1d=0.5, compile=False)
    optimizers = config.build(model_parts=[model])
    rates = RateSchedule.Config(warmup_steps=2, min_lr_factor=0.5, **options)
    schedule = rates.build(optimizers=optimizers, training_steps=6)
    seen = []
    for _ in range(8):
        groups = optimizers.mars.param_groups
        assert len({group["lr"] for group in groups}) == 1
        seen.append(groups[0]["lr"])
        optimizers.step()
        schedule.step()
    assert seen == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(
    ("name", "lr", "share"),
    [
        ("tiny_mars_adamw", 2.5e-3, 0.1),
        ("tiny_mars_adamw", 4e-4, 0.1),  # below the recipe's own last learning rate
        ("tiny_moonlight", 0.05, 0.1),
        ("small_mars_adamw", 2e-3, 3e-5 / 6e-3),
        ("large_lion", 1e-3, 1e-5 / 3 / 6.67e-5),
    ],
)
def test_the_last_rate_keeps_its_share_of_another_peak(name, lr, share, kind):
    words = ["--config", name, "--optimizer.lr", str(lr), "--lr-scheduler.kind", kind]
    config = parse(words)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    config.optimizer.compile = False
    optimizers = config.optimizer.build(model_parts=[model])
    schedule = config.lr_scheduler.build(optimizers=optimizers, training_steps=5000)
    (scheduler,) = schedule.schedulers
    for factor, group in zip(
        scheduler.lr_lambdas, optimizers.mars.param_groups, strict=True
    ):
        last = group["initial_lr"] * factor(5000)
        assert last == pytest.approx(lr * share, rel=1e-6)
