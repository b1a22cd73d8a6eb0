"""What a step of one job takes on many ranks: memory and messages as recorded on the
ranks that have most, bytes and FLOPs of every owner as planned, and times by a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marsopt.parallel.planner import Cost, Machine, Matrix, Plan, cost, plan
from train.forecast.models import Job
from train.forecast.record import Memory, record


@dataclass(frozen=True)
class Hardware:
    """What the times assume."""

    machine: Machine = Machine()  # links and Newton-Schulz rates
    memory: float = 3e12  # bytes a second that one rank reads and writes
    utilization: float = 0.4  # of machine.flops, by forward and backward

    @classmethod
    def of(cls, link_gbps: float, tflops: float, memory_gbs: float) -> Hardware:
        """Return that of a rank: Gbit/s, bf16 matmul rate (an eighth of it in float32),
        GB/s.
        """
        flops = tflops * 1e12
        machine = Machine(link=link_gbps / 8 * 1e9, flops=flops, flops_fp32=flops / 8)
        return cls(machine=machine, memory=memory_gbs * 1e9)


@dataclass(frozen=True)
class Forecast:
    """Of one step on the slowest rank."""

    plan: Plan
    cost: Cost
    memory: Memory  # the most that any rank holds
    moved_bytes: int  # by elementwise passes
    sent_bytes: float  # by the optimizer, in the mean over the ranks
    most_sent_bytes: float  # by the rank that sends most: an owner
    collectives: Mapping[str, int]  # of the optimizer, by kind
    optimizer_seconds: float
    training_seconds: float

    @property
    def seconds(self) -> float:
        """Return those of the whole step."""
        return self.optimizer_seconds + self.training_seconds

    @property
    def share(self) -> float:
        """Return the optimizer's part of the whole step."""
        return self.optimizer_seconds / self.seconds


def forecast(
    job: Job, num_ranks: int, *, replicas: int = 1, hardware: Hardware = Hardware()
) -> Forecast:
    """Return the step of ``job`` on ``num_ranks``, shared equally by the replicas.

    Raises:
        ValueError: ranks that do not divide among replicas.
        RuntimeError: this process has a process group.
    """
    if num_ranks < 1 or replicas < 1 or num_ranks % replicas:
        raise ValueError(
            f"got {num_ranks} rank{'s' * (num_ranks != 1)} and {replicas} "
            f"replica{'s' * (replicas != 1)}, expected a positive number of ranks that "
            "the replicas divide: change one of the two"
        )
    p, machine = num_ranks // replicas, hardware.machine
    matrices = list(job.matrices().values())
    # without shards every replica iterates by itself
    shared = replicas if p > 1 else 1
    chosen = plan(matrices, p, job.cost, replicas=shared, machine=machine)
    spent = cost(matrices, chosen, job.cost, machine)
    sizes = (shared, p) if shared > 1 else (p,)
    # the first rank's shards are largest
    ranks = sorted({0, *_fullest(matrices, chosen)})
    found = [record(job, sizes, rank, machine) for rank in ranks]
    calls = [Counter(kind for kind, _ in one.collectives) for one in found]
    norms = sum(num for kind, num in found[0].collectives if kind == "all-reduce")
    moved = found[0].moved_bytes
    return Forecast(
        plan=chosen,
        cost=spent,
        memory=Memory(*map(max, zip(*(one.memory for one in found), strict=True))),
        moved_bytes=moved,
        sent_bytes=spent.bytes_sent + norms,
        most_sent_bytes=spent.bytes_max + norms,
        collectives={kind: max(own[kind] for own in calls) for kind in CALLED},
        optimizer_seconds=spent.seconds
        + norms / machine.link
        + moved / hardware.memory,
        training_seconds=_training_seconds(job, num_ranks, p, hardware),
    )


def _fullest(matrices: Sequence[Matrix], plan: Plan) -> list[int]:
    """Return one rank for each of those shares of the owners' work that have most
    elements: equal shares take equal memory.
    """
    shares: dict[int, list[tuple[int, Matrix]]] = {}
    for i in plan.owned:
        shares.setdefault(plan.owners[i], []).append((plan.buckets[i], matrices[i]))
    alike: dict[frozenset[tuple[tuple[int, Matrix], int]], int] = {}
    for rank in sorted(shares):
        alike.setdefault(frozenset(Counter(shares[rank]).items()), rank)

    def num_elements(rank: int) -> int:
        return sum(m.rows * m.cols for _, m in shares[rank])

    return sorted(alike.values(), key=num_elements, reverse=True)[:MOST_SHARES]


def _training_seconds(
    job: Job, num_ranks: int, num_shards: int, hardware: Hardware
) -> float:
    """Return those of forward and backward, of every gradient that a step wants."""
    machine = hardware.machine
    # FSDP2: parameters gathered for forward and for backward, gradients scattered
    sent = (2 + 2 + 4) * job.num_params * (num_shards - 1) / num_shards
    compute = job.flops_per_token * job.tokens / num_ranks
    # communication hides behind computing, or the other way round
    one = max(sent / machine.link, compute / (machine.flops * hardware.utilization))
    return job.num_gradients * one


# shares of the owners' work that are recorded: of the large models, there are three
# or fewer on most numbers of ranks
MOST_SHARES = 3
CALLED = ("all-reduce", "all-to-all", "all-gather")
SWEEP = [2**i for i in range(13)]  # ranks


def sweep(job: Job, replicas: int, hardware: Hardware) -> list[tuple[int, Forecast]]:
    """Return forecasts for 1 to 4096 ranks.

    Raises:
        ValueError: more replicas than that, or fewer than one.
    """
    if not 1 <= replicas <= SWEEP[-1]:
        raise ValueError(
            f"got {replicas} replicas, expected 1 to {SWEEP[-1]}: change their number"
        )
    ranks = [n * replicas for n in SWEEP if n * replicas <= SWEEP[-1]]
    return [(n, forecast(job, n, replicas=replicas, hardware=hardware)) for n in ranks]
