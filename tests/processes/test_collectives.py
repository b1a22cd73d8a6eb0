"""Compiled steps, state dicts and errors of fully_shard. Eager steps: test_sharded.py;
gradients of fully_shard itself: test_for_model.py.
"""

from __future__ import annotations

import io
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from marsopt import MARS
from marsopt.parallel import MeshCollectives
from tests.processes import spawn

pytestmark = pytest.mark.processes

STEPS = 4


class Model(nn.Module):
    """Uneven shards (5 and 3 rows on two ranks) and an empty one (1 row)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.second = nn.Linear(5, 3, bias=False)
        self.last = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.norm(self.first(x)))))


def train(model, optimizer):
    """STEPS steps on seeded batches."""
    for t in range(STEPS):
        g = torch.Generator().manual_seed(t)
        dtype = model.first.weight.dtype
        x, y = (torch.randn(8, n, generator=g).to(dtype) for n in (6, 1))
        optimizer.zero_grad()
        (30 * nn.functional.mse_loss(model(x), y)).backward()
        optimizer.step()


def on_mesh():
    return MeshCollectives(init_device_mesh("cpu", (dist.get_world_size(),)))


def make(mars_type, collectives=None, compiled=False, dtype=torch.float64):
    torch.manual_seed(1)
    model = Model().to(dtype)
    kw = dict(
        lr=0.02,
        mars_type=mars_type,
        weight_decay=0.1,
        max_norm=2.0,
        ns_dtype=dtype,
        compile=compiled,
    )
    if collectives is None:
        return model, MARS(model.named_parameters(), **kw)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(dist.get_world_size())
            module.set_force_sum_reduction_for_comms(True)
    return model, MARS(model.named_parameters(), collectives=collectives, **kw)


def whole(model):
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in model.named_parameters()
    }


def turn(optimizer, t):
    """What a schedule may change, without a graph more."""
    optimizer.param_groups[0].update(lr=0.02 / (t + 1), gamma=0.01 * t)


@mock.patch.object(torch, "compile", partial(torch.compile, backend="eager"))
def compiled(rank, world):
    """Whole parameters of compiled steps, by the graphs that dynamo makes (inductor
    makes of them what it does in one process), whose graphs for vectors are those of
    MARS-AdamW.
    """
    model, optimizer = make("mars-shampoo", on_mesh(), True, torch.float32)
    train(model, optimizer)
    with torch.compiler.set_stance("fail_on_recompile"):
        for t in range(3):
            turn(optimizer, t)
            optimizer.step()
    return whole(model)


def test_compiled_and_sharded():
    """Equal to whole ones; what is sent is counted in test_forecast.py."""
    model, optimizer = make("mars-shampoo", dtype=torch.float32)
    train(model, optimizer)
    for t in range(3):
        turn(optimizer, t)
        optimizer.step()
    for params in spawn(compiled, 2):
        for n, p in whole(model).items():
            torch.testing.assert_close(params[n], p, rtol=0, atol=1e-5)


def refuse(rank, world):
    model, _ = make("adamw", on_mesh())
    try:
        MARS(model.parameters(), compile=False)
    except ValueError as error:
        return str(error)
    return "no error"


def test_sharded_parameters_without_collectives_are_refused():
    for told in spawn(refuse, 2):
        assert "pass collectives=MeshCollectives(mesh)" in told


def save_and_load(rank, world):
    """A state dict of DTensors, through a file per rank, continues bit for bit."""
    model, optimizer = make("mars-adamw", on_mesh())
    train(model, optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=False)
    other, resumed = make("mars-adamw", on_mesh())
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    kinds = {type(v).__name__ for s in state["state"].values() for v in s.values()}
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o)
    a, b = whole(model), whole(other)
    return kinds, all(torch.equal(a[n], b[n]) for n in a)


def test_state_is_dtensors_and_resumes_bitwise():
    assert spawn(save_and_load, 2) == [({"DTensor", "Tensor"}, True)] * 2
