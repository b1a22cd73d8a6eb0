"""Matrices in batches and blocks equal a loop over the slices."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import marsopt
from marsopt import MARS, REGISTRY, FlatGroup
from tests.slices import TENSORS, Several, at_once, in_loop, values
from tests.stacking import MODES, build, forced, traced
from tests.table import steady

STEPS = 3
OPTIONS = dict(
    lr=0.1, lr_1d=0.1, weight_decay=0.1, ns_dtype=torch.float64, max_norm=3.0
)
CASES = [
    (mars_type, correction)
    for mars_type, rule in REGISTRY.items()
    for correction in (("approximate",) if rule.is_mars else (None,))
]


def largest(got, want) -> float:
    return max(float((got[n].detach() - want[n]).abs().max()) for n in want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mars_type, correction", CASES)
def test_the_class_moves_every_matrix_as_if_it_were_alone(
    mars_type, correction, mode, monkeypatch
):
    forced(monkeypatch, mode)
    own = dict(OPTIONS, mars_type=mars_type, correction=correction)
    own |= steady(mars_type)
    want = in_loop(TENSORS, STEPS, compile=False, **own)
    with traced():
        got, _ = at_once(TENSORS, STEPS, compile=mode != "eager", **own)
    assert largest(got, want) < 1e-12


@pytest.mark.parametrize(
    "mars_type", [name for name, rule in REGISTRY.items() if rule.matrix_only]
)
def test_a_fused_weight_is_its_parts_to_the_bit(mars_type):
    """Norms of narrow parts are summed in another order than those of parameters: no
    clip acts on them here. Parts have different sizes: equal parts are one batched
    product, which rounds otherwise.
    """
    clips = (None, 1.0) if REGISTRY[mars_type].is_mars else (None,)
    narrow, wide = ((16, 6), (10, 4, 2)), ((24, 300), (16, 5, 3))
    own = dict(mars_type=mars_type, lr=0.1, compile=False, **steady(mars_type))
    for clip, (shape, splits) in zip(clips, (narrow, wide), strict=False):
        clipped = dict(clip=clip) if len(clips) > 1 else {}
        fused = {"qkv": Several(shape, dict(splits=splits))}
        want = in_loop(fused, STEPS, **own, **clipped)
        got, _ = at_once(fused, STEPS, **own, **clipped)
        atol = 1e-12 if clip else 0.0  # sums of parts are added in another order
        torch.testing.assert_close(got["qkv"], want["qkv"], rtol=0, atol=atol)


def test_compiled_steps_are_those_of_the_loop(monkeypatch):
    """Under a default device too; and changing hyperparameters compile nothing anew."""
    forced(monkeypatch, "flat")
    own = dict(OPTIONS, mars_type="mars-normuon", ns_steps=2)
    tensors = {name: TENSORS[name] for name in ("experts", "qkv")}
    want = in_loop(tensors, STEPS, compile=False, **own)
    with torch.device("cpu"):  # as torch.set_default_device
        got, optimizer = at_once(tensors, STEPS, compile=True, **own)
        assert largest(got, want) < 1e-12
        with torch.compiler.set_stance("fail_on_recompile"):
            for group in optimizer.param_groups:
                group.update(lr=0.05, gamma=0.1)
            optimizer.step()


def test_a_batch_is_moved_by_one_loop_without_intermediates(monkeypatch):
    """36 bytes a parameter, as of single matrices."""
    forced(monkeypatch, "leaves")
    params = [nn.Parameter(torch.randn(8, 64, 64)) for _ in range(2)]
    optimizer = build(params, "leaves", matrices="batched", max_norm=1.0)
    for p in params:
        p.grad = torch.randn_like(p)
    report = marsopt.profile(optimizer.step, steps=1, cold=False)
    (update,) = (graph for graph in report.graphs if graph.name == "update")
    num = params[0].numel()  # inductor's bytes are those of the first run
    assert len(update.kernels) == 1 and update.peak_bytes == 0
    assert 36 * num <= update.num_bytes < 1.02 * 36 * num


def together(kind: str) -> dict[str, Several]:
    """Those that one rule with one set of options can take together."""
    alike = {}, dict(matrices=kind)
    return {n: s for n, s in TENSORS.items() if s.options in alike}


@pytest.mark.parametrize("flat", [False, True], ids=["leaves", "FlatGroup"])
@pytest.mark.parametrize("kind", ["batched", "flattened"])
@pytest.mark.parametrize("mars_type", REGISTRY)
def test_a_rule_moves_every_matrix_as_if_it_were_alone(mars_type, kind, flat):
    tensors = together(kind)
    more = steady(mars_type)
    own = OPTIONS | more
    want = in_loop(tensors, STEPS, mars_type=mars_type, compile=False, **own)
    rule = marsopt.mars(
        mars_type=mars_type, base_lr=0.1, lr_1d=0.1, weight_decay=0.1, max_norm=3.0,
        ns_dtype=torch.float64, matrices=kind, **more,
    )  # fmt: skip
    pack = FlatGroup.pack if flat else dict
    params = pack(values(0, tensors))
    state = rule.init(params)
    for t in range(STEPS):
        grads = pack(values(1 + t, tensors))
        params, state = rule.step(params, grads, state, lr=0.1)
    assert largest(params.unpack() if flat else params, want) < 1e-12


def test_the_clip_of_a_whole_tensor_is_that_of_one_matrix():
    """An elementwise rule sees no shape but through its clip."""
    own = dict(OPTIONS, mars_type="mars-adamw", compile=False)
    several = {"experts": TENSORS["experts"]}
    got, _ = at_once(several, STEPS, clip_per="tensor", **own)
    p = nn.Parameter(values(0, several)["experts"].view(12, 6).clone())
    optimizer = MARS([p], **own)
    for t in range(STEPS):
        p.grad = values(1 + t, several)["experts"].view(12, 6).clone()
        optimizer.step()
    torch.testing.assert_close(got["experts"].detach().view(12, 6), p.detach())
    apart, _ = at_once(several, STEPS, **own)
    assert (apart["experts"] - got["experts"]).abs().max() > 1e-3


def test_what_a_tensor_is_made_of_may_change_between_steps():
    """As ``mars_type`` may: the state goes on."""
    (p,) = params = [nn.Parameter(torch.randn(8, 6))]
    optimizer = build(params, "eager", mars_type="muon", ns_dtype=torch.float32)
    p.grad = torch.randn(8, 6)
    optimizer.step()
    before, m = p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()
    optimizer.param_groups[0].update(splits=2, weight_decay=0.0)
    optimizer.step()
    m = 0.95 * m + 0.05 * p.grad
    u = 0.05 * p.grad + 0.95 * m
    o = torch.cat([marsopt.newton_schulz(x, dtype=torch.float32) for x in u.split(4)])
    torch.testing.assert_close(p.detach(), before - 3e-3 * o)


@pytest.mark.parametrize("splits", [(3, 10, 3), 4, None])
def test_factors_of_other_parts_restart(splits):
    """Also where they have as many elements."""
    several = {"qkv": Several((16, 6), dict(splits=(10, 3, 3)))}
    options = dict(mars_type="soap", lr=0.1, compile=False, **steady("soap"))
    params, optimizer = at_once(several, 2, **options)
    optimizer.param_groups[0]["splits"] = splits
    optimizer.step()
    entry = optimizer.state[params["qkv"]]
    assert entry["step"] == entry["stage_count"] == 1


def test_groups_say_only_what_differs():
    """So that checkpoints from before the options existed go on."""
    p = nn.Parameter(torch.zeros(4, 4))
    assert {"matrices", "splits", "clip_per"}.isdisjoint(MARS([p]).param_groups[0])
    assert MARS([p], splits=2).param_groups[0]["splits"] == 2


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(matrices="3d"), "got matrices='3d', expected one of"),
        (dict(splits=0), "got splits=0, expected None, a whole number >= 1 or a tuple"),
        (dict(splits=True), "got splits=True, expected None, a whole number"),
        (dict(splits=(4, 0, 4)), r"got splits=\(4, 0, 4\), expected None, a whole"),
        (dict(splits=()), r"got splits=\(\), expected None, a whole"),
        (dict(clip_per="row"), "got clip_per='row', expected one of"),
        (dict(splits=3), r"got splits=3 for parameter 'w' of shape"),
        (dict(splits=(4, 2)), r"for parameter 'w' .*sizes that add up to its 8 rows"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    named = [("w", nn.Parameter(torch.zeros(8, 4)))]
    with pytest.raises(ValueError, match=message):
        MARS(named, **options)
    with pytest.raises(ValueError, match=message):
        MARS([{"params": named, **options}])


def test_splits_are_checked_when_they_change_too():
    p = nn.Parameter(torch.ones(8, 4))
    optimizer = MARS([("w", p)], splits=2, compile=False)
    saved = optimizer.state_dict()
    for wrong in (3, (4, 2)):
        told = rf"got splits={re.escape(str(wrong))} for parameter"
        before = p.detach().clone()
        for groups in (optimizer.param_groups, saved["param_groups"]):
            groups[0]["splits"] = wrong
        p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match=told):
            optimizer.step()
        optimizer.param_groups[0]["splits"] = 2
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["splits"] == 2
        assert torch.equal(p, before)
    optimizer.step()


def test_a_rule_for_matrices_says_which_it_takes():
    convolution = {"w": torch.zeros(2, 3, 4)}
    with pytest.raises(ValueError, match=r"expected a matrix \(ndim 2\)"):
        marsopt.rule("muon").init(convolution)
    marsopt.rule("muon", matrices="batched").init(convolution)
    with pytest.raises(ValueError, match="expected matrices .ndim 2 or more."):
        marsopt.rule("muon", matrices="batched").init({"b": torch.zeros(3)})
    with pytest.raises(ValueError, match="expected a divisor of its 3 rows"):
        marsopt.rule("muon", matrices="batched", splits=2).init(convolution)
