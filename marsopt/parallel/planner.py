"""After cut: which rank owns which matrix, decided once and equally on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import ceil, prod
from typing import Literal

from marsopt.parallel.placement import shard_sizes
from marsopt.rules.preconditioner import MatrixCost

Strategy = Literal["auto", "owner", "replicate"]
STRATEGIES: tuple[Strategy, ...] = ("auto", "owner", "replicate")
BUCKET = 2**25  # bytes that a rank sends to owners in one exchange, about


@dataclass(frozen=True)
class Machine:
    """The speeds that the model of time assumes.

    Args:
        link: bytes a second that one rank sends.
        flops: of products in half precision, a second.
        flops_fp32: of products in float32, as in SOAP.
    """

    link: float = 50e9
    flops: float = 400e12
    flops_fp32: float = 50e12


@dataclass(frozen=True)
class Matrix:
    """A matrix that one mesh axis cuts along ``dim``.

    Args:
        rows, cols: of the whole matrix.
        dim: 0 if rows are cut, 1 if columns are.
        lengths: of the pieces along ``dim``, rank by rank; None = as Shard cuts. If a
            parameter has several matrices, each may begin and end on any rank.
    """

    rows: int
    cols: int
    dim: int
    lengths: tuple[int, ...] | None = None

    def shards(self, num_ranks: int) -> list[tuple[int, int]]:
        """Return the shapes of the shards, rank by rank."""
        whole = (self.rows, self.cols)[self.dim]
        sizes = self.lengths or shard_sizes(whole, num_ranks)
        if self.dim == 0:
            return [(size, self.cols) for size in sizes]
        return [(self.rows, size) for size in sizes]


@dataclass(frozen=True)
class Plan:
    """The owner and bucket of each matrix; owner -1: every rank gathers the matrix.

    With ``replicas`` above 1, HSDP replicas share the owners' work. Owners are then
    numbered through the ranks of the first replica, then of the second, and so on.
    """

    num_ranks: int
    replicas: int
    owners: tuple[int, ...]
    buckets: tuple[int, ...]

    @property
    def owned(self) -> list[int]:
        """Return the indices of the matrices that have an owner."""
        return [i for i, owner in enumerate(self.owners) if owner >= 0]

    @property
    def num_buckets(self) -> int:
        """Return the number of exchanges with owners."""
        return max((self.buckets[i] + 1 for i in self.owned), default=0)

    def exchanges(self, replica: int) -> list[list[list[int]]]:
        """Return the matrices that each rank of a replica owns, bucket by bucket."""
        ranks, buckets = range(self.num_ranks), range(self.num_buckets)
        exchanges: list[list[list[int]]] = [[[] for _ in ranks] for _ in buckets]
        for i in self.owned:
            its_replica, rank = divmod(self.owners[i], self.num_ranks)
            if its_replica == replica:
                exchanges[self.buckets[i]][rank].append(i)
        return [owned for owned in exchanges if any(owned)]


@dataclass(frozen=True)
class Cost:
    """The cost of one step on the slowest rank."""

    bytes_sent: float  # mean over the ranks
    bytes_max: float  # of the rank that sends most: an owner
    seconds: float
    owner_flops: list[float]

    @property
    def imbalance(self) -> float:
        """Return FLOPs of the slowest owner over the mean; 1 is even."""
        mean = sum(self.owner_flops) / len(self.owner_flops)
        return max(self.owner_flops) / mean if mean else 1.0


def assign(flops: Sequence[int], num_ranks: int) -> tuple[list[int], list[float]]:
    """Return the owner of each matrix, and the load of each rank.

    The largest matrix that is left goes to the least loaded rank (longest processing
    time first). Ties go to the earlier matrix and the lower rank, so that all ranks
    agree.
    """
    owners, loads = [0] * len(flops), [0.0] * num_ranks
    least = [(0.0, rank) for rank in range(num_ranks)]  # a heap
    for i in sorted(range(len(flops)), key=lambda i: (-flops[i], i)):
        _, owner = least[0]
        owners[i] = owner
        loads[owner] += flops[i]
        heapreplace(least, (loads[owner], owner))
    return owners, loads


def assign_buckets(
    flops: Sequence[int], num_owners: int, max_buckets: int | None, sent: float
) -> tuple[list[int], list[int]]:
    """Return the owner of each matrix, and its bucket among its owner's buckets, both
    balanced by FLOPs.

    Without ``max_buckets`` there are two buckets or more, of about ``BUCKET`` of the
    ``sent`` bytes, and of two matrices at least: an owner with three has its largest in
    the first, and the other two would wait for it.
    """
    owners, _ = assign(flops, num_owners)
    if max_buckets is None:
        most = max(Counter(owners).values(), default=0)
        max_buckets = max(2, min(ceil(sent / BUCKET), most // 2))
    buckets = [0] * len(flops)
    for owner in set(owners):
        members = [i for i, its_owner in enumerate(owners) if its_owner == owner]
        its_buckets, _ = assign([flops[i] for i in members], max_buckets)
        for i, bucket in zip(members, its_buckets, strict=True):
            buckets[i] = bucket
    return owners, buckets


def plan(
    matrices: Sequence[Matrix],
    num_ranks: int,
    work: MatrixCost,
    *,
    strategy: Strategy = "auto",
    max_buckets: int | None = None,
    replicas: int = 1,
    machine: Machine = Machine(),
) -> Plan:
    """Give every matrix an owner, balanced by FLOPs over all shapes together; with
    "replicate", and for one rank, give no matrix an owner.

    With HSDP ``replicas`` "auto" compares two ways by the model of time: every replica
    does all of the owners' work, or replicas share the work and send each other the
    results. "owner" shares.

    Raises:
        ValueError: an unknown strategy, or ``max_buckets`` below 1.
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            f"got strategy={strategy!r}, expected one of {STRATEGIES}: choose one of "
            "these names"
        )
    if max_buckets is not None and max_buckets < 1:
        raise ValueError(
            f"got max_buckets={max_buckets}, expected 1 or more: 2 overlap, and None "
            "takes as many as the traffic asks for"
        )

    if strategy == "replicate" or num_ranks * replicas == 1:
        num = len(matrices)
        return Plan(num_ranks, 1, (-1,) * num, (0,) * num)
    flops = [work.num_flops(m.rows, m.cols) for m in matrices]
    nbytes = work.payload().itemsize * sum(m.rows * m.cols for m in matrices)
    plans = []
    for split in sorted({1, replicas}) if strategy == "auto" else [replicas]:
        num_owners = num_ranks * split
        sent = nbytes / num_owners
        owners, buckets = assign_buckets(flops, num_owners, max_buckets, sent)
        plans.append(Plan(num_ranks, split, tuple(owners), tuple(buckets)))
    return min(plans, key=lambda plan: cost(matrices, plan, work, machine).seconds)


def cost(
    matrices: Sequence[Matrix],
    plan: Plan,
    work: MatrixCost,
    machine: Machine = Machine(),
) -> Cost:
    """Return the bytes that a rank sends, FLOPs of each owner, and the model's time.

    Bytes and FLOPs are as in docs/scaling.md; time is a model, for choosing, not a
    measurement. Bytes of an (m, n) matrix of s bytes an element, over p ranks:

    - with an owner, 2 mn s / p a rank, less the bytes that stay at home: mn s / p from
      every other rank, and mn s (p - 1)/p back from the owner. R replicas that share
      the work send that over R, and mn s (R - 1)/(p R) of results;
    - gathered, mn s (p - 1)/p.
    """
    p, split = plan.num_ranks, plan.replicas
    away = (p - 1) / p
    payload, back = work.payload().itemsize, work.returned().itemsize
    rate = machine.flops_fp32 if work.is_float32 else machine.flops
    sent = seconds = 0.0
    extra, loads = [0.0] * (p * split), [0.0] * (p * split)  # of each owner
    for m, owner in zip(matrices, plan.owners, strict=True):
        flops, numel = work.num_flops(m.rows, m.cols), m.rows * m.cols
        if owner >= 0:
            local_numel = prod(m.shards(p)[owner % p])
            sent += (payload / split + back * (split - 1) / split) * numel / p
            extra[owner] += back * (numel - local_numel) - payload * local_numel
            loads[owner] += flops
        else:
            sent += payload * numel * away
            seconds += flops / rate
    bytes_max = sent + max(extra)
    seconds += bytes_max / machine.link + max(loads) / rate
    return Cost(sent + sum(extra) / len(extra), bytes_max, seconds, loads)
