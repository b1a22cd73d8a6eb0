"""``statistics`` under FSDP2."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from marsopt import MARS
from marsopt.parallel import MeshCollectives
from tests.processes import spawn
from tests.table import SHAPES, steady, tensors

pytestmark = pytest.mark.processes

KINDS = ("mars-soap", "mars-adamw", "mars-m")  # the state of shards and of owners
TENSORS = SHAPES | {"small": (1, 3)}  # of which a rank has nothing


def build(door, params, mars_type):
    own = steady(mars_type)
    options = dict(lr=0.02, max_norm=2.0, ns_dtype=torch.float64, compile=False)
    if door == "FSDP2":
        options["collectives"] = MeshCollectives(init_device_mesh("cpu", (2,)))
    return MARS([*params.items()], mars_type=mars_type, **options, **own)


def start(door):
    drawn = tensors(SHAPES, 0, dtype=torch.float64) | {
        "small": torch.ones(1, 3).double()
    }
    return {n: nn.Parameter(put(door, x)) for n, x in drawn.items()}


def put(door, x):
    if door != "FSDP2":
        return x
    return distribute_tensor(x, init_device_mesh("cpu", (2,)), [Shard(0)])


def step(door, optimizer, params, seeds):
    for seed in seeds:
        drawn = tensors(SHAPES, seed, dtype=torch.float64)
        for n, p in params.items():
            p.grad = put(door, drawn.get(n, torch.full((1, 3), 0.1 * seed).double()))
        optimizer.step()


def trained_by(door, mars_type, num_steps):
    """Parameters, and the optimizer that has taken so many steps over them."""
    params = start(door)
    optimizer = build(door, params, mars_type)
    step(door, optimizer, params, range(num_steps))
    return params, optimizer


def measured(rank, world, door):
    """The statistics of a step, and how often a step and they have reduced."""
    found = {}
    for mars_type in KINDS:
        params, optimizer = trained_by(door, mars_type, 2)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
            step(door, optimizer, params, [2])
            values = optimizer.statistics()
        by_name = {
            field: dict(zip(values.names, getattr(values, field).tolist(), strict=True))
            for field in ("grad_norm", "clip")
        }
        found[mars_type] = by_name, spy.call_count
    return found


def test_statistics_are_those_of_one_process():
    """A step reduces once, and its statistics never."""
    alone = measured(0, 1, "one process")
    for found in spawn(measured, 2, "FSDP2"):
        for mars_type, (values, count) in found.items():
            for field, of_one in alone[mars_type][0].items():
                assert values[field] == pytest.approx(of_one, rel=1e-9), field
            assert count == 1, mars_type
