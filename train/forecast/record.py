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
from marsopt.functional.buffers import owned_leaves
from marsopt.optim.binding import Binding
from marsopt.optim.state_dict import STAGE_COUNT, State
from marsopt.parallel.collectives import MeshCollectives
from marsopt.parallel.planner import Machine
from marsopt.profiling.optimizer import floor_of
from marsopt.step import step
from marsopt.step.graph_runner import Graphs
from marsopt.step.owners import LOCAL, Collectives
from marsopt.step.step import Gradients, Group
from marsopt.step.tables import Decision
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


class Recording(Graphs):
    """A runner over groups that have no memory. As graphs do, each part of a step holds
    no more than its results, and writes those into the tensors that hold them.
    """

    def __init__(self, recorder: Recorder, groups: Sequence[Group], **kwargs: Any):
        self._recorder = recorder
        with recorder.paused():
            super().__init__(groups, **kwargs)

    def measure(self, groups: Sequence[Group], grads: Gradients) -> list[Tensor]:
        return [sums for sums, _ in self._sums]

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._recorder.paused():
            return function(*tree_map_only(Tensor, lambda x: x.to("meta"), args))

    def run_collective(
        self, label: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        if label == "exchange":  # numbers that ranks sum up are real
            sums, *rest = args
            return function(torch.zeros(sums.shape, dtype=sums.dtype), *rest)
        return function(*args)

    def start(
        self, groups: Sequence[Group], grads: Gradients, decision: Decision
    ) -> None:
        with self._recorder.paused():  # tables that stay
            super().start(groups, grads, decision)

    def compute(self, *args: Any, **kwargs: Any) -> None:
        """Compute nothing: a graph allocates nothing that it returns."""


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


def bound(
    job: Job, rank: Rank, dtype: torch.dtype = torch.float32
) -> tuple[Binding, State]:
    """Return the binding of one rank's parameters, which have no memory, and its state.
    MARS would refuse to move them: it gets them frozen, and makes groups and options.
    """
    # no operation of DTensors: it would return the mesh of an earlier, equal rank
    params, grads = dict[str, Tensor](), list[Tensor]()
    for alike in job.alike:
        shape = alike.local(rank.number, rank.num_ranks)
        for name in alike.names:
            piece = torch.empty(shape, dtype=dtype, device="meta")
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
    frozen = MARS([g for g in groups if g["params"]], **options).describe().binding
    for p, g in zip(params.values(), grads, strict=True):
        p.requires_grad_()
        p.grad = g
    state: State = defaultdict(dict)
    meta = torch.device("meta")
    binding = Binding(frozen.param_groups, state, frozen.options, {}, meta)
    binding.bind()
    return binding, state


@torch.no_grad()
def _record(job: Job, rank: Rank) -> Record:
    binding, entries = bound(job, rank)
    members, collectives = binding.members, binding.collectives
    kept = [
        collectives.local(value)
        for entry in entries.values()
        for key, value in entry.items()
        if key != "step"
    ]
    pieces = [member.piece for member in members]
    # exact MARS keeps the next batch's gradients
    exact = [member for member in members if member.algorithm.h_from == "caller"]
    state = sum(x.nbytes for x in [*kept, *(member.state["h"] for member in exact)])
    matrices = [
        leaf
        for member in members
        if member.algorithm.matrix_only
        for leaf in owned_leaves(member.algorithm, [member.p])
    ]
    if matrices:  # all is planned before a step is recorded
        collectives.owns(matrices)
    for member in members:  # a step in which bases are refreshed
        if member.algorithm.has_stages:
            member.group[STAGE_COUNT] = member.algorithm.preconditioner.every
    for is_warm in (False, True):  # ranks agree, once, on what they hold
        with Recorder([*pieces, *kept]) as recorder:
            groups, grads, has_grad = binding.gather()
            runner = Recording(
                recorder,
                groups,
                device=torch.device("meta"),
                is_local=collectives is LOCAL,
                compile=False,
                required=False,
                say=lambda level, what: None,
            )
            shared: Any = dict(collectives=collectives, runner=runner)
            _, decision = step.assess(
                groups, grads, max_norm=1.0, has_grad=has_grad, **shared
            )
            if is_warm:
                step.advance(groups, grads, decision, **shared)
            if exact:
                # norms of the gradient that is kept for the next step, for its clip
                collectives.sum(torch.zeros(len(members), 1), binding.params)
    size = sum(x.nbytes for x in pieces)
    floor = floor_of(groups, runner.copied, is_local=collectives is LOCAL)
    # beside a step of exact MARS: the norm of the next gradient, its copy, and the copy
    # of that into h
    next_grads = 5 * sum(member.piece.nbytes for member in exact)
    return Record(
        Memory(size, size, state, recorder.most),
        recorder.collectives,
        floor.num_bytes + floor.copied + next_grads,
    )
