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


def test_a_step_over_channels_last_compiles_into_one_graph():
    rule = marsopt.rule("mars-normuon", ns_dtype=torch.float64, ns_steps=1, **FLATTENED)
    lr, found = torch.tensor(0.1, dtype=torch.float64), []
    for form in (torch.contiguous_format, torch.channels_last):
        params = [p.detach() for p in kernels(form)[:1]]
        step, state = rule.step, rule.init(params)
        if form is torch.channels_last:
            step = torch.compile(step, backend="aot_eager", fullgraph=True)
        params, state = step(params, [p.cos() for p in params], state, lr=lr)
        found.append([*params, *state.buffers["r"]])
    equal(*found, 1e-12)


def test_a_kernel_is_moved_by_one_loop_without_intermediates(monkeypatch):
    """g, h and m are read, h and m written: 20 bytes a parameter; then x,
    o in bfloat16, and x: 10.
    """
    forced(monkeypatch, "leaves")
    params = [nn.Parameter(torch.randn(64, 32, 3, 3)) for _ in range(2)]
    own = dict(mars_type="mars-m", ns_dtype=torch.bfloat16, ns_steps=1)
    optimizer = build(params, "leaves", **own, **FLATTENED)
    for p in params:
        p.grad = torch.randn_like(p)
    report = marsopt.profile(optimizer.step, steps=1, cold=False)
    num = params[0].numel()  # inductor's bytes are those of the first run
    _, *updates = report.graphs
    for graph, least in zip(updates, (20 * num, 10 * num), strict=True):
        assert len(graph.kernels) == 1 and graph.peak_bytes == 0
        assert least <= graph.num_bytes < 1.02 * least


def test_kernels_take_adamw_unless_the_group_says_otherwise():
    apart, as_one = kernels()[:2]
    groups = [{"params": [apart]}, {"params": [as_one], **FLATTENED}]
    optimizer = MARS(groups, mars_type="muon", compile=False)
    assert "exp_avg_sq" in optimizer.state[apart]
    assert set(optimizer.state[as_one]) == {"step", "momentum_buffer"}
    assert optimizer.state[as_one]["momentum_buffer"].shape == as_one.shape


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
