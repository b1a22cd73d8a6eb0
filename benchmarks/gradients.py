"""The bytes that a rank sends in a training step of GPT-2, by how ranks hold it.

    python -m benchmarks.gradients [--ranks 8 64] [--layers 12] [--width 768]

Counts the collectives of one rank's third step, on a process group that sends nothing.
Parameters and gradients are float32, and Moonlight's matrices travel in bfloat16. On R
ranks a rank sends, in the mean, of n bytes: 2 n (R - 1)/R in an all-reduce; n (R - 1)/R
in an all-gather, in a reduce-scatter, and in a sum that one rank receives.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import marsopt
from marsopt.parallel import DataParallel
from marsopt.profiling.gpt2 import shapes
from train.errors import check_least, command
from train.forecast.record import Recorder, pretended

DDP, ZERO, OWNERS = "DDP", "DDP, DataParallel", "DDP, DataParallel, reduce_to_owners"
FSDP2, KEPT = "FSDP2", "FSDP2, reshard_after_forward=False"
COLUMNS = ("gradients", "parameters", "all-to-all", "sum")
HEAD = ("ranks", "", *(f"{column}, MB" for column in COLUMNS), "collectives")
# by torch's operation: its column, and how many times (R - 1)/R of its bytes are sent
SENT = {
    "c10d::allreduce_": ("gradients", 2),
    "c10d::reduce_": ("gradients", 1),
    "c10d::broadcast_": ("gradients", 1),  # of new buckets, in the second step
    "c10d::_reduce_scatter_base_": ("gradients", 1),
    "c10d::_allgather_base_": ("parameters", 1),
}


class Part(nn.Module):
    """Parameters that all have a gradient."""

    def __init__(self, sizes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        made = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
        self.params = nn.ParameterDict(made)

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(p.mean() for p in self.params.values())


def gpt2(layers: int, width: int) -> nn.Sequential:
    """Return the tensors of a GPT-2: embeddings and last norm, then its blocks."""
    parts: dict[str, dict[str, Sequence[int]]] = {}
    for name, size in shapes(layers, width).items():
        block, _, rest = name.rpartition(".")
        parts.setdefault(block, {})[rest] = size
    return nn.Sequential(*map(Part, parts.values()))


class Sent(Recorder):
    """The bytes that a rank sends, by column, and the number of collectives."""

    def __init__(self) -> None:
        super().__init__([])
        self.bytes: Counter[str] = Counter()
        self.num = 0

    def _note(self, name: str, args: Sequence[Any]) -> None:
        self.num += 1
        if name == "c10d::alltoall_base_":
            super()._note(name, args)
            self.bytes["all-to-all"] += self.collectives[-1][1]
            return
        if name == "c10d::allreduce_":
            super()._note(name, args)  # lets all ranks have equal norms
        column, times = SENT[name]
        has_list = isinstance(args[0], list)
        tensors = args[0] if has_list else args[:2]  # else a whole tensor and a piece
        num = dist.ProcessGroup.unbox(args[1 if has_list else 2]).size()
        self.bytes[column] += times * max(x.nbytes for x in tensors) * (num - 1) / num


def _all_reduce(
    group: dist.ProcessGroup, bucket: Any
) -> torch.futures.Future[torch.Tensor]:
    """DDP's own; the results of this process group are no futures that DDP takes."""
    dist.all_reduce(bucket.buffer(), group=group)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def build(
    way: str, mesh: DeviceMesh, layers: int, width: int
) -> tuple[nn.Module, Optimizer]:
    """Return a model that ranks hold in this way, and its optimizer."""
    model, options = gpt2(layers, width), {}
    if way in (FSDP2, KEPT):
        kept = {} if way == FSDP2 else dict(reshard_after_forward=False)
        for module in (*model[1:], model):
            fully_shard(module, mesh=mesh, **kept)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if way != DDP:
            options["collectives"] = DataParallel(model.process_group)
        if way == OWNERS:
            options["collectives"].reduce_to_owners(model)
        else:
            model.register_comm_hook(
                model.process_group,
                lambda group, bucket: _all_reduce(group, bucket),
            )
    optimizer = marsopt.for_model(
        model, "moonlight", lr=1e-3, ns_dtype=torch.bfloat16, compile=False, **options
    )
    return model, optimizer


def count(way: str, num_ranks: int, layers: int, width: int) -> Sent:
    """Return what a rank sends in a warm step."""
    with pretended(0, (num_ranks,)) as mesh:
        model, optimizer = build(way, mesh, layers, width)
        for _ in range(3):
            optimizer.zero_grad()
            with Sent() as sent:
                model(torch.zeros(1)).sum().backward()
                optimizer.step()
    return sent


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    args = parser.parse_args()
    check_least(1, layers=args.layers, width=args.width)
    check_least(2, ranks=min(args.ranks))
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for num_ranks in args.ranks:
        for way in (DDP, ZERO, OWNERS, FSDP2, KEPT):
            sent = count(way, num_ranks, args.layers, args.width)
            numbers = [*(sent.bytes[c] for c in COLUMNS[:-1]), sum(sent.bytes.values())]
            cells = [f"{number / 1e6:,.1f}" for number in numbers]
            print(f"| {num_ranks} | {way} | {' | '.join(cells)} | {sent.num} |")


if __name__ == "__main__":
    command(main)
