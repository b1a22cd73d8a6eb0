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

from marsopt.functional.collectives import (
    Collectives,
    Leaf,
    LocalCollectives,
    Owned,
    Request,
    precondition_leaves,
)
from marsopt.rules.preconditioner import MatrixOutput

from .collectives import MeshCollectives, Reduction
from .exchange import all_gather
from .placement import shard_sizes
from .planner import assign

BUCKET = 2**24  # bytes that a rank sends in one all-gather, about
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
        self._group = group
        self._latest: _Pieces | None = None

    def __reduce__(self) -> str:
        raise TypeError(
            "got a pickle of an optimizer with collectives=DataParallel, whose process "
            "group belongs to this process, expected its state_dict(): pickle that"
        )

    def __deepcopy__(self, memo: Any) -> DataParallel:
        return self

    def bound(self, leaves: Sequence[Leaf], others: Sequence[Tensor]) -> Collectives:
        params = [*(leaf.tensor for leaf in leaves), *others]
        if not params:
            return self
        device, num = params[0].device.type, self._group.size()
        if self._latest is None or self._latest.mesh.device_type != device:
            with unset_fake_temporarily():  # real numbers for a model without memory
                mesh = DeviceMesh.from_group(self._group, device)
            self._latest = _Pieces(mesh)
        work = [
            leaf.matrices.num_in(leaf.tensor.shape)
            * leaf.preconditioner.cost.on(device).num_flops(
                *leaf.matrices.shape_in(leaf.tensor.shape)
            )
            for leaf in leaves
        ]
        owners, _ = assign(work, num)
        lengths = {p: tuple(shard_sizes(len(p), num)) for p in others if p.ndim}
        for leaf, owner in zip(leaves, owners, strict=True):
            p = leaf.tensor
            if leaf.matrices.column_dim(p.ndim) > 1:  # its first dim counts matrices
                lengths[p] = tuple(shard_sizes(len(p), num))
            else:
                lengths[p] = tuple(len(p) * (rank == owner) for rank in range(num))
        # numbers and empty tensors are every rank's
        self._latest = self._latest.of({p: n for p, n in lengths.items() if p.numel()})
        return self._latest


class Bucket(NamedTuple):
    """One all-gather of rows of parameters of one dtype."""

    width: int  # elements that each rank sends, padding included
    outgoing: list[Tensor]  # rows that this rank sends, views of parameters
    incoming: list[Tensor]  # rows of all other ranks
    sizes: list[int]  # elements of each part of what arrives, padding and own rows too
    incoming_parts: list[int]  # which parts are ``incoming``

    @classmethod
    def of(cls, rows: Sequence[Sequence[Tensor]], rank: int) -> Bucket:
        """Return the bucket of one rank, from the rows that each rank sends."""
        width = max(sum(x.numel() for x in part) for part in rows)
        incoming: list[Tensor] = []
        sizes: list[int] = []
        incoming_parts: list[int] = []
        for number, part in enumerate(rows):
            if number == rank:
                sizes.append(width)
                continue
            incoming += part
            incoming_parts += range(len(sizes), len(sizes) + len(part))
            sizes += [x.numel() for x in part]
            sizes.append(width - sum(x.numel() for x in part))
        return cls(width, list(rows[rank]), incoming, sizes, incoming_parts)


class _Pieces(MeshCollectives):
    """``DataParallel`` of known parameters. A rank's piece of a parameter is the
    consecutive rows that it updates.

    Tensors of the state have only the piece's rows. A tensor that is no parameter is
    therefore taken for a piece.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self._rank, self._num_ranks = mesh.get_local_rank(), mesh.size()
        self._group = mesh.get_group()
        self._lengths: dict[Tensor, tuple[int, ...]] = {}
        self._buckets: tuple[list[int], list[Bucket]] = ([], [])

    def of(self, lengths: Mapping[Tensor, tuple[int, ...]]) -> _Pieces:
        """Return these collectives for other parameters.

        Args:
            lengths: how many rows of each parameter every rank updates.
        """
        other = copy.copy(self)
        other._lengths, other._buckets = dict(lengths), ([], [])
        return other

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

    def publish(self, owned: Tensor, leaf: Tensor, num: int, owns: Owned) -> Tensor:
        if not self._is_cut(leaf):
            return owned
        lengths = [length * num // len(leaf) for length in self._lengths[leaf]]
        return self._joined(owned, lengths).cpu()

    # ---- pieces of other ranks -------------------------------------------------------

    def share(self, params: Sequence[Tensor]) -> None:
        """Gather the rows that other ranks have updated: one all-gather a bucket, each
        of one dtype.
        """
        ids = list(map(id, params))
        if self._buckets[0] != ids:
            cut = [p for p in params if self._is_cut(p)]
            dtypes = dict.fromkeys(p.dtype for p in cut)
            several = [self._deal([p for p in cut if p.dtype == d]) for d in dtypes]
            self._buckets = ids, [bucket for part in several for bucket in part]
        arriving: list[Callable[[], None]] = []
        for bucket in self._buckets[1]:
            arriving.append(self._gather(bucket))
            if len(arriving) == IN_FLIGHT:
                arriving.pop(0)()
        for rest in arriving:
            rest()

    def _deal(self, params: Sequence[Tensor]) -> list[Bucket]:
        """Deal parameters of one dtype into buckets that are as even over ranks as can
        be: of each rank the largest rows go first.
        """
        ranks = range(self._num_ranks)
        rows = [[self._rows(p, p, rank) for p in params] for rank in ranks]
        sizes = [[x.nbytes for x in part] for part in rows]
        widest, largest = max(map(sum, sizes)), max(map(max, sizes))
        num = max(1, widest // max(BUCKET, largest))
        dealt: list[list[list[Tensor]]] = [[[] for _ in ranks] for _ in range(num)]
        for rank in ranks:
            places, _ = assign(sizes[rank], num)
            for place, x in zip(places, rows[rank], strict=True):
                if x.numel():
                    dealt[place][rank].append(x)
        return [Bucket.of(part, self._rank) for part in dealt if any(part)]

    def _gather(self, bucket: Bucket) -> Callable[[], None]:
        """Start an all-gather; return what waits for it and copies its rows."""
        like = (bucket.outgoing or bucket.incoming)[0]
        flat = like.new_empty(bucket.width)
        if bucket.outgoing:
            words = torch.cat([x.reshape(-1) for x in bucket.outgoing])
            flat[: len(words)] = words
        gathered = flat.new_empty(self._num_ranks * bucket.width)
        work = all_gather(gathered, flat, group=self._group, async_op=True)

        def arrive() -> None:
            work.wait()
            parts = gathered.split(bucket.sizes)
            pairs = zip(bucket.incoming_parts, bucket.incoming, strict=True)
            values = [parts[i].view(rows.shape) for i, rows in pairs]
            if values:
                torch._foreach_copy_(bucket.incoming, values)

        return arrive

    def whole(
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

    def piece(self, whole: Tensor, param: Tensor) -> Tensor:
        alike = whole.ndim > 0 and self._is_cut(param) and len(whole) == len(param)
        return self.local(whole, param) if alike else whole
