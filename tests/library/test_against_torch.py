"""The baselines against torch.optim's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marsopt
from marsopt import MARS


def walk(optimizer, params, steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()


def twins(*shapes):
    a = [nn.Parameter(0.02 * torch.randn(s)) for s in shapes]
    return a, [nn.Parameter(p.detach().clone()) for p in a]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(
    "kw",
    [
        dict(gamma=0.0, clip=None, optimize_1d=True),
        dict(mars_type="adamw"),
    ],
    ids=["mars-adamw with gamma 0", "adamw"],
)
def test_adamw_over_100_steps(kw, amsgrad):
    a, b = twins((7, 5), (5,), (3, 2, 2))
    common = dict(
        lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, amsgrad=amsgrad
    )
    walk(MARS(a, compile=False, **common, **kw), a, 100)
    walk(torch.optim.AdamW(b, **common), b, 100)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_nadamw_over_100_steps(decay):
    """torch's momentum schedule mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2) is
    switched off by a momentum_decay so large that the power is 0: mu_t = beta1.
    """
    a, b = twins((7, 5), (5,), (3, 2, 2))
    common = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=decay)
    own = dict(decoupled_weight_decay=True, momentum_decay=1e6)
    walk(MARS(a, mars_type="nadamw", compile=False, **common), a, 100)
    walk(torch.optim.NAdam(b, **common, **own), b, 100)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)


@pytest.mark.parametrize("shape", [(256, 128), (128, 256), (192, 192)])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_and_moonlight(shape, scale):
    """torch.optim.Muon iterates in bf16: its updates are within 2e-2 of ours.

    In Frobenius norm; bf16 alone is 1e-2 off the polynomial at this size, and more
    for smaller matrices.
    """
    name = {"original": "muon", "match_rms_adamw": "moonlight"}[scale]
    x, lr = 0.02 * torch.randn(shape), 0.01
    p = nn.Parameter(x.clone())
    theirs = torch.optim.Muon([p], lr=lr, weight_decay=0.0, adjust_lr_fn=scale)
    ours = {
        dtype: marsopt.rule(name, weight_decay=0.0, ns_dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    }
    moving = {dtype: ([x], rule.init([x])) for dtype, rule in ours.items()}
    for t in range(10):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(t))
        p.grad, before = g.clone(), p.detach().clone()
        theirs.step()
        update = (p.detach() - before) / lr
        for dtype, rule in ours.items():
            (old,), state = moving[dtype]
            new, state = rule.step([old], [g], state, lr=lr)
            moving[dtype] = (new, state)
            error = ((new[0] - old) / lr - update).norm() / update.norm()
            assert float(error) < 2e-2, f"{dtype} at step {t}"
