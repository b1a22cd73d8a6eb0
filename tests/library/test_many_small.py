"""Many small parameters of a shape."""

from __future__ import annotations

import torch
from torch import nn

from marsopt import MARS


def parameters(num, num_shapes):
    """Parameters with gradients, whose shapes are (1, 1) to (.., 20)."""
    torch.manual_seed(0)
    found = []
    for i in range(num):
        n = i % num_shapes
        p = nn.Parameter(torch.randn(n // 20 + 1, n % 20 + 1))
        p.grad = torch.randn_like(p)
        found.append(p)
    return found


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
