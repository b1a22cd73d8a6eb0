"""Thousands of small parameters."""

from __future__ import annotations

import pytest
import torch

from benchmarks.many_small import measure, parameters
from marsopt import MARS


@pytest.mark.parametrize("num_shapes", [4, 60])
def test_many_small_parameters_take_no_longer_than_torch(num_shapes):
    """Generous: the machine may be busy. One by one, a step took ten times as long."""
    found = measure(2000, num_shapes, 5, compile=False)
    ours, torch_ = found["MARS-AdamW"], found["torch AdamW foreach"]
    assert ours[1] < 2 * torch_[1]


def test_stacked_they_move_as_one_by_one():
    many, alone = parameters(20, 1), parameters(20, 1)
    together = MARS(many, lr=0.01, compile=False)
    assert len(together.describe().buckets) == 1
    each = [MARS([p], lr=0.01, compile=False) for p in alone]
    for _ in range(3):
        together.step()
        for optimizer in each:
            optimizer.step()
    for p, q in zip(many, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
