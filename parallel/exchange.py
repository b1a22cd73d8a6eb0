"""Matrices from shards to owners and back: two all-to-all per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from marsopt import NewtonSchulz

from .placement import shard_sizes
from .planner import Matrix, Plan


class Bucket:
    """The matrices of one exchange: what this rank sends, receives and owns.

    Shards travel flat, ordered by destination and then by matrix, with exact sizes:
    shards may be uneven or empty, and nothing is padded.
    """

    def __init__(
        self, matrices: Sequence[Matrix], plan: Plan, members: list[int], rank: int
    ) -> None:
        self._rank, self.num_ranks, self._matrices = rank, plan.num_ranks, matrices
        # owners of other replicas are not met here: ``members`` are those of one
        owners = {i: plan.owners[i] % plan.num_ranks for i in members}
        # ordered by owner: how all ranks lay out what goes to, or comes from, owners
        self.members = sorted(members, key=lambda i: (owners[i], i))
        self.mine = [i for i in self.members if owners[i] == rank]
        self._sizes = {
            i: shard_sizes(
                (matrices[i].rows, matrices[i].cols)[matrices[i].dim], plan.num_ranks
            )
            for i in self.members
        }
        self.to_owners = [
            sum(self._numel(i, rank) for i in self.members if owners[i] == owner)
            for owner in range(plan.num_ranks)
        ]
        self.from_shards = [
            sum(self._numel(i, source) for i in self.mine)
            for source in range(plan.num_ranks)
        ]

    def _numel(self, i: int, rank: int) -> int:
        m = self._matrices[i]
        return self._sizes[i][rank] * (m.cols if m.dim == 0 else m.rows)

    def _shape(self, i: int, rank: int) -> tuple[int, int]:
        m, size = self._matrices[i], self._sizes[i][rank]
        return (size, m.cols) if m.dim == 0 else (m.rows, size)

    def pack_shards(self, local: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """This rank's shards, owner by owner."""
        return torch.cat([local[i].reshape(-1).to(dtype) for i in self.members])

    def unpack_shards(self, flat: Tensor) -> dict[int, Tensor]:
        """Inverse of ``pack_shards``, of what came back from the owners."""
        parts = _cut(flat, [self._numel(i, self._rank) for i in self.members])
        return {
            i: part.view(self._shape(i, self._rank))
            for i, part in zip(self.members, parts, strict=True)
        }

    def join(self, flat: Tensor) -> list[Tensor]:
        """The whole matrices that this rank owns, from all ranks' shards."""
        ranks = range(self.num_ranks)
        parts = iter(_cut(flat, [self._numel(i, r) for r in ranks for i in self.mine]))
        pieces: dict[int, list[Tensor]] = {i: [] for i in self.mine}
        for r in ranks:
            for i in self.mine:
                pieces[i].append(next(parts).view(self._shape(i, r)))
        return [torch.cat(pieces[i], self._matrices[i].dim) for i in self.mine]

    def cut(self, whole: Sequence[Tensor], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Inverse of ``join``: owned factors as every rank's shards, rank by rank."""
        cuts = [
            o.to(dtype).split(self._sizes[i], self._matrices[i].dim)
            for i, o in zip(self.mine, whole, strict=True)
        ]
        pieces = [cut[r].reshape(-1) for r in range(self.num_ranks) for cut in cuts]
        return torch.cat(pieces) if pieces else like.new_empty(0, dtype=dtype)


def _cut(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = [0, *accumulate(sizes)]
    return [flat[a:b] for a, b in pairwise(ends)]


def orthogonalize(
    local: Sequence[Tensor],
    buckets: Sequence[Bucket],
    ns: NewtonSchulz,
    group: dist.ProcessGroup,
) -> dict[int, Tensor]:
    """Shards of the factors of all matrices in ``buckets``, by index.

    All shards are under way before the first bucket is iterated, and a bucket's factors
    travel back while the next one is iterated.
    """
    arriving = []
    for bucket in buckets:
        widest = reduce(torch.promote_types, (local[i].dtype for i in bucket.members))
        with record_function("marsopt: exchange"):
            sent = bucket.pack_shards(local, ns.payload(widest))
            arriving.append(_send(sent, bucket.to_owners, bucket.from_shards, group))
    returning = []
    for bucket, (whole, work) in zip(buckets, arriving, strict=True):
        work.wait()
        with record_function("marsopt: newton-schulz on the owner"):
            factors = ns.many(bucket.join(whole))
        with record_function("marsopt: exchange"):
            sent = bucket.cut(factors, ns.dtype, whole)
            returning.append(_send(sent, bucket.from_shards, bucket.to_owners, group))
    out: dict[int, Tensor] = {}
    for bucket, (flat, work) in zip(buckets, returning, strict=True):
        work.wait()
        for i, shard in bucket.unpack_shards(flat).items():
            out[i] = shard.to(local[i].dtype)
    return out


def _send(
    flat: Tensor, to: list[int], of: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, dist.Work]:
    """An all-to-all under way, and where it arrives."""
    out = flat.new_empty(sum(of))
    work = dist.all_to_all_single(out, flat, of, to, group=group, async_op=True)
    return out, work


def share(
    mine: dict[int, Tensor],
    shares: Sequence[Sequence[int]],
    local: Sequence[Tensor],
    ns: NewtonSchulz,
    group: dist.ProcessGroup,
) -> dict[int, Tensor]:
    """Every replica's factors to all replicas: one all-gather, padded to the largest.

    Args:
        mine: this replica's shards of factors.
        shares: for each replica the matrices that it had, in order.
        local: shards of all matrices, for their shapes.
    """
    lengths = [sum(local[i].numel() for i in part) for part in shares]
    widest = max(lengths)
    flat = torch.zeros(widest, dtype=ns.dtype, device=local[0].device)
    part = shares[dist.get_rank(group)]
    if part:
        own = torch.cat([mine[i].reshape(-1) for i in part]).to(ns.dtype)
        flat[: len(own)] = own
    everyone = flat.new_empty(len(shares) * widest)
    dist.all_gather_into_tensor(everyone, flat, group=group)
    out = {}
    for r, part in enumerate(shares):
        cuts = _cut(everyone[r * widest :], [local[i].numel() for i in part])
        for i, piece in zip(part, cuts, strict=True):
            out[i] = piece.view(local[i].shape).to(local[i].dtype)
    return out
