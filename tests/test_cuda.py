"""On a GPU: the compiled step against the eager one, under CUDA graphs, and without a
host sync. Skipped elsewhere.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from marsopt import MARS, REGISTRY

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU that torch can use"
)

SHAPES = [(64, 32), (64, 32), (48,), (32, 64), (64, 32)]


def parameters() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=g).cuda()) for s in SHAPES]


def gradients(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g).cuda() for s in SHAPES]


def options(mars_type: str) -> dict:
    lr = torch.tensor(1e-2, dtype=torch.float64, device="cuda")
    return dict(lr=lr, mars_type=mars_type, max_norm=0.7, ns_dtype=torch.float32)


def walk(optimizer: MARS, params: list[nn.Parameter], num_steps: int) -> None:
    for seed in range(num_steps):
        for p, g in zip(params, gradients(seed), strict=True):
            p.grad = g
        optimizer.step()


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_compiled_is_eager(mars_type):
    a, b = parameters(), parameters()
    walk(MARS(a, compile=False, **options(mars_type)), a, 4)
    walk(MARS(b, compile=True, **options(mars_type)), b, 4)
    torch.testing.assert_close(b, a, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_no_host_sync(mars_type):
    params = parameters()
    optimizer = MARS(params, compile=True, **options(mars_type))
    walk(optimizer, params, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_a_captured_step_replays(mars_type):
    """Gradients in fixed places; the learning rate is a tensor that may change."""
    eager, params = parameters(), parameters()
    reference = MARS(eager, compile=False, **options(mars_type))
    walk(reference, eager, 5)
    optimizer = MARS(params, compile=True, **options(mars_type))
    for p in params:
        p.grad = torch.zeros_like(p)

    def feed(seed: int) -> None:
        for p, g in zip(params, gradients(seed), strict=True):
            p.grad.copy_(g)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for seed in range(2):
            feed(seed)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    feed(2)
    with torch.cuda.graph(graph):
        optimizer.step()  # recorded, not run
    for seed in range(2, 5):
        feed(seed)
        graph.replay()
    torch.testing.assert_close(params, eager, rtol=0, atol=1e-5)
