"""One rank's step, recorded: the code itself, on meta tensors and over a process group
that sends nothing. What lives in between, and what is sent, is counted as it happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from marsopt.functional import step
from marsopt.functional.binding import (
    allocate,
    matrix_rows,
    owned_leaves,
    owned_starts,
    rounding_cuts,
)
from marsopt.functional.collectives import LOCAL, Collectives
from marsopt.functional.stacks import group_by
from marsopt.functional.step import Each, Move
from marsopt.functional.step_types import (
    Hyperparameters,
    Members,
    RuleGroup,
    Stack,
    norms_per_tensor,
)
from marsopt.optim.compiled import matrix_outputs
from marsopt.optim.portions import batch_of
from marsopt.optim.protocols.table import protocol_of
from marsopt.parallel.collectives import MeshCollectives
from marsopt.parallel.planner import Machine
from marsopt.rules.algorithm import Algorithm
from train.forecast.models import Alike, Job

# torch's operations, by the names of a forecast
KINDS = {
    "c10d::allreduce_": "all-reduce",
    "c10d::alltoall_base_": "all-to-all",
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
}


class Recorder(TorchDispatchMode):
    """Bytes of storages that were made within it and live, at ``most``; and its
    ``collectives``, each with the bytes that this rank sends, by a ring where all
    reduce.

    All ranks are alike: numbers on the CPU that they sum up are so many times what is
    here.

    Args:
        there: what is not counted, as it was there before.
    """

    def __init__(self, there: Sequence[Tensor]) -> None:
        super().__init__()
        self.most = 0
        self.collectives: list[tuple[str, float]] = []
        self._now = 0  # with what was freed since ``most`` has grown
        self._is_paused = False
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        for storage in (x.untyped_storage() for x in there):
            self._live[storage._cdata] = StorageWeakRef(storage), 0

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            self._note(function.name().split(".")[0], args)
        if not self._is_paused:
            self.take(out)
        return out

    def take(self, made: Any) -> None:
        """Count a tensor, or those of a list, as allocated where they are new."""
        for x in made if isinstance(made, (list, tuple)) else (made,):
            if not isinstance(x, Tensor):
                continue
            storage = x.untyped_storage()
            if storage._cdata in self._live:  # weak references keep that number taken
                continue
            self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self._now += storage.nbytes()
            if self._now > self.most:
                live = {k: v for k, v in self._live.items() if not v[0].expired()}
                self._live, self._now = live, sum(size for _, size in live.values())
                self.most = max(self.most, self._now)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no allocations."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _note(self, name: str, args: Sequence[Any]) -> None:
        kind, sent = KINDS[name], 0.0
        group = dist.ProcessGroup.unbox(args[1 if kind == "all-reduce" else 2])
        num = group.size()
        if kind == "all-reduce":
            (x,) = args[0]
            sent = 2 * (num - 1) / num * x.nbytes
            if x.device.type == "cpu" and x.is_floating_point():
                x.mul_(num)
        elif kind == "all-to-all":
            to = args[4]
            sent = (sum(to) - to[group.rank()]) * args[1].itemsize
        elif kind == "all-gather":
            sent = (num - 1) * args[1].nbytes
        self.collectives.append((kind, sent))


class Compiled:
    """A ``step.Run`` over stacks that have no memory. As compiled graphs do, each part
    holds no more than its results, and writes those into the tensors that hold them.
    Matrices of one process are rows of batches, as on a GPU.
    """

    is_fused = False

    def __init__(self, recorder: Recorder, alone: bool) -> None:
        self._recorder, self._alone = recorder, alone

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._recorder.paused():  # numbers that ranks have summed up are real
            return function(*tree_map_only(Tensor, lambda x: x.to("meta"), args))

    def run_collective(
        self, what: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        return function(*args)

    def each(self, function: Each, stacks: Sequence[Stack]) -> list[Tensor]:
        with self._recorder.paused():
            return [torch.zeros(x.shape, dtype=x.dtype) for x in function(stacks)]

    def move(
        self, function: Move, stacks: Sequence[Stack], *columns: Sequence[Any]
    ) -> tuple[list[Stack], list[Tensor | None]]:
        made: list[Tensor | None] = []
        for stack, *own in zip(stacks, *columns, strict=True):
            with self._recorder.paused():
                extra = None if own[0] is None else function(stack, *own)[1]
            made.append(extra)
            self._recorder.take(made[-1])
        return list(stacks), made

    def portions(self, stacks: Sequence[Stack]) -> Sequence[Sequence[int]]:
        if not self._alone:
            return [range(len(stacks))]
        return group_by([batch_of(s.algorithm, s.shape, s.x) for s in stacks])

    def matrix_outputs(
        self, stacks: Sequence[Stack], part: Sequence[int]
    ) -> list[Tensor | None]:
        return matrix_outputs(stacks, part if self._alone else [])

    def store(
        self, ok: Tensor, old: tuple[Tensor, ...], new: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...] | None:
        return None


class Memory(NamedTuple):
    """Bytes of one rank, beside activations and what FSDP gathers for forward and
    backward: all in float32, cut along rows.
    """

    parameters: int
    gradients: int
    state: int
    step: int  # beyond these, at most, while the optimizer steps

    @property
    def peak(self) -> int:
        """Return all of it."""
        return sum(self)


class Record(NamedTuple):
    """A warm step of one rank."""

    memory: Memory
    collectives: list[tuple[str, float]]  # kind, and the bytes that this rank sends


def record(job: Job, sizes: Sequence[int], rank: int, machine: Machine) -> Record:
    """Return the step of one rank of (shards,) or (replicas, shards); of one rank alone
    with plain parameters, without FSDP2.

    Raises:
        RuntimeError: this process has a process group.
    """
    if math.prod(sizes) == 1:
        return _record(job, Rank(LOCAL, lambda piece, shape: piece, 0, 1))
    with pretended(rank, sizes) as mesh:
        cuts = [*[Replicate()] * (mesh.ndim - 1), Cut(0)]

        def wrap(piece: Tensor, shape: torch.Size) -> Tensor:
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(
                piece, mesh, cuts, shape=shape, stride=stride, run_check=False
            )

        collectives = MeshCollectives(mesh, machine=machine)
        return _record(job, Rank(collectives, wrap, rank % sizes[-1], sizes[-1]))


@contextmanager
def pretended(
    rank: int, sizes: Sequence[int], device: str = "cpu"
) -> Iterator[DeviceMesh]:
    """Be one of so many ranks, of which there is no other; yield their mesh.

    Raises:
        RuntimeError: this process has a process group.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "got a process group, expected none in a process that forecasts: call "
            "forecast() before init_process_group()"
        )
    world = math.prod(sizes)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    axes = ("replicate", "shard")[-len(sizes) :]
    try:
        yield init_device_mesh(device, tuple(sizes), mesh_dim_names=axes)
    finally:
        dist.destroy_process_group()


class Rank(NamedTuple):
    """One of those that share the shards."""

    collectives: Collectives
    wrap: Callable[[Tensor, torch.Size], Tensor]  # its piece of a tensor of this shape
    number: int
    num_ranks: int


class Parameters(NamedTuple):
    """Those of one stack, on one rank."""

    of: Alike
    stack: Tensor  # (L, *shape of a piece), whose rows they are
    leaves: list[Tensor]
    buffers: dict[str, Tensor]  # at home in shards
    owned: list[tuple[Tensor, ...]]  # of each, at home with owners


@torch.no_grad()
def _record(job: Job, rank: Rank) -> Record:
    every = [
        one
        for algorithm, alike in groupby(job.alike, lambda a: a.algorithm)
        for one in _parameters(algorithm, list(alike), rank)
    ]
    leaves = [leaf for one in every for leaf in one.leaves]
    stacks = [one.stack for one in every]
    kept = [x for one in every for x in (*one.buffers.values(), *sum(one.owned, ()))]
    state = sum(x.nbytes for x in kept)
    # numbers of the last step, in float64, from which x follows
    state += 8 * sum(
        len(a.leaves) * a.of.algorithm.num_lookahead_scalars for a in every
    )
    takes_gradients = False
    for one in every:
        if one.of.algorithm.correction is not None:
            protocol = protocol_of(type(one.of.algorithm.correction))
            copied = [s for s in protocol.copied if s in one.buffers]
            state += sum(one.buffers[symbol].nbytes for symbol in copied)
            takes_gradients |= "update_previous_grad" in protocol.handled_calls
    members = [Members(one.leaves, one.owned) for one in every]
    for is_warm in (False, True):  # ranks agree, once, on what they hold
        with Recorder([*stacks, *kept]) as recorder:
            groups = _groups(every, rank)
            run = Compiled(recorder, rank.collectives is LOCAL)
            shared = dict(collectives=rank.collectives, run=run)
            _, decision = step.assess(
                groups, members, max_norm=1.0, digest="", **shared
            )
            if is_warm:
                step.advance(groups, members, decision, **shared)
            if takes_gradients:
                # norms of the gradient that is kept for the next step, for its clip
                rank.collectives.sum(torch.zeros(len(leaves), 1), leaves)
            del groups, decision
    size = sum(x.nbytes for x in stacks)
    return Record(Memory(size, size, state, recorder.most), recorder.collectives)


def _parameters(
    algorithm: Algorithm, alike: Sequence[Alike], rank: Rank
) -> list[Parameters]:
    """Return all that one algorithm moves, with its state as it starts."""
    found = []
    for one, names in [(a, names) for a in alike for names in a.stacks]:
        shape = len(names), *one.local(rank.number, rank.num_ranks)
        stack = torch.empty(shape, device="meta")
        buffers = {
            symbol: allocate(algorithm, buffer, stack)
            for symbol, buffer in algorithm.buffers.items()
            if buffer.home == "shard"
        }
        leaves = [rank.wrap(row, one.shape) for row in stack.unbind()]
        found.append(Parameters(one, stack, leaves, buffers, []))
    if not algorithm.matrix_only:
        return found
    leaves = [leaf for one in found for leaf in one.leaves]
    # all is planned before a step is recorded
    rank.collectives.owns(owned_leaves(algorithm, leaves))
    symbols = algorithm.owned
    if symbols:
        columns = [
            owned_starts(algorithm, algorithm.buffers[s], leaves, rank.collectives)
            for s in symbols
        ]
        rows = iter(zip(*columns, strict=True))
        for one in found:
            one.owned.extend(next(rows) for _ in one.leaves)
    return found


def _groups(every: Sequence[Parameters], rank: Rank) -> list[RuleGroup]:
    """Return the arguments of a step, with copies as its stacks where a step makes
    such.
    """
    found = []
    for algorithm, own in groupby(every, lambda one: one.of.algorithm):
        stacks, parts = [], []
        for one in own:
            shape, x, g, buffers = one.of.shape, one.stack, one.stack, one.buffers
            if one.of.is_copied:
                x, g = torch.empty_like(x), torch.empty_like(g)
                buffers = {s: torch.empty_like(b) for s, b in buffers.items()}
            cuts = rounding_cuts(algorithm, one.leaves[0], rank.collectives)
            stack = Stack(
                algorithm=algorithm,
                x=x,
                g=g,
                buffers=buffers,
                shape=shape,
                rows=matrix_rows(algorithm, one.leaves[0], shape, rank.collectives),
                cuts={dim: here.to("meta") for dim, here in cuts.items()},
            )
            stacks.append(stack)
            parts.append((stack.num_tensors, stack.num_clipped))
        num = sum(num for num, _ in parts)
        behind = torch.zeros(num, algorithm.num_lookahead_scalars, device="meta")
        hyper = Hyperparameters(
            algorithm=algorithm,
            lr=1e-3,
            gamma=0.025,
            t=torch.zeros(num, device="meta"),
            dtypes=(torch.float32,),
            behind=behind if algorithm.num_lookahead_scalars else None,
            parts=norms_per_tensor(parts),
        )
        count = algorithm.preconditioner.every if algorithm.has_stages else 0
        found.append(RuleGroup(hyper, stacks, count))
    return found
