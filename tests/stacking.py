"""How parameters are moved: where they lie, or copied into rows. The one
place that knows how to force it.
"""

from __future__ import annotations

import pytest
import torch

from marsopt import MARS
from marsopt.optim import binding

# eager; compiled, every tensor by itself, as large ones; compiled, all tensors flat, as
# small ones
MODES = ("eager", "leaves", "flat")


def forced(patch: pytest.MonkeyPatch, mode: str) -> str:
    """From now on, what is compiled moves as ``mode`` says."""
    if mode != "eager":
        small = {"leaves": 0, "flat": 2**62}[mode]
        patch.setattr(binding, "SMALL", small)
    return mode


def build(params, mode: str, **kwargs) -> MARS:
    """An optimizer under ``forced``."""
    return MARS(params, **dict(compile=mode != "eager") | kwargs)


def traced():
    """A context in which compiled steps run eagerly, over the same stacks: what is
    compiled is tested elsewhere, and takes longer.
    """
    return torch.compiler.set_stance("force_eager")


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Matrices of one shape are written into one batch; eager steps too, so that a test
    need not compile to meet it.
    """
    patch.setattr(binding, "takes_batches", lambda device, is_local: is_local)


def fill(params, seed: int) -> None:
    """A fresh gradient for every parameter."""
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)


def run(optimizer, params, seeds) -> None:
    """A step on the gradients of each seed, ``traced``."""
    with traced():
        for seed in seeds:
            fill(params, seed)
            optimizer.step()


def run_protocol(optimizer, params, seeds) -> None:
    """Steps by exact MARS's protocol, which does nothing for other corrections."""
    with traced():
        for seed in seeds:
            fill(params, 1000 + seed)
            optimizer.update_previous_grad()
            fill(params, seed)
            optimizer.step()
            optimizer.update_last_grad()


def parameters(*shapes, seed: int = 0, dtype=torch.float32) -> list[torch.nn.Parameter]:
    """Parameters that are equal at every call."""
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in shapes]


def copies(params) -> list[torch.Tensor]:
    return [p.detach().clone() for p in params]


def equal(a, b, atol: float = 0.0) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=0, atol=atol)


def same(a: dict, b: dict) -> None:
    """State dicts, bit for bit."""
    torch.testing.assert_close(a["state"], b["state"], rtol=0, atol=0)
    assert a["param_groups"] == b["param_groups"]


def check_storages(tensors) -> None:
    """Tools that save, share and copy look at storages: each tensor has one of its own,
    that starts at its data and has its size.
    """
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()
    filled = [t.data_ptr() for t in tensors if t.numel()]
    assert len(set(filled)) == len(filled)
