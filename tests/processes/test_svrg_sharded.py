"""SVRG over a mesh: snapshot and anchor gradient are sharded, saved and resumed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from marsopt import MARS
from marsopt.parallel import MeshCollectives
from tests import dcp_states
from tests.processes import spawn

pytestmark = pytest.mark.processes

SHAPES = {"matrix": (5, 4), "wide": (3, 7), "bias": (6,)}
STEPS, PERIOD = 6, 4


def numbers(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in SHAPES.items()
    }


class Quadratics(nn.Module):
    """Batch b's loss is the sum of (x - center_b)^2 scale_b / 2 over all tensors."""

    def __init__(self, put) -> None:
        super().__init__()
        for name, x in numbers(0).items():
            self.register_parameter(name, nn.Parameter(put(x)))

    def gradient(self, batch: int, put) -> None:
        """Set that of one batch at the present parameters."""
        for name, p in self.named_parameters():
            center, scale = numbers(1 + batch)[name], numbers(50 + batch)[name].exp()
            p.grad = (p.detach() - put(center)) * put(scale)


def walk(model, optimizer, steps, put) -> None:
    for step in steps:
        if step % PERIOD == 0:  # a batch of its own stands for the whole data
            model.gradient(40 + step, put)
            optimizer.update_anchor()
        with optimizer.at_snapshot():
            model.gradient(step, put)
            optimizer.update_previous_grad()
        model.gradient(step, put)
        optimizer.step()


def build(put, mars_type, **more):
    model = Quadratics(put)
    optimizer = MARS(
        model.named_parameters(), lr=0.05, mars_type=mars_type, correction="svrg",
        gamma=0.7, max_norm=4.0, optimize_1d=True, ns_dtype=torch.float64,
        compile=False, **more,
    )  # fmt: skip
    return model, optimizer


def full(model):
    return {
        n: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        for n, p in model.named_parameters()
    }


def alone(mars_type):
    model, optimizer = build(lambda x: x, mars_type)
    walk(model, optimizer, range(STEPS), lambda x: x)
    return full(model)


def sharded(rank, world, folder):
    """Largest difference to one process, straight and resumed on these ranks."""
    mesh = init_device_mesh("cpu", (world,))

    def put(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    worst = []
    for mars_type in ("mars-adamw", "mars-m"):
        want = alone(mars_type)
        model, optimizer = build(put, mars_type, collectives=MeshCollectives(mesh))
        at = f"{folder}/{mars_type}"
        if world == 3:  # two ranks have saved
            dcp_states.load(model, optimizer, at)
        else:
            walk(model, optimizer, range(3), put)
            dcp_states.save(model, optimizer, at)
        walk(model, optimizer, range(3, STEPS), put)
        found = full(model)
        worst.append(max(float((found[n] - want[n]).abs().max()) for n in want))
    return worst


def test_sharded_and_resumed_on_other_ranks_equals_one_process(tmp_path):
    for world in (2, 3):
        for worst in spawn(sharded, world, str(tmp_path)):
            assert max(worst) < 1e-12, world


def test_the_protocol_is_asked_for():
    model, optimizer = build(lambda x: x, "mars-adamw")
    model.gradient(0, lambda x: x)
    with pytest.raises(RuntimeError, match="expected the full gradient first"):
        optimizer.update_previous_grad()
    with pytest.raises(RuntimeError, match="expected the protocol of SVRG"):
        optimizer.step()
    optimizer.update_anchor()
    with pytest.raises(RuntimeError, match="expected the gradient at the snapshot"):
        optimizer.update_previous_grad()
    with optimizer.at_snapshot():
        optimizer.update_previous_grad()
        with pytest.raises(RuntimeError, match="expected the protocol of SVRG"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="leave the context first"):
            optimizer.state_dict()
    optimizer.step()
    with pytest.raises(RuntimeError, match="expected the protocol of SVRG"):
        optimizer.step()  # h is of the batch before
