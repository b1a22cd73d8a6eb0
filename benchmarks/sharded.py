"""A step of Muon over several ranks: its collectives, bytes, state and time, and
whether all who mean the same compute the same.

    python -m benchmarks.sharded [--ranks 2] [--layers 4] [--width 256] [--rounds 15]

Starts its own gloo processes on this machine, one thread each. The matrices are those
of GPT-2's blocks, DTensors cut by rows, as FSDP2 leaves them. All see the same
gradients, new ones each round, and take turns step by step. Rows that are "not sharded"
stand for plain DDP: every rank has all matrices and gradients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.muons import AXIS, CONTENDERS, OURS, WHOLE, Contender
from benchmarks.peers import version
from benchmarks.timing import spread, take_turns
from marsopt.profiling.gpt2 import EMBEDDINGS, shapes
from marsopt.profiling.machine import describe, one_line, seconds
from train.errors import UserError, check_least, command

Step = Callable[[], object]

WARM_UP = 3  # ours compile; what is computed is compared after these
IO = Path("/proc/self/io")
EXPLAINED = """\
collectives      that gloo was asked for in one step (torch.profiler)
MB sent          that a rank's process wrote to its sockets in one step (Linux counts
                 them), in the mean over ranks
state            MB that the rank with the most of it keeps between steps
ms               from a barrier to the end of the step on the slowest rank, median
x                the same over marsopt Muon's of the same round, median
off by, at most  how far the way of the parameters is from that of torch.optim.Muon on
                 whole matrices: root mean square over root mean square, and largest
                 entry over largest entry"""


class Row(NamedTuple):
    """What was measured of one contender; ``off_by`` is None for another rule."""

    title: str
    collectives: Counter[str]
    bytes_sent: float
    bytes_held: int
    times: list[float]
    ratios: list[float]
    off_by: tuple[float, float] | None


class Subject:
    """A contender at work on matrices of its own.

    Args:
        contender: who.
        start: whole matrices, the same on every rank.
        mesh: one axis, over which their rows are cut.
    """

    def __init__(
        self, contender: Contender, start: Mapping[str, Tensor], mesh: DeviceMesh
    ) -> None:
        self._start, self._mesh, self._contender = start, mesh, contender
        self._params = {n: nn.Parameter(self._cut(x)) for n, x in start.items()}
        self._optimizer = contender.build(self._params, mesh)

    def _cut(self, whole: Tensor) -> Tensor:
        whole = whole.clone()
        if not self._contender.sharded:
            return whole
        # src_data_rank=None: every rank has drawn the same, nothing is sent
        return distribute_tensor(whole, self._mesh, [Shard(0)], src_data_rank=None)

    def take(self, gradients: Mapping[str, Tensor], how: Callable[[Step], Any]) -> Any:
        """Return what ``how`` says of a step with these gradients."""
        for name, p in self._params.items():
            p.grad = self._cut(gradients[name])  # its own: some write into them
        return how(self._optimizer.step)

    @property
    def bytes_held(self) -> int:
        """Return how many bytes of state this rank keeps."""
        entries = self._contender.state(self._optimizer).values()
        every = [x for entry in entries for x in entry.values()]
        local = [x.to_local() if isinstance(x, DTensor) else x for x in every]
        return sum(x.nbytes for x in local if isinstance(x, Tensor) and x.ndim)

    @torch.no_grad()
    def way(self) -> Tensor:
        """Return how far all entries have come from the start."""
        ends = {
            name: p.full_tensor() if isinstance(p, DTensor) else p
            for name, p in self._params.items()
        }
        return torch.cat([(ends[n] - x).flatten() for n, x in self._start.items()])


def collectives(step: Step) -> Counter[str]:
    """Return what a step asks gloo for, whichever interface of torch it goes through,
    in compiled code too.
    """
    with torch.profiler.profile() as seen:
        step()
    names = (event.name for event in seen.events())
    return Counter(n.removeprefix("gloo:") for n in names if n.startswith("gloo:"))


def bytes_sent(step: Step) -> int:
    """Return what this process writes during a step, which is to sockets alone."""

    def written() -> int:
        words = IO.read_text().split()
        return int(words[words.index("wchar:") + 1])

    dist.barrier()
    before = written()
    step()
    return written() - before


class Field:
    """All contenders who can run here, on the matrices in the blocks of a GPT-2."""

    def __init__(self, layers: int, width: int) -> None:
        tensors = shapes(layers, width).items()
        self._sizes = {n: s for n, s in tensors if len(s) == 2 and n not in EMBEDDINGS}
        self._generator = torch.Generator().manual_seed(0)
        self._gradients: dict[str, Tensor] = {}
        self._draw()
        start = {name: 0.02 * x for name, x in self._gradients.items()}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(AXIS,))
        self.contenders = [c for c in CONTENDERS if not c.missing]
        self._subjects = {c.title: Subject(c, start, mesh) for c in self.contenders}

    def _draw(self) -> None:
        for name, size in self._sizes.items():
            self._gradients[name] = torch.randn(size, generator=self._generator)

    def take(self, how: Callable[[Step], Any], num_rounds: int = 1) -> dict[str, list]:
        """Return what ``how`` says of each contender's steps, new gradients a round."""
        turns = {
            name: partial(subject.take, self._gradients, how)
            for name, subject in self._subjects.items()
        }
        return take_turns(turns, num_rounds, self._draw)

    def held(self) -> dict[str, int]:
        """Return the bytes of state of each contender on this rank."""
        return {name: subject.bytes_held for name, subject in self._subjects.items()}

    def ways(self) -> dict[str, Tensor]:
        """Return how far each contender's parameters have come."""
        return {name: subject.way() for name, subject in self._subjects.items()}


def measure(layers: int, width: int, num_rounds: int) -> list[Row]:
    """Measure all who can run; called on every rank."""
    field = Field(layers, width)
    field.take(lambda step: step(), WARM_UP)
    ways = field.ways()
    called = field.take(collectives)
    timed = partial(seconds, device="cpu", before=dist.barrier)
    mine = field.take(bytes_sent), field.take(timed, num_rounds), field.held()
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    times = {
        name: [
            max(turn)
            for turn in zip(*(took[name] for _, took, _ in ranks), strict=True)
        ]
        for name in ways
    }
    return [
        Row(
            title=c.title,
            collectives=called[c.title][0],
            bytes_sent=statistics.mean(sent[c.title][0] for sent, *_ in ranks),
            bytes_held=max(held[c.title] for *_, held in ranks),
            times=times[c.title],
            ratios=list(map(truediv, times[c.title], times[OURS.title])),
            off_by=difference(ways[c.title], ways[WHOLE.title]) if c.same else None,
        )
        for c in field.contenders
    ]


def difference(way: Tensor, right: Tensor) -> tuple[float, float]:
    """Return how far one way is from another, in the mean and at most."""
    off = way - right
    return float(off.norm() / right.norm()), float(off.abs().max() / right.abs().max())


def table(rows: list[Row]) -> str:
    """Return all rows as text, and who is missing and why."""
    head = ("", "collectives", "MB sent", "state", "ms", "x", "off by", "at most")
    lines = [head]
    for row in rows:
        calls = ", ".join(f"{n} {name}" for name, n in sorted(row.collectives.items()))
        off_by = ("", "") if row.off_by is None else [f"{x:.1e}" for x in row.off_by]
        ms, x = 1e3 * spread(row.times).median, spread(row.ratios).median
        sent = f"{row.bytes_sent / 1e6:.2f}"
        lines.append(
            (row.title, calls or "none", sent, f"{row.bytes_held / 1e6:.2f}")
            + (f"{ms:.1f}", f"{x:.2f}", *off_by)
        )
    title, calls = (max(len(line[i]) for line in lines) for i in (0, 1))
    told = [
        f"{line[0]:{title}}  {line[1]:{calls}}" + "".join(f"{x:>9}" for x in line[2:])
        for line in lines
    ]
    told += [f"{c.title:{title}}  {c.missing}" for c in CONTENDERS if c.missing]
    return "\n".join(told)


def notes() -> str:
    """Return what has to be known of single rows."""
    told = []
    for c in CONTENDERS:
        if c.note and not c.missing:
            of = f" ({version(c.package)})" if c.package else ""
            told.append(f"- {c.title}{of}: {c.note}")
    return "\n".join(told)


def work(rank: int, folder: str, args: argparse.Namespace) -> None:
    """Be one rank."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # a profiler's start is no news
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks
    )
    rows = measure(args.layers, args.width, args.rounds)
    if rank == 0:
        print(one_line(describe("cpu")))
        print(
            f"{args.ranks} gloo ranks, {4 * args.layers} matrices of {args.layers} "
            f"blocks of width {args.width}, {args.rounds} rounds\n"
        )
        print(table(rows), EXPLAINED, notes(), sep="\n\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    check_least(1, layers=args.layers, width=args.width)
    check_least(2, ranks=args.ranks, rounds=args.rounds)
    if not IO.exists():
        raise UserError(f"got no {IO}, expected Linux, which counts bytes there")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, args), nprocs=args.ranks)


if __name__ == "__main__":
    command(main)
