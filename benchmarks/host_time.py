"""Host time of a sharded step at GPT-2 large's number of tensors.

    torchrun --nproc-per-node 2 -m benchmarks.host_time [--steps 50] [--layers 36]

Every tensor is tiny (rows of GPT-2 large over 640, one column), so that arithmetic
vanishes and what is left is Python, dispatch, guards and one small all-reduce.
Parameters are DTensors, sharded over the ranks. Optimizers take turns, step by step;
medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.timing import spread, take_turns
from marsopt import MARS
from marsopt.parallel import MeshCollectives
from marsopt.profiling.gpt2 import MODELS, shapes
from marsopt.profiling.machine import describe, one_line, seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=36)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _, width = MODELS["gpt2-large"]
    sizes = [
        (max(2, rows // 640), *(1 for _ in columns))
        for rows, *columns in shapes(args.layers, width).values()
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

    def ours(params: list[nn.Parameter], *, compile: bool) -> Callable[[], object]:
        collectives = MeshCollectives(mesh)
        optimizer = MARS(params, collectives=collectives, max_norm=1.0, compile=compile)
        return optimizer.step

    def adamw(
        params: list[nn.Parameter], *, clip: bool = False, **mode: bool
    ) -> Callable[[], object]:
        optimizer = torch.optim.AdamW(params, **mode)

        def step() -> None:
            if clip:
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

        return step

    steps = {
        "MARS-AdamW, compiled": ours(parameters(), compile=True),
        "MARS-AdamW, eager": ours(parameters(), compile=False),
        "torch AdamW foreach": adamw(parameters(), foreach=True),
        "torch AdamW fused": adamw(parameters(), fused=True),
        "clip_grad_norm_ + AdamW foreach": adamw(parameters(), clip=True, foreach=True),
    }
    turns = {
        name: partial(seconds, step, "cpu", dist.barrier)
        for name, step in steps.items()
    }
    first = take_turns(turns, 1)
    times = take_turns(turns, args.steps)
    if dist.get_rank() == 0:
        print(
            f"{len(sizes)} tensors, {dist.get_world_size()} gloo ranks, {args.steps} "
            f"steps; {one_line(describe('cpu'))}"
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
