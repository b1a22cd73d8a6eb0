"""In place of MeshCollectives, under plain DDP: each rank updates a share (ZeRO-1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from marsopt.functional.collectives import (
    Collectives,
    LocalCollectives,
    MatrixParam,
    OwnerBuffer,
    Request,
    precondition_leaves,
)
from marsopt.rules.preconditioner import MatrixOutput

from .collectives import MeshCollectives
from .exchange import all_gather
from .owner_gradients import OwnerGradients
from .packs import Chunk, Packs
from .placement import shard_sizes
from .planner import assign
from .reductions import Reduction

CHUNK = 2**25  # bytes that a rank receives in one all-gather, at most
IN_FLIGHT = 2  # all-gathers: one travels while what another has brought is copied


class DataParallel(LocalCollectives):
    """``marsopt.Collectives`` for plain data parallelism: every rank has all parameters
    and, after DistributedDataParallel's backward pass, equal gradients.

    Each rank updates its pieces of the parameters, and keeps state only for them.
    Pieces are whole matrices where a rule needs them, balanced by FLOPs, and slices of
    all other parameters. One all-reduce of a few numbers gives the norms. All-gathers
    of the new parameters, in their dtype, end the step. ``optimizer.state_dict()``
    equals one process's. It lies on the CPU where the parameters do not.

    Every rank has to call ``step``, ``state_dict`` and ``iterates``; with transport
    also ``eval`` and ``train``. Ranks send each other pieces there. ``Rule.step`` has
    no parameters of its own: with it every rank repeats the whole step.

    Args:
        process_group: the ranks, as ``DistributedDataParallel.process_group``; None =
            all.

    Raises:
        ValueError: None, and ``torch.distributed`` is not initialized.

    Example:
        >>> import torch.distributed as dist
        >>> from marsopt.parallel import DataParallel
        >>> single = dict(store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.init_process_group("gloo", **single)
        >>> model = torch.nn.Linear(4, 2)
        >>> ddp = torch.nn.parallel.DistributedDataParallel(model)
        >>> collectives = DataParallel(ddp.process_group)
        >>> optimizer = marsopt.MARS(
        ...     ddp.parameters(), collectives=collectives, compile=False
        ... )
        >>> ddp(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise ValueError(
                "got no process group, expected one of the ranks that share "
                "parameters: call torch.distributed.init_process_group() before"
            )
        self._group, self._gradients = group, OwnerGradients(group)
        self._latest: _Pieces | None = None

    def reduce_to_owners(self, model: DistributedDataParallel) -> None:
        """Reduce each row of a gradient to its owner, in place of DDP's all-reduce:
        half the bytes. Call it before the first backward pass, and on every rank.

        ``no_sync``, accumulation, ``find_unused_parameters`` and ``static_graph`` work
        as before; ``join`` is refused. The step reads the rows that this rank owns. In
        all other rows ``p.grad`` is undefined: clip by ``max_norm``, and not by
        ``clip_grad_norm_``. In place of GradScaler take torch's ShardedGradScaler,
        whose ranks skip a step together.

        Args:
            model: a model over the ranks of this object's process group.

        Raises:
            TypeError: a model that is no DistributedDataParallel.
            ValueError: a model with other ranks.
            RuntimeError: a model with a communication hook; and of its forward pass,
                within ``join``.
        """
        self._gradients.register(model)

    def __reduce__(self) -> str:
        raise TypeError(
            "got a pickle of an optimizer with collectives=DataParallel, whose process "
            "group belongs to this process, expected its state_dict(): pickle that"
        )

    def __deepcopy__(self, memo: Any) -> DataParallel:
        return self

    def plan_for(
        self, leaves: Sequence[MatrixParam], others: Sequence[Tensor]
    ) -> Collectives:
        params = [*(leaf.tensor for leaf in leaves), *others]
        if not params:
            return self
        device, num = params[0].device.type, self._group.size()
        if self._latest is None or self._latest.mesh.device_type != device:
            with unset_fake_temporarily():  # real numbers for a model without memory
                mesh = DeviceMesh.from_group(self._group, device)
            self._latest = _Pieces(mesh, self._gradients)
        owners, _ = assign([leaf.num_flops(device) for leaf in leaves], num)
        lengths = {p: tuple(shard_sizes(len(p), num)) for p in others if p.ndim}
        for leaf, owner in zip(leaves, owners, strict=True):
            p = leaf.tensor
            if leaf.matrices.column_dim(p.ndim) > 1:  # its first dim counts matrices
                lengths[p] = tuple(shard_sizes(len(p), num))
            else:
                lengths[p] = tuple(len(p) * (rank == owner) for rank in range(num))
        # numbers and empty tensors are every rank's
        lengths = {p: n for p, n in lengths.items() if p.numel()}
        self._latest, self._gradients.lengths = self._latest.of(lengths), lengths
        return self._latest


class Shared(NamedTuple):
    """How the rows of some parameters come to all ranks."""

    ids: list[int]  # of the parameters
    chunks: list[Chunk]
    # parameters whose rows are no consecutive memory, and copies that travel for them
    apart: list[Tensor]
    copies: list[Tensor]


def _sum_of_bits(x: Tensor) -> Tensor:
    """Return a sum that is equal for equal values whatever the order of additions."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().view(words[x.itemsize]).sum(dtype=torch.int64)


def _flat(x: Tensor) -> Tensor | None:
    """Return the elements of ``x`` as they lie in memory, row after row; None where
    rows are no consecutive memory.
    """
    if x.is_contiguous():
        return x.view(-1)
    order = sorted(range(x.ndim), key=lambda dim: -x.stride()[dim])
    lying = x.permute(order)
    return lying.view(-1) if order[0] == 0 and lying.is_contiguous() else None


class _Pieces(MeshCollectives):
    """``DataParallel`` of known parameters. A rank's piece of a parameter is the
    consecutive rows that it updates.

    Tensors of the state have only the piece's rows. A tensor that is no parameter is
    therefore taken for a piece.
    """

    def __init__(self, mesh: DeviceMesh, gradients: OwnerGradients) -> None:
        super().__init__(mesh)
        self._gradients = gradients
        self._rank, self._num_ranks = mesh.get_local_rank(), mesh.size()
        self._group = mesh.get_group()
        self._lengths: dict[Tensor, tuple[int, ...]] = {}
        self._shared = Shared([], [], [], [])

    def of(self, lengths: Mapping[Tensor, tuple[int, ...]]) -> _Pieces:
        """Return these collectives for other parameters.

        Args:
            lengths: how many rows of each parameter every rank updates.
        """
        other = copy.copy(self)
        other._lengths, other._shared = dict(lengths), Shared([], [], [], [])
        return other

    # ---- agreement -------------------------------------------------------------------

    def agree(self, what: str, params: Sequence[tuple[Tensor, str]] = ()) -> None:
        """As ``MeshCollectives``; and check that all ranks hold equal values of each of
        ``params``: parameters of one shape may come in another order on a rank, which
        would write one parameter's rows into another.

        Raises:
            RuntimeError: on every rank, where ranks differ.
        """
        layouts = [
            f"parameter {i}={(*p.shape, p.dtype, p.stride())}"
            for i, (p, _) in enumerate(params)
        ]
        super().agree(", ".join([what, *layouts]))
        if not params:
            return
        with torch.no_grad():
            sums = torch.stack([_sum_of_bits(p) for p, _ in params])
        sums = sums.to(self.mesh.device_type)
        ends = torch.stack([sums, ~sums])  # the largest ~x has the smallest x
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._group)
        differ = (ends[0] != ~ends[1]).nonzero().flatten().tolist()
        if differ:
            raise RuntimeError(
                f"got other values of {params[differ[0]][1]} on one rank than on "
                "another, expected the same parameters in the same order: pass lists "
                "(a set has an order of its own on every rank), and start all ranks "
                "from equal values"
            )

    # ---- where pieces lie ------------------------------------------------------------

    def _rows(self, tensor: Tensor, p: Tensor, rank: int) -> Tensor:
        """Return the rows of ``tensor``, shaped as ``p``, that a rank updates of it."""
        lengths = self._lengths[p]
        return tensor.detach().narrow(0, sum(lengths[:rank]), lengths[rank])

    def local(self, tensor: Tensor, like: Tensor | None = None) -> Tensor:
        """Return the rows of a parameter or of its gradient that this rank updates,
        sharing storage. Any other tensor is a piece already.

        Raises:
            ValueError: a DTensor.
        """
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"got a DTensor of shape {tuple(tensor.shape)}, expected a tensor that "
                "every rank has whole: pass collectives=MeshCollectives(mesh) for "
                "sharded parameters"
            )
        p = tensor if like is None else like
        if like is not None:
            self._complete(tensor, p)
        return self._piece(tensor, p)

    def _complete(self, gradient: Tensor, p: Tensor) -> None:
        """Gather a gradient whose rows are with the owners of another plan."""
        lengths = self._gradients.owners_of(p)
        if lengths in (None, self._lengths.get(p)):
            return
        rows = gradient.split(lengths)[self._rank]
        gradient.copy_(self._joined(rows, lengths))
        self._gradients.forget(p)

    def _piece(self, tensor: Tensor, p: Tensor) -> Tensor:
        """Return the rows of ``tensor``, shaped as ``p``, that this rank updates."""
        if not self._is_cut(p) or self._lengths[p][self._rank] == len(p):
            return tensor
        return self._rows(tensor, p, self._rank)

    def _is_cut(self, p: Tensor) -> bool:
        return self._num_ranks > 1 and p in self._lengths

    def cuts(self, tensor: Tensor) -> Mapping[int, Tensor]:
        if not self._is_cut(tensor):
            return {}
        numbers = torch.arange(len(tensor), device=tensor.device)
        return {0: self._rows(numbers, tensor, self._rank)}

    def placement(self, tensor: Tensor) -> Hashable:
        return self._lengths.get(tensor)

    def _find_reductions(self, leaves: Sequence[Tensor]) -> list[Reduction]:
        self._places("sum", leaves)  # whether ranks agree about them
        if self._num_ranks == 1:
            return []
        contributes = None
        cut = list(map(self._is_cut, leaves))
        if self._rank > 0 and not all(cut):  # what all ranks have, one tells
            contributes = torch.tensor(cut, device=self.mesh.device_type)
        return [Reduction(self._group, None, contributes)]

    # ---- whole matrices ----------------------------------------------------------

    def on_owners(self, requests: Sequence[Request]) -> list[MatrixOutput]:
        """Precondition the matrices that this rank owns: nothing is sent."""
        results = [request.rowless for request in requests]
        held = [
            i
            for i, request in enumerate(requests)
            if request.input.matrix.numel() or not self._is_cut(request.tensor)
        ]
        steps = precondition_leaves([requests[i] for i in held])
        for i, result in zip(held, steps, strict=True):
            results[i] = result
        return results

    def publish_all(self, buffers: Sequence[OwnerBuffer]) -> Iterator[Tensor]:
        for owned, leaf, sizes, _ in buffers:
            if not self._is_cut(leaf):
                yield owned
                continue
            lengths = [
                length * sum(sizes) // len(leaf) for length in self._lengths[leaf]
            ]
            yield self._joined(owned, lengths).cpu()

    # ---- pieces of other ranks -------------------------------------------------------

    def gather_params(self, params: Sequence[Tensor]) -> None:
        """Gather the rows that other ranks have updated, chunk by chunk, each of one
        dtype; numbers come from the first rank.
        """
        ids = list(map(id, params))
        if self._shared.ids != ids:
            self._shared = self._plan(ids, params)
        shared = self._shared
        if shared.apart:
            torch._foreach_copy_(shared.copies, shared.apart)
        arriving: list[Callable[[], None]] = []
        for chunk in shared.chunks:
            arriving.append(self._gather(chunk))
            if len(arriving) == IN_FLIGHT:
                arriving.pop(0)()
        for rest in arriving:
            rest()
        if shared.apart:
            torch._foreach_copy_(shared.apart, shared.copies)

    def _plan(self, ids: list[int], params: Sequence[Tensor]) -> Shared:
        shared = Shared(ids, [], [], [])
        packs: dict[torch.dtype, list[list[Tensor]]] = {}
        for p in params:
            if not (self._is_cut(p) or p.ndim == 0 and self._num_ranks > 1):
                continue
            flat = _flat(p.detach())
            if flat is None:
                shared.apart.append(p.detach())
                shared.copies.append(torch.empty(p.shape, dtype=p.dtype).to(p.device))
                flat = shared.copies[-1].view(-1)
            pack = packs.setdefault(p.dtype, [[] for _ in range(self._num_ranks)])
            lengths = self._lengths.get(p) or [1]  # the first rank has numbers
            row, first = p.numel() // sum(lengths), 0
            for views, length in zip(pack, lengths, strict=False):
                if length:
                    views.append(flat[first : first + length * row])
                    first += length * row
        for pack in packs.values():
            shared.chunks.extend(Packs(pack, self._rank).chunks(CHUNK))
        return shared

    def _gather(self, chunk: Chunk) -> Callable[[], None]:
        """Start an all-gather; return what waits for it and copies what arrives."""
        parts, new = chunk.own, chunk.like.new_empty
        if chunk.is_moved:
            leaving = torch.cat(chunk.leaving) if chunk.leaving else new(0)
            moved = new(sum(chunk.arriving_sizes))
            sizes = chunk.arriving_sizes, chunk.leaving_sizes
            dist.all_to_all_single(moved, leaving, *sizes, group=self._group)
            parts = [*parts, moved]
        padding = new(chunk.width - sum(x.numel() for x in parts))
        flat = torch.cat([*parts, padding])
        gathered = new(self._num_ranks * chunk.width)
        work = all_gather(gathered, flat, group=self._group, async_op=True)

        def arrive() -> None:
            work.wait()
            values = gathered.split(chunk.sizes)
            if chunk.incoming:
                values = [values[i] for i in chunk.incoming_parts]
                torch._foreach_copy_(chunk.incoming, values)

        return arrive

    def gather_state(
        self, pieces: Sequence[Tensor], params: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        for piece, p in zip(pieces, params, strict=True):
            cut = self._is_cut(p)
            yield self._joined(piece, self._lengths[p]) if cut else piece

    def _joined(self, piece: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the rows of all ranks. ``lengths``: how many each rank has."""
        shape = piece.shape[1:]
        holders = [rank for rank, length in enumerate(lengths) if length]
        if len(holders) == 1:
            whole = piece.new_empty(sum(lengths), *shape)
            if holders[0] == self._rank:
                whole.copy_(piece)
            dist.broadcast(whole, group=self._group, group_src=holders[0])
            return whole
        padded = piece.new_zeros(max(lengths), *shape)
        padded[: len(piece)] = piece
        gathered = piece.new_empty(self._num_ranks * len(padded), *shape)
        all_gather(gathered, padded, group=self._group)
        parts = zip(gathered.split(len(padded)), lengths, strict=True)
        return torch.cat([part[:length] for part, length in parts])

    def local_state(self, whole: Tensor, param: Tensor) -> Tensor:
        alike = whole.ndim > 0 and self._is_cut(param) and len(whole) == len(param)
        return self._piece(whole, param) if alike else whole
