"""MARS(take_grads=True): gradients become h, and steps are those of copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from marsopt import MARS
from marsopt.routing import MARS_TYPES

pytestmark = pytest.mark.usefixtures("both_layouts")

# one of a kind, so that each moves by itself where stacks are made
SHAPES = ((6, 4), (4,), (3, 5), (2, 3, 2, 2))
CLOSE = dict(rtol=0, atol=1e-6)


def pair(**options):
    """The same optimizer with copies, and without."""
    options = dict(lr=0.01, ns_dtype=torch.float32, compile=False) | options
    a = [nn.Parameter(0.1 * torch.randn(s)) for s in SHAPES]
    b = [nn.Parameter(p.detach().clone()) for p in a]
    return MARS(a, **options), MARS(b, take_grads=True, **options)


def params(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def kept(optimizer):
    return [optimizer.state[p]["last_grad"] for p in params(optimizer)]


def step(*optimizers, seed, scale=1.0, missing=()):
    for optimizer in optimizers:
        generator = torch.Generator().manual_seed(seed)
        for i, p in enumerate(params(optimizer)):
            g = scale * torch.randn(p.shape, generator=generator)
            p.grad = None if i in missing else g
        optimizer.step()


def equal(one, two):
    torch.testing.assert_close(params(two), params(one), **CLOSE)
    a, b = (o.state_dict()["state"] for o in (one, two))
    torch.testing.assert_close(b, a, **CLOSE)


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["no-max-norm", "max-norm"])
@pytest.mark.parametrize("mars_type", MARS_TYPES)
def test_steps_are_those_of_copies(mars_type, max_norm):
    """With the clip idle (small gradients) and active, and a missing gradient."""
    one, two = pair(mars_type=mars_type, max_norm=max_norm)
    for t, scale in enumerate((0.01, 3.0, 1.0, 0.02, 5.0)):
        missing = {2} if t == 2 else ()
        step(one, two, seed=t, scale=scale, missing=missing)
        torch.testing.assert_close(params(two), params(one), **CLOSE)
        assert all(p.grad is None for p in params(two))
    equal(one, two)


def test_h_is_the_gradient_itself():
    _, two = pair(optimize_1d=True)
    for p in params(two):
        p.grad = torch.randn(p.shape)
    places = [p.grad.data_ptr() for p in params(two)]
    two.step()
    assert [h.data_ptr() for h in kept(two)] == places


def test_backward_gives_gradients_that_can_be_taken():
    p = nn.Parameter(torch.randn(6, 4))
    optimizer = MARS([p], compile=False, take_grads=True)
    p.square().sum().backward()
    place = p.grad.data_ptr()
    optimizer.step()
    assert optimizer.state[p]["last_grad"].data_ptr() == place


@pytest.mark.parametrize(
    "lend",
    [
        lambda g: (g, g),
        lambda g: (whole := torch.stack([g, g]), whole[0]),
        lambda g: (row := g[:, :1].clone(), row.expand(g.shape)),
        lambda g: (columns := g.mT.contiguous(), columns.mT),
    ],
    ids=["held", "part of a buffer", "expanded", "other strides"],
)
def test_what_others_hold_is_copied(lend):
    """Its owner goes on with it after the step."""
    one, two = pair()
    for t in range(3):
        lent, g = lend(
            torch.randn(SHAPES[0], generator=torch.Generator().manual_seed(t))
        )
        for optimizer in (one, two):
            params(optimizer)[0].grad = g.clone() if optimizer is one else g
        del g
        one.step(), two.step()
        lent.fill_(7.0)
        assert params(two)[0].grad is None
        torch.testing.assert_close(params(two), params(one), **CLOSE)
    equal(one, two)


def test_one_gradient_of_two_parameters_is_copied():
    one, two = pair(max_norm=0.5)
    for t in range(3):
        for optimizer in (one, two):
            g = torch.randn(SHAPES[0], generator=torch.Generator().manual_seed(t))
            first = params(optimizer)[0]
            if t == 0:
                optimizer.add_param_group({"params": [nn.Parameter(0.5 * first.data)]})
            first.grad = params(optimizer)[-1].grad = g
            del g
            optimizer.step()
    equal(one, two)


def test_a_step_that_is_not_finite_leaves_h():
    one, two = pair(max_norm=0.5, optimize_1d=True)
    step(one, two, seed=0)
    before = [h.clone() for h in kept(two)]
    step(one, two, seed=1, scale=torch.nan)
    torch.testing.assert_close(kept(two), before, rtol=0, atol=0)
    assert two.num_skipped == 1
    assert all(p.grad is None for p in params(two))
    step(one, two, seed=2)
    equal(one, two)


def test_a_raised_step_takes_nothing():
    _, two = pair(nonfinite="raise")
    with pytest.raises(FloatingPointError):
        step(two, seed=0, scale=torch.inf)
    assert all(p.grad is not None for p in params(two))


def test_the_clip_that_h_still_lacks_is_not_forgotten():
    """By state dicts, copies, new groups and another mars_type."""
    one, two = pair(max_norm=0.5, optimize_1d=True)
    step(one, two, seed=0)
    assert max(h.abs().max() for h in kept(two)) > 0.5  # as it came
    equal(one, two)
    step(one, two, seed=1)
    fresh, _ = pair(max_norm=0.5, optimize_1d=True)
    fresh.load_state_dict(two.state_dict())
    twin = copy.deepcopy(two)
    for mine, theirs in zip(params(fresh), params(two), strict=True):
        mine.data.copy_(theirs)
    step(one, two, fresh, twin, seed=2)
    equal(one, two), equal(one, fresh), equal(one, twin)
    step(one, two, seed=3)
    for optimizer in (one, two):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    step(one, two, seed=4)
    equal(one, two)
    step(one, two, seed=5)
    for optimizer in (one, two):
        optimizer.param_groups[0]["mars_type"] = "mars-lion"
    step(one, two, seed=6)
    equal(one, two)


def test_loading_forgets_the_scale_of_before():
    one, two = pair(max_norm=0.5)
    saved = copy.deepcopy(one.state_dict())
    step(two, seed=0, scale=5.0)
    two.load_state_dict(saved)
    for mine, theirs in zip(params(two), params(one), strict=True):
        mine.data.copy_(theirs)
    step(one, two, seed=1)
    step(one, two, seed=2)
    equal(one, two)


def test_compiled_without_recompiles():
    one, two = pair(max_norm=0.5, compile=True)
    for t in range(4):
        with torch.compiler.set_stance("fail_on_recompile" if t else "default"):
            step(one, two, seed=t)
    equal(one, two)


@pytest.mark.parametrize(
    "options",
    [dict(h_dtype=torch.bfloat16), dict(state_dtype=torch.float64), dict(gamma=0.0)],
    ids=["h_dtype", "state_dtype", "gamma"],
)
def test_with_other_options(options):
    one, two = pair(max_norm=0.5, **options)
    for t in range(3):
        step(one, two, seed=t)
    equal(one, two)


def test_an_old_state_dict_is_whole_again_when_it_is_loaded():
    one, two = pair(max_norm=0.5, optimize_1d=True)
    saved = [optimizer.state_dict() for optimizer in (one, two)]  # live, as torch's
    step(one, two, seed=0, scale=5.0)
    for optimizer, old in zip((one, two), saved, strict=True):
        optimizer.load_state_dict(old)
    step(one, two, seed=1)
    equal(one, two)


def test_gradients_that_were_taken_are_all_that_is_held():
    """No buffer of zeros lives on for the sake of its neighbours."""
    small = [nn.Parameter(torch.ones(8)) for _ in range(2)]
    large = nn.Parameter(torch.ones(512, 256))  # alone also where stacks are made
    optimizer = MARS([*small, large], take_grads=True, optimize_1d=True, compile=True)
    with torch.compiler.set_stance("force_eager"):
        for p in (*small, large):
            p.grad = torch.ones_like(p)
        optimizer.step()
    kept = [optimizer.state[p]["last_grad"] for p in (*small, large)]
    assert sum(h.nbytes for h in kept) == sum(
        {
            h.untyped_storage().data_ptr(): h.untyped_storage().nbytes() for h in kept
        }.values()
    )


def test_groups_may_be_empty():
    p = nn.Parameter(torch.ones(2))
    MARS([{"params": []}, {"params": [p]}], take_grads=True, compile=False)


def test_exact_mars_keeps_none():
    with pytest.raises(ValueError, match="take_grads=True with is_approx=False on cpu"):
        MARS([nn.Parameter(torch.ones(2))], is_approx=False, take_grads=True)
