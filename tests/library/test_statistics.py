"""``statistics``: what the last step has measured, by parameter."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

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


def rms(x):
    return float(x.square().mean().sqrt())


def moved(params, before):
    return {n: rms(p.detach() - before[n]) / rms(before[n]) for n, p in params.items()}


def by_name(found, field):
    return dict(zip(found.names, getattr(found, field).tolist(), strict=True))


def held(params, optimizer):
    """Copies of what a step is measured by."""
    return {n: p.detach().clone() for n, p in params.items()}


@pytest.mark.parametrize("name", ROWS)
def test_norms_and_updates_of_every_rule(name):
    """And a step that is tracked is the same step."""
    row = ROWS[name]
    params, others = start(), start()
    optimizer = optimizer_of(params, row, max_norm=3.0)
    plain = optimizer_of(others, row, max_norm=3.0)
    optimizer.track_updates = True
    for seed in range(3):
        step(others, plain, seed, row)
        before = held(params, optimizer) if seed else start()
        step(params, optimizer, seed, row)
    found = optimizer.statistics()
    assert set(found.names) == set(params)
    norms = {n: float(p.grad.norm()) for n, p in params.items()}
    assert by_name(found, "grad_norm") == pytest.approx(norms, rel=1e-12)
    after = held(params, optimizer)
    updates = {n: rms(after[n] - before[n]) / rms(before[n]) for n in params}
    assert by_name(found, "update") == pytest.approx(updates, rel=1e-10)
    clip = 3.0 / (float(optimizer.grad_norm) + 1e-6)
    assert float(found.global_clip) == pytest.approx(min(1.0, clip), rel=1e-12)
    assert plain.statistics().update is None
    assert all(torch.equal(params[n], others[n]) for n in params)


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


def test_a_skipped_step_moves_nothing_and_a_missing_gradient_has_no_norm():
    params = start(torch.float32)
    optimizer = optimizer_of(params, ROWS["adamw"])
    optimizer.track_updates = True
    fill(params.values(), 0)
    params["bias"].grad = None
    optimizer.step()
    found = optimizer.statistics()
    assert by_name(found, "grad_norm")["bias"] == by_name(found, "update")["bias"] == 0
    params["wide"].grad[0, 0] = torch.nan
    optimizer.step()
    assert optimizer.statistics().update.tolist() == [0.0] * len(params)
    optimizer.track_updates = False
    optimizer.step()
    assert optimizer.statistics().update is None
    with pytest.raises(RuntimeError, match="before a step"):
        copy.deepcopy(optimizer).statistics()


def test_tracked_steps_have_graphs_of_their_own(monkeypatch):
    """One more, of ``update``, compiled once; without it nothing is another graph."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    params = start()
    optimizer = optimizer_of(params, ROWS["adamw"], compile=True)
    counts = []
    for tracks in (False, True, False, True):
        before = counters["stats"]["unique_graphs"]
        optimizer.track_updates = tracks
        fill(params.values(), 0)
        x = {n: p.detach().clone() for n, p in params.items()}
        optimizer.step()
        counts.append(counters["stats"]["unique_graphs"] - before)
    assert counts[0] >= 2
    assert counts[1:] == [1, 0, 0]
    found = by_name(optimizer.statistics(), "update")
    assert found == pytest.approx(moved(params, x), rel=1e-9)


def test_an_infinite_gradient_clips_all_of_it_and_leaves_the_others_a_factor():
    params = start(torch.float32)
    optimizer = optimizer_of(params, ROWS["adamw"], max_norm=1.0)
    fill(params.values(), 0)
    params["wide"].grad[0, 0] = torch.inf
    optimizer.step()
    found = optimizer.statistics()
    assert float(found.global_clip) == 0.0
    assert found.clip.tolist() == [1.0] * len(params)
