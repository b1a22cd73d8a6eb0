"""What a sharded step will send, compute, hold and take: arithmetic, no process.

Bytes and FLOPs are counted, and checked against the code; times are a model
(docs/scaling.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import marsopt
from marsopt import NewtonSchulz
from marsopt.rules.algorithm import Algorithm

from . import traffic
from .memory import Memory, memory, stacks
from .planner import Cost, Machine, Matrix, Plan, cost, plan


@dataclass(frozen=True)
class Job:
    """A model and how it is trained."""

    shapes: Mapping[str, Sequence[int]]  # of all parameters, by name
    mars_type: str  # the rule of its matrices
    tokens: int  # per step, over all ranks
    flops_per_token: int  # of forward and backward
    elementwise: Collection[str] = ()  # matrices that AdamW takes all the same
    # arguments of ``marsopt.mars``: correction, clip and amsgrad say what is kept
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_params(self) -> int:
        """Return the number of all parameters."""
        return sum(math.prod(s) for s in self.shapes.values())

    @property
    def rule(self) -> str:
        """Return the rule's name, its correction at its end."""
        kind = self.options.get("correction") or "approximate"
        return self.mars_type if kind == "approximate" else f"{self.mars_type}-{kind}"

    @property
    def num_gradients(self) -> int:
        """Return how many gradients a step wants: exact MARS two."""
        is_exact = self.options.get("correction") == "exact"
        return 1 + (is_exact and marsopt.REGISTRY[self.mars_type].is_mars)

    @cached_property
    def algorithms(self) -> dict[str, Algorithm]:
        """Return who moves each parameter, as ``MARS`` routes them."""
        rule = marsopt.mars(**{**self.options, "mars_type": self.mars_type})
        beside = dict(mars_type="adamw", optimize_1d=False)
        adamw = marsopt.mars(**{**self.options, **beside}).matrix

        def of(name: str, shape: Sequence[int]) -> Algorithm:
            if rule.rest is not None and len(shape) != 2:
                return rule.rest
            return adamw if name in self.elementwise else rule.matrix

        return {name: of(name, shape) for name, shape in self.shapes.items()}

    def matrices(self) -> dict[str, Matrix]:
        """Return what Newton-Schulz takes, as FSDP2 cuts it: along rows."""
        return {
            name: Matrix(*self.shapes[name], 0)
            for name, algorithm in self.algorithms.items()
            if algorithm.matrix_only
        }


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
    num_shards: int
    memory: Memory
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
            f"got {num_ranks} rank{'s' * (num_ranks != 1)} and {replicas} "
            f"replica{'s' * (replicas != 1)}, expected a positive number of ranks that "
            "the replicas divide: change one of the two"
        )
    p, machine = num_ranks // replicas, hardware.machine
    matrices = list(job.matrices().values())
    # without shards every replica iterates by itself
    shared = replicas if p > 1 else 1
    chosen = plan(matrices, p, ns, replicas=shared, machine=machine)
    spent = cost(matrices, chosen, ns, machine)
    tensors = stacks(job.shapes, job.algorithms, p)
    norms, moved = traffic.sent(tensors, p), sum(map(traffic.moved, tensors))
    return Forecast(
        plan=chosen,
        cost=spent,
        num_shards=p,
        memory=memory(tensors, matrices, chosen, ns),
        moved_bytes=moved,
        sent_bytes=spent.bytes_sent + norms,
        most_sent_bytes=spent.bytes_max + norms,
        collectives=traffic.collectives(tensors, chosen),
        optimizer_seconds=spent.seconds
        + norms / machine.link
        + moved / hardware.memory,
        training_seconds=_training_seconds(job, num_ranks, p, hardware),
    )


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
