"""What a sharded step will send, compute, hold and take: arithmetic, no process.

Everything here is a model; docs/scaling.md says what of it was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from marsopt import REGISTRY, NewtonSchulz

from .planner import Cost, Machine, Matrix, Plan, cost, plan

SWEEP = [2**i for i in range(13)]  # ranks
ELEMENTWISE_BYTES = 44  # a parameter and step: g, h, x, m, v read; x, m, v, h written


@dataclass(frozen=True)
class Job:
    """A model and how it is trained."""

    shapes: Mapping[str, Sequence[int]]  # of all parameters, by name
    mars_type: str  # the rule of its matrices
    tokens: int  # per step, over all ranks
    flops_per_token: int  # of forward and backward
    elementwise: Collection[str] = ()  # matrices that AdamW takes all the same

    @property
    def num_params(self) -> int:
        """Return the number of all parameters."""
        return sum(math.prod(s) for s in self.shapes.values())

    def matrices(self) -> dict[str, Matrix]:
        """Return what Newton-Schulz takes, as FSDP2 cuts it: along rows."""
        if not REGISTRY[self.mars_type].matrix_only:
            return {}
        return {n: Matrix(s[0], s[1], 0) for n, s in self.ruled().items()}

    def ruled(self) -> dict[str, Sequence[int]]:
        """Return the shapes of what takes ``mars_type``; AdamW has the rest, unless
        the rule takes everything.
        """
        if REGISTRY[self.mars_type].others == "itself":
            return dict(self.shapes)
        return {
            name: shape
            for name, shape in self.shapes.items()
            if len(shape) == 2 and name not in self.elementwise
        }


@dataclass(frozen=True)
class Hardware:
    """What the times assume."""

    machine: Machine = Machine()  # links and Newton-Schulz rates
    memory: float = 3e12  # bytes a second that one rank reads and writes
    utilization: float = 0.4  # of machine.flops, by forward and backward


@dataclass(frozen=True)
class Forecast:
    """Of one step on the slowest rank."""

    plan: Plan
    cost: Cost
    num_shards: int
    state_bytes: float
    peak_bytes: float
    optimizer_seconds: float
    training_seconds: float

    @property
    def share(self) -> float:
        """Return the optimizer's part of the whole step."""
        return self.optimizer_seconds / (self.optimizer_seconds + self.training_seconds)


def forecast(
    job: Job,
    num_ranks: int,
    *,
    replicas: int = 1,
    ns: NewtonSchulz = NewtonSchulz(),
    hardware: Hardware = Hardware(),
) -> Forecast:
    """Return the step of ``job`` on ``num_ranks``, shared equally by the replicas.

    Raises:
        ValueError: ranks that do not divide among replicas.
    """
    if num_ranks < 1 or replicas < 1 or num_ranks % replicas:
        raise ValueError(
            f"got {num_ranks} ranks and {replicas} replicas, expected a positive "
            "number of ranks that the replicas divide: change one of the two"
        )
    p, n, machine = num_ranks // replicas, job.num_params, hardware.machine
    matrices = list(job.matrices().values())
    chosen = plan(matrices, p, ns, replicas=replicas, machine=machine)
    spent = cost(matrices, chosen, ns, machine)
    owned = sum(m.rows * m.cols for m in matrices)
    ruled = sum(math.prod(s) for s in job.ruled().values())
    kept, by_adamw = (REGISTRY[t].num_buffers() for t in (job.mars_type, "adamw"))
    state = 4 * (kept * ruled + by_adamw * (n - ruled)) / p  # in float32
    # shards under way and factors in float32; then what the fullest owner holds at
    # once: its matrices as they came and joined, and three times in the iteration
    under_way = (ns.payload().itemsize + ns.dtype.itemsize + 4) * owned / p
    held: dict[int, int] = {}
    for m, owner in zip(matrices, chosen.owners, strict=True):
        if owner >= 0:
            held[owner] = held.get(owner, 0) + m.rows * m.cols
    each = 2 * ns.payload().itemsize + 3 * ns.dtype.itemsize
    iterating = each * max(held.values(), default=0)
    # FSDP2: parameters gathered for forward and for backward, gradients scattered
    fsdp = (2 + 2 + 4) * n * (p - 1) / p / machine.link
    compute = job.flops_per_token * job.tokens / num_ranks
    return Forecast(
        plan=chosen,
        cost=spent,
        num_shards=p,
        state_bytes=state,
        peak_bytes=state + 8 * n / p + under_way + iterating,
        optimizer_seconds=spent.seconds + ELEMENTWISE_BYTES * n / p / hardware.memory,
        # communication hides behind computing, or the other way round
        training_seconds=max(fsdp, compute / (machine.flops * hardware.utilization)),
    )


def table(job: Job, found: Forecast, every: bool) -> str:
    """Return each matrix's strategy and owner, and the totals."""
    kinds, lines = Counter(), []
    for (name, m), s, owner in zip(
        job.matrices().items(), found.plan.strategies, found.plan.owners, strict=True
    ):
        what = f"{m.rows:6} x {m.cols:<6} {s}"
        kinds[what] += 1
        if every:
            who = f"rank {owner}" if s == "owner" else "every rank"
            lines.append(f"{name:32} {what:26} {who}")
    if not every:
        lines = [f"{count:4} x {what}" for what, count in kinds.items()]
    mega, giga = 1e6, 2**30
    flops = found.cost.owner_flops
    mean = sum(flops) / len(flops) / 1e12
    lines += [
        f"sent per rank and step     {found.cost.bytes_sent / mega:10.1f} MB "
        f"(most: {found.cost.bytes_max / mega:.1f} MB, by an owner)",
        f"owner FLOPs, mean and max  {mean:10.3f} {max(flops) / 1e12:.3f} TFLOP "
        f"(imbalance {found.cost.imbalance:.3f})",
        f"optimizer state per GPU    {found.state_bytes / giga:10.2f} GiB",
        f"peak memory per GPU        {found.peak_bytes / giga:10.2f} GiB "
        "(estimate: parameters, gradients, state, exchange; no activations)",
        f"optimizer step, predicted  {found.optimizer_seconds * 1e3:10.2f} ms",
        f"training step, predicted   {found.training_seconds * 1e3:10.2f} ms "
        f"(optimizer's share of both {found.share:.1%})",
    ]
    return "\n".join(lines)


def sweep(job: Job, hardware: Hardware, replicas: int) -> list[tuple[int, Forecast]]:
    """Return forecasts for 1 to 4096 ranks."""
    ranks = [n * replicas for n in SWEEP if n * replicas <= SWEEP[-1]]
    return [(n, forecast(job, n, replicas=replicas, hardware=hardware)) for n in ranks]


def sweep_table(rows: list[tuple[int, Forecast]]) -> str:
    """Return one line per number of ranks."""
    lines = [
        " ranks  owner  gram   MB sent    most  max TFLOP  imbalance  state GiB"
        "  optimizer ms  training ms  share"
    ]
    for n, f in rows:
        kinds = Counter(f.plan.strategies)
        lines.append(
            f"{n:6} {kinds['owner']:6} {kinds['gram']:5} {f.cost.bytes_sent / 1e6:9.1f}"
            f" {f.cost.bytes_max / 1e6:7.1f}"
            f" {max(f.cost.owner_flops) / 1e12:10.3f} {f.cost.imbalance:10.3f}"
            f" {f.state_bytes / 2**30:10.2f} {f.optimizer_seconds * 1e3:13.2f}"
            f" {f.training_seconds * 1e3:12.2f} {f.share:6.1%}"
        )
    return "\n".join(lines)
