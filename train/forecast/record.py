"""One rank's step, recorded: the code itself, on meta tensors and over a process group
that sends nothing. What lives in between, and what is sent, is counted as it happens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from marsopt import MARS
from marsopt.functional import step
from marsopt.functional.binding import owned_leaves
from marsopt.functional.collectives import LOCAL, Collectives
from marsopt.functional.step import Each, Move
from marsopt.functional.step_types import Decision, RuleGroup, Stack, StackScalars
from marsopt.optim.buckets import ParameterBucket
from marsopt.optim.compiled import matrix_outputs
from marsopt.optim.layout import Layout
from marsopt.optim.state_dict import STAGE_COUNT, State
from marsopt.parallel.collectives import MeshCollectives
from marsopt.parallel.planner import Machine
from marsopt.profiling.optimizer import floor_of
from train.forecast.models import Job

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

    def __init__(self, recorder: Recorder, layout: Layout) -> None:
        self._recorder, self._batches = recorder, layout.batches
        portions = layout.portions(compile=True)
        self._portions = [[i for call in portion for i in call] for portion in portions]

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._recorder.paused():  # numbers that ranks have summed up are real
            return function(*tree_map_only(Tensor, lambda x: x.to("meta"), args))

    def run_collective(
        self, what: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        return function(*args)

    def each(
        self, function: Each, stacks: Sequence[Stack], grads: Sequence[Tensor]
    ) -> list[Tensor]:
        with self._recorder.paused():
            sums = function(stacks, grads)
            return [torch.zeros(x.shape, dtype=x.dtype) for x in sums]

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

    def per_stack(
        self, groups: Sequence[RuleGroup], decision: Decision
    ) -> list[StackScalars]:
        return step.per_stack(groups, decision)

    def portions(self, stacks: Sequence[Stack]) -> Sequence[Sequence[int]]:
        return self._portions

    def matrix_outputs(
        self, stacks: Sequence[Stack], part: Sequence[int]
    ) -> list[Tensor | None]:
        return matrix_outputs(stacks, part, self._batches)

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
    moved_bytes: int  # by elementwise passes


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
    """One of the ranks that share the shards."""

    collectives: Collectives
    wrap: Callable[[Tensor, torch.Size], Tensor]  # its piece of a tensor of this shape
    number: int
    num_ranks: int


def bound(job: Job, rank: Rank) -> tuple[Layout, State]:
    """Return the layout of one rank's parameters, which have no memory, and its state.
    MARS would refuse to move them: it gets them frozen, and makes groups and options.
    """
    # no operation of DTensors: it would return the mesh of an earlier, equal rank
    params, grads = dict[str, Tensor](), list[Tensor]()
    for alike in job.alike:
        shape = alike.local(rank.number, rank.num_ranks)
        for name in alike.names:
            piece = torch.empty(shape, device="meta")
            params[name] = rank.wrap(piece, alike.shape)
            grads.append(rank.wrap(piece.detach(), alike.shape))
    matrices, beside = (
        [(name, p) for name, p in params.items() if (name in job.elementwise) == other]
        for other in (False, True)
    )
    groups = [dict(params=matrices), dict(params=beside, mars_type="adamw")]
    options = {"mars_type": job.mars_type, **job.options}
    if options.get("correction") == "approximate":  # the default
        del options["correction"]
    options |= dict(collectives=rank.collectives, compile=False)
    frozen = MARS([g for g in groups if g["params"]], **options).describe().layout
    for p, g in zip(params.values(), grads, strict=True):
        p.requires_grad_()
        p.grad = g
    state: State = defaultdict(dict)
    meta = torch.device("meta")
    layout = Layout(frozen.param_groups, state, frozen.options, {}, meta)
    layout.bind()
    return layout, state


@torch.no_grad()
def _record(job: Job, rank: Rank) -> Record:
    layout, entries = bound(job, rank)
    kept = [
        rank.collectives.local(value)
        for entry in entries.values()
        for key, value in entry.items()
        if key != "step"
    ]
    state, takes_gradients = sum(x.nbytes for x in kept), False
    for bucket in layout.buckets:
        if bucket.algorithm.h_from == "caller":  # the next batch's gradients are kept
            state += sum(h.nbytes for h in bucket.state["h"])
            takes_gradients = True
    pieces = [piece for bucket in layout.buckets for piece in bucket.pieces]
    matrices = [
        leaf
        for bucket in layout.buckets
        if bucket.algorithm.matrix_only
        for leaf in owned_leaves(bucket.algorithm, bucket.params)
    ]
    if matrices:  # all is planned before a step is recorded
        layout.collectives.owns(matrices)
    for group in layout.groups:  # a step in which bases are refreshed
        if group.hyper.algorithm.has_stages:
            for param_group in group.groups:
                param_group[STAGE_COUNT] = group.hyper.algorithm.preconditioner.every
    for is_warm in (False, True):  # ranks agree, once, on what they hold
        with Recorder([*pieces, *kept]) as recorder:
            groups, grads, _ = layout.gather()
            run = Compiled(recorder, layout)
            shared = dict(collectives=layout.collectives, run=run)
            _, decision = step.assess(
                groups, grads, layout.members, max_norm=1.0, **shared
            )
            if is_warm:
                step.advance(groups, grads, layout.members, decision, **shared)
            if takes_gradients:
                # norms of the gradient that is kept for the next step, for its clip
                of_each = torch.zeros(len(layout.params), 1)
                layout.collectives.sum(of_each, layout.params)
            del groups, grads, decision
        layout.scatter()
    size = sum(x.nbytes for x in pieces)
    return Record(
        Memory(size, size, state, recorder.most),
        recorder.collectives,
        _moved_bytes(layout.buckets),
    )


def _moved_bytes(buckets: Sequence[ParameterBucket]) -> int:
    """Return the bytes that elementwise passes over stacks read and write: norms,
    update, application, and copies of small tensors; Newton-Schulz not.
    """
    floor = floor_of(buckets)
    # beside a step of exact MARS: the norm of the next gradient, its copy, and the copy
    # of that into h
    exact = [bucket for bucket in buckets if bucket.algorithm.h_from == "caller"]
    kept = sum(piece.nbytes for bucket in exact for piece in bucket.pieces)
    return floor.num_bytes + floor.copied + 5 * kept
