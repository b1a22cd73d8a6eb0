"""benchmarks.correlations: how like a gradient is to those before it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import correlations as command
from benchmarks.correlations import LAGS, QUARTERS, correlations
from train.errors import UserError


class Made:
    """A training whose gradients are numbers of one's own."""

    def __init__(self, gradient):
        self.p, self._gradient, self.count = torch.zeros(64), gradient, 0
        self.task = SimpleNamespace(model=SimpleNamespace(parameters=lambda: [self.p]))

    def gradient(self):
        self.p.grad = self._gradient(self.count)
        self.count += 1

    def update(self):
        self.p.grad = None


def test_what_lasts_what_alternates_and_what_is_noise():
    steps = 400
    lasting = correlations(Made(lambda step: torch.ones(64)), steps)
    assert lasting.shape == (QUARTERS, len(LAGS))
    torch.testing.assert_close(lasting, torch.ones_like(lasting))
    turned = correlations(Made(lambda step: (-1) ** step * torch.ones(64)), steps)
    assert turned[0].tolist() == pytest.approx([(-1) ** lag for lag in LAGS])
    torch.manual_seed(0)
    noise = correlations(Made(lambda step: torch.randn(64)), steps)
    assert noise.abs().max() < 0.1
    mixed = correlations(Made(lambda step: torch.randn(64) + 0.5), steps)
    assert mixed.mean() == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(
    "words, message",
    [
        (["tiny", "tiny_adamw"], "expected a study in a plain loop"),
        (["small", "Adam"], "and one of its methods .NAdamW; transport"),
        (["small", "NAdamW", "--out", "nowhere"], "got no run of NAdamW in the store"),
        (["small", "NAdamW", "--steps", "9"], "got --steps 9, expected at least 84"),
    ],
)
def test_bad_input(monkeypatch, words, message):
    monkeypatch.setattr(sys, "argv", ["correlations", *words])
    with pytest.raises(UserError, match=message):
        command.main()
