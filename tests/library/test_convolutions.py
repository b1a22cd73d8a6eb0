"""Convolution kernels as matrices: what test_matrices.py, where a kernel moves as
the two-dimensional tensor of its values does, leaves open.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marsopt
from marsopt import MARS
from tests.slices import FLATTENED
from tests.stacking import MODES, build, equal, forced, run

KERNELS = [(6, 4, 3, 3), (6, 4, 3, 3), (4, 6, 3, 3)]
EXACT = dict(lr=0.1, ns_dtype=torch.float64)


def kernels(form=torch.contiguous_format) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    wholes = [torch.randn(s, generator=g, dtype=torch.float64) for s in KERNELS]
    return [nn.Parameter(x.to(memory_format=form)) for x in wholes]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mars_type", ["mars-m", "mars-normuon"])
def test_channels_last_changes_nothing(mars_type, mode, monkeypatch):
    """Columns are those of the values, in whatever order these lie in memory."""
    forced(monkeypatch, mode)
    own = dict(EXACT, mars_type=mars_type, **FLATTENED)
    want, got = kernels(), kernels(torch.channels_last)
    for params in (want, got):
        run(build(params, mode, **own), params, seeds=range(3))
    equal(got, want, 1e-12)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in got)


def test_the_step_has_the_scale_of_the_flattened_shape():
    """Not of its last two dims: 0.2 sqrt(max(6, 4 * 9)) times an orthogonal factor."""
    p = kernels()[0]
    p.grad, before = p.detach().cos(), p.detach().clone()
    own = dict(EXACT, mars_type="moonlight", weight_decay=0.0, **FLATTENED)
    MARS([p], compile=False, **own).step()
    o = marsopt.newton_schulz(p.grad.flatten(1), dtype=torch.float64)
    want = before - 0.1 * 0.2 * 36**0.5 * o.view_as(p)
    torch.testing.assert_close(p.detach(), want)


def test_moments_of_rows_start_anew_where_rows_are_others():
    (p, *_) = params = kernels()[:1]
    optimizer = build(params, "eager", mars_type="normuon", **EXACT, **FLATTENED)
    run(optimizer, params, seeds=[0])
    entry = optimizer.state[p]
    kept = entry["momentum_buffer"]
    assert entry["row_exp_avg_sq"].shape == (1, 6)
    optimizer.param_groups[0]["matrices"] = "batched"
    run(optimizer, params, seeds=[1])
    entry = optimizer.state[p]
    assert entry["momentum_buffer"] is kept
    assert entry["row_exp_avg_sq"].shape == (6 * 4, 3)
