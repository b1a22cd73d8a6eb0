"""Compiled steps of fully_shard. Eager steps: test_sharded.py; gradients of fully_shard
itself: test_for_model.py; state dicts: test_checkpoint.py.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from marsopt import LOCAL, MARS
from marsopt.parallel import MeshCollectives
from tests.processes import spawn

pytestmark = pytest.mark.processes


def build():
    """Uneven shards (5 and 3 rows on two ranks) and an empty one (1 row)."""
    torch.manual_seed(1)
    first, last = nn.Linear(6, 5), nn.Linear(3, 1, bias=False)
    return nn.Sequential(first, nn.LayerNorm(5), nn.Linear(5, 3, bias=False), last)


def train(model, collectives, compile):
    """Four steps, and three that a schedule changes, without a graph more."""
    optimizer = MARS(
        model.named_parameters(), lr=0.02, mars_type="mars-shampoo", weight_decay=0.1,
        max_norm=2.0, ns_dtype=torch.float32, compile=compile, collectives=collectives,
    )  # fmt: skip
    for t in range(7):
        g = torch.Generator().manual_seed(t)
        x, y = (torch.randn(8, n, generator=g) for n in (6, 1))
        optimizer.zero_grad()
        (30 * nn.functional.mse_loss(model(x), y)).backward()
        if t > 3:
            optimizer.param_groups[0].update(lr=0.02 / (t + 1), gamma=0.01 * t)
        with torch.compiler.set_stance("fail_on_recompile" if t > 3 else "default"):
            optimizer.step()


@mock.patch.object(torch, "compile", partial(torch.compile, backend="eager"))
def compiled(rank, world):
    """Whole parameters of compiled steps, by the graphs that dynamo makes (inductor
    makes of them what it does in one process), whose graphs for vectors are those of
    MARS-AdamW.
    """
    model, mesh = build(), init_device_mesh("cpu", (world,))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(world)
            module.set_force_sum_reduction_for_comms(True)
    train(model, MeshCollectives(mesh), True)
    return [p.full_tensor().detach() for p in model.parameters()]


def test_compiled_and_sharded():
    """Equal to whole ones; what is sent is counted in test_forecast.py."""
    model = build()
    train(model, LOCAL, False)
    for params in spawn(compiled, 2):
        for p, q in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=0, atol=1e-5)
