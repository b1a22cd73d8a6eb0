"""The collectives of one rank among many that are not there."""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def pretended(rank, sizes):
    """Be one rank of a mesh (shards,) or (replicas, shards); yields the mesh."""
    store, world = FakeStore(), math.prod(sizes)
    dist.init_process_group("fake", rank=rank, world_size=world, store=store)
    axes = ("replicate", "shard")[-len(sizes) :]
    try:
        yield init_device_mesh("cpu", tuple(sizes), mesh_dim_names=axes)
    finally:
        dist.destroy_process_group()


class Messages(TorchDispatchMode):
    """Notes collectives as (kind, bytes that this rank sends), all-reduces as a ring.

    Sums over ranks are as if all ranks had equal numbers.
    """

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.name().split(".")[0]
        if name == "c10d::allreduce_":
            (x,), group = args[0], dist.ProcessGroup.unbox(args[1])
            self.sent.append(("all-reduce", 2 * (1 - 1 / group.size()) * x.nbytes))
            x.mul_(group.size() if x.is_floating_point() else 1)
        elif name == "c10d::alltoall_base_":
            group, to = dist.ProcessGroup.unbox(args[2]), args[4]
            away = sum(to) - to[group.rank()]
            self.sent.append(("all-to-all", away * args[1].itemsize))
        elif name == "c10d::_allgather_base_":
            group = dist.ProcessGroup.unbox(args[2])
            self.sent.append(("all-gather", (group.size() - 1) * args[1].nbytes))
        elif function.namespace == "c10d":
            raise NotImplementedError(name)
        return out
