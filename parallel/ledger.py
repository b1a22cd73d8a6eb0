"""What Newton-Schulz holds at most, alone and over ranks: the allocations of
``NewtonSchulz.many`` and ``ShardGroup.orthogonalize``, written down in their order.

tests/test_forecast.py counts them in the code itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from marsopt import NewtonSchulz

from .planner import Matrix, Plan

FULL = 4  # bytes of a float32: parameters, gradients, momenta and their factors
FROM_GRAM = 7  # k x k matrices at once in ``NewtonSchulz.from_gram``


class Ledger:
    """Bytes that are held now, and were at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, num_bytes: float) -> None:
        """Allocate."""
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def give(self, num_bytes: float) -> None:
        """Free."""
        self.now -= num_bytes

    def touch(self, num_bytes: float) -> None:
        """Allocate, and free at once."""
        self.most = max(self.most, self.now + num_bytes)

    @contextmanager
    def lent(self, num_bytes: float) -> Iterator[None]:
        """Allocate for a while."""
        self.take(num_bytes)
        yield
        self.give(num_bytes)


def iterate(
    ledger: Ledger, shape: tuple[int, int], num: int, given: int, ns: NewtonSchulz
) -> None:
    """Take what ``ns.many`` takes for ``num`` matrices of one shape on a GPU, and keep
    their factors; they are ``given`` with so many bytes an element.
    """
    size, short = ns.dtype.itemsize, min(shape)
    numel, square = num * shape[0] * shape[1], num * short**2
    stack = given * numel if num > 1 else 0
    with ledger.lent(stack):
        if given != size:  # normalized before it is cast
            ledger.touch((given + size) * numel)
        # an iterate, its Gram matrix and polynomial, and the next iterate
        ledger.touch(size * (2 * numel + 2 * square))
        # the next Gram matrix while the last one and its polynomial are there
        ledger.touch(size * (numel + 3 * square) if ns.steps > 1 else 0)
        with ledger.lent(size * numel if given != size else 0):  # the last, cast back
            ledger.take(given * numel)


def iterate_all(
    ledger: Ledger, shapes: Iterable[tuple[int, int]], given: int, ns: NewtonSchulz
) -> None:
    """Take what ``ns.many`` takes: one shape after the other; all factors stay."""
    for shape, num in Counter(shapes).items():
        iterate(ledger, shape, num, given, ns)


def by_owners(
    ledger: Ledger,
    matrices: Sequence[Matrix],
    plan: Plan,
    replica: int,
    rank: int,
    ns: NewtonSchulz,
) -> None:
    """Take what one rank takes to send shards to owners and back, bucket by bucket;
    shards of factors stay, in float32. All ranks are taken to have shards as large as
    those of the first, which has most.
    """
    there, back = ns.payload().itemsize, ns.dtype.itemsize
    of_replica, owner = _owned(plan, replica), replica * plan.num_ranks + rank
    buckets = [
        [i for i in of_replica if plan.buckets[i] == bucket]
        for bucket in sorted({plan.buckets[i] for i in of_replica})
    ]
    mine = [[matrices[i] for i in b if plan.owners[i] == owner] for b in buckets]
    owned = [sum(m.rows * m.cols for m in own) for own in mine]
    shards = [_num_shard(matrices, bucket, plan) for bucket in buckets]
    for shard, own in zip(shards, owned, strict=True):
        with ledger.lent(there * shard if there != FULL else 0):  # cast, then joined
            ledger.take(there * (shard + own))  # leaving and arriving
    for b, (shard, own) in enumerate(zip(shards, owned, strict=True)):
        ledger.give(there * shard)  # has left
        with ledger.lent(there * own):  # whole matrices
            iterate_all(ledger, ((m.rows, m.cols) for m in mine[b]), there, ns)
        if b:
            ledger.give(there * owned[b - 1])  # factors of the bucket before
        with ledger.lent(back * own if there != back else 0):
            ledger.take(back * (own + shard))  # leaving and arriving
    for shard, own in zip(shards, owned, strict=True):
        ledger.give(back * own)  # has left
        ledger.take(FULL * shard if back != FULL else 0)
    ledger.give(there * (sum(owned) + (owned[-1] if owned else 0)))
    ledger.give(back * sum(shards) if back != FULL else 0)


def _owned(plan: Plan, replica: int) -> list[int]:
    """Return the matrices that one replica's ranks own."""
    return [
        i for i in plan.members("owner") if plan.owners[i] // plan.num_ranks == replica
    ]


def _num_shard(matrices: Sequence[Matrix], members: Iterable[int], plan: Plan) -> int:
    """Return the elements of the first rank's shards of some matrices."""
    return sum(matrices[i].shard_numel(0, plan.num_ranks) for i in members)


def shared(
    ledger: Ledger,
    matrices: Sequence[Matrix],
    plan: Plan,
    replica: int,
    ns: NewtonSchulz,
) -> None:
    """Take what one replica takes to give its factors to all; those of all stay."""
    size = ns.dtype.itemsize
    shares = [
        _num_shard(matrices, _owned(plan, other), plan)
        for other in range(plan.replicas)
    ]
    own, widest = shares[replica], max(shares)
    every = size * len(shares) * widest
    with ledger.lent(size * widest + FULL * own):  # padded, from its own joined
        ledger.take(every)
        ledger.take(FULL * sum(shares) if size != FULL else 0)
    ledger.give(FULL * own)  # as they came from the owners
    ledger.give(every if size != FULL else 0)


def by_gram(ledger: Ledger, matrices: Sequence[Matrix], num_ranks: int) -> None:
    """Take what Gram matrices of short sides take; shards of factors stay."""
    squares = [FULL * min(m.rows, m.cols) ** 2 for m in matrices]
    with ledger.lent(2 * sum(squares)):  # each, and all joined
        for m, square in zip(matrices, squares, strict=True):
            ledger.touch(FROM_GRAM * square)
            with ledger.lent(square):
                ledger.take(FULL * m.shard_numel(0, num_ranks))


def over_ranks(
    ledger: Ledger,
    matrices: Sequence[Matrix],
    plan: Plan,
    replica: int,
    rank: int,
    ns: NewtonSchulz,
) -> None:
    """Take what ``ShardGroup.orthogonalize`` takes on one rank; its factors stay."""
    by_owners(ledger, matrices, plan, replica, rank, ns)
    if plan.replicas > 1 and plan.num_buckets:
        shared(ledger, matrices, plan, replica, ns)
    by_gram(ledger, [matrices[i] for i in plan.members("gram")], plan.num_ranks)
