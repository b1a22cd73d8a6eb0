"""``statistics``: what the last step has measured, by parameter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from marsopt import MARS
from tests.stacking import fill
from tests.table import ROWS, SHAPES, tensors


def start(dtype=torch.float64):
    return {n: nn.Parameter(x) for n, x in tensors(SHAPES, 0, dtype=dtype).items()}


def optimizer_of(params, row, **more):
    options = dict(mars_type=row.mars_type, lr=0.02, compile=False)
    return MARS(params.items(), **{**row.of_class, **options, **more})


def step(params, optimizer, seed, row):
    fill(params.values(), seed)
    optimizer.step()


def by_name(found, field):
    return dict(zip(found.names, getattr(found, field).tolist(), strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_norms_of_every_rule(name):
    row, params = ROWS[name], start()
    optimizer = optimizer_of(params, row, max_norm=3.0)
    for seed in range(3):
        step(params, optimizer, seed, row)
    found = optimizer.statistics()
    assert set(found.names) == set(params)
    norms = {n: float(p.grad.norm()) for n, p in params.items()}
    assert by_name(found, "grad_norm") == pytest.approx(norms, rel=1e-12)
    clip = 3.0 / (float(optimizer.grad_norm) + 1e-6)
    assert float(found.global_clip) == pytest.approx(min(1.0, clip), rel=1e-12)


@pytest.mark.parametrize("max_norm", [None, 15.0])
def test_factors_of_the_clip_are_those_of_c(max_norm):
    """By m after one step: (1 - beta1) c, where c = (1 + k) g before its clip."""
    params = start()
    options = dict(gamma=0.1, clip=3.0, max_norm=max_norm)
    optimizer = MARS(
        params.items(),
        mars_type="mars-adamw",
        optimize_1d=True,
        compile=False,
        **options,
    )
    fill(params.values(), 1)
    optimizer.step()
    found = optimizer.statistics()
    k = 0.1 * 0.95 / 0.05
    for n, clip in by_name(found, "clip").items():
        c = optimizer.state[params[n]]["exp_avg"] / 0.05
        whole = (1 + k) * float(found.global_clip) * params[n].grad
        torch.testing.assert_close(clip * whole, c)
        assert clip == pytest.approx(min(1.0, 3.0 / float(whole.norm())))
    assert min(found.clip) < 1


def test_groups_of_one_rule_are_joined():
    params = start()
    groups = [
        {"params": [(n, p)], "gamma": 0.1 * i}
        for i, (n, p) in enumerate(params.items())
    ]
    options = dict(mars_type="mars-adamw", optimize_1d=True, compile=False, clip=1.0)
    optimizer = MARS(groups, log_time=3, nesterov=False, **options)
    for seed in range(2):
        last = {n: p.grad for n, p in params.items()}
        fill(params.values(), seed)
        optimizer.step()
    found = by_name(optimizer.statistics(), "clip")
    for i, (n, p) in enumerate(params.items()):
        k = 0.1 * i * 2 / 3  # gamma beta1 / (1 - beta1), beta1 = t / (t + 3)
        c = p.grad + k * (p.grad - last[n])
        assert found[n] == pytest.approx(1 / float(c.norm()))


def test_heads_have_one_norm_and_the_smallest_factor():
    p = nn.Parameter(torch.randn(12, 4, dtype=torch.float64))
    options = dict(splits=3, clip=1.0, ns_dtype=torch.float64)
    optimizer = MARS([p], mars_type="mars-m", compile=False, **options)
    fill([p], 0)
    optimizer.step()
    found = optimizer.statistics()
    k = 0.025 * 0.95 / 0.05
    factors = [1 / ((1 + k) * float(g.norm())) for g in p.grad.split(4)]
    assert found.names == ["group0.0"]
    assert found.grad_norm.tolist() == pytest.approx([float(p.grad.norm())])
    assert found.clip.tolist() == pytest.approx([min(1.0, *factors)])


def test_a_missing_gradient_has_no_norm_and_a_copy_no_step():
    params = start(torch.float32)
    optimizer = optimizer_of(params, ROWS["adamw"])
    fill(params.values(), 0)
    params["bias"].grad = None
    optimizer.step()
    assert by_name(optimizer.statistics(), "grad_norm")["bias"] == 0
    with pytest.raises(RuntimeError, match="before a step"):
        copy.deepcopy(optimizer).statistics()
