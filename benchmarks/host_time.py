"""Host time of a sharded step at GPT-2 large's number of tensors.

    torchrun --nproc-per-node 2 -m benchmarks.host_time [--steps 50] [--layers 36]

Every tensor is tiny (rows of GPT-2 large over 640, one column), so that arithmetic
vanishes and what is left is Python, dispatch, guards and one small all-reduce.
Parameters are DTensors, sharded over the ranks. Optimizers take turns, step by step;
medians.
"""

from __future__ import annotations

import argparse
import platform
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.timing import seconds, spread, take_turns
from marsopt import MARS
from parallel import MeshCollectives


def shapes(num_layers: int) -> list[tuple[int, ...]]:
    """GPT-2 large's tensors with one column instead of 1280."""
    block = [(1280,), (3840, 1), (1280, 1), (1280,), (5120, 1), (1280, 1)]
    return [(50304, 1), (1024, 1), *block * num_layers, (1280,)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=36)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sizes = [
        tuple(max(2, n // 640) for n in s[:1]) + s[1:] for s in shapes(args.layers)
    ]

    def parameters() -> list[nn.Parameter]:
        torch.manual_seed(0)
        out = []
        for size in sizes:
            whole = 0.02 * torch.randn(size)
            p = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
            p.grad = torch.full_like(p, 1e-3)
            out.append(p)
        return out

    groups = {
        "MARS-AdamW, compiled": parameters(),
        "MARS-AdamW, eager": parameters(),
        "torch AdamW foreach": parameters(),
        "torch AdamW fused": parameters(),
        "clip_grad_norm_ + AdamW foreach": parameters(),
    }
    with_mesh = dict(collectives=MeshCollectives(mesh), max_norm=1.0)
    ours = MARS(groups["MARS-AdamW, compiled"], compile=True, **with_mesh)
    eager = MARS(groups["MARS-AdamW, eager"], compile=False, **with_mesh)
    foreach = torch.optim.AdamW(groups["torch AdamW foreach"], foreach=True)
    fused = torch.optim.AdamW(groups["torch AdamW fused"], fused=True)
    clipped = groups["clip_grad_norm_ + AdamW foreach"]
    after_clip = torch.optim.AdamW(clipped, foreach=True)

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(clipped, 1.0)
        after_clip.step()

    steps = {
        "MARS-AdamW, compiled": ours.step,
        "MARS-AdamW, eager": eager.step,
        "torch AdamW foreach": foreach.step,
        "torch AdamW fused": fused.step,
        "clip_grad_norm_ + AdamW foreach": clip_and_step,
    }
    turns = {
        name: partial(seconds, step, before=dist.barrier)
        for name, step in steps.items()
    }
    first = take_turns(turns, 1)
    times = take_turns(turns, args.steps)
    if dist.get_rank() == 0:
        print(
            f"{len(sizes)} tensors, {dist.get_world_size()} gloo ranks, "
            f"torch {torch.__version__}, {platform.machine()}, {args.steps} steps"
        )
        for name, row in times.items():
            print(
                f"{name:34} {1e3 * spread(row).median:8.2f} ms   "
                f"(first step {first[name][0]:.1f} s)"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
