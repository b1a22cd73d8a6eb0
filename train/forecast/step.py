"""The bytes that ranks of FSDP2 or HSDP keep and send in a step, and their FLOPs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import marsopt
from marsopt import Algorithm, Rule
from marsopt.parallel.layout import Matrix
from marsopt.parallel.planner import Members, plan
from marsopt.rules.component import MatrixCost
from train.forecast.models import Job

# options that change AdamW's state
OF_ADAMW = ("amsgrad", "state_dtype", "stochastic_rounding", "master_weight_bits")


@dataclass(frozen=True)
class Forecast:
    """One step of the optimizer.

    Args:
        parameters: bytes on the rank that has most; gradients take as many.
        state: bytes that the optimizer keeps on the rank that has most.
        sent: bytes of matrices that a rank sends, mean over the ranks.
        most_sent: the same of the rank that sends most.
        flops: of Newton-Schulz, or of SOAP, on each rank.
    """

    parameters: int
    state: int
    sent: float
    most_sent: float
    flops: list[float]


def forecast(job: Job, num_ranks: int, *, replicas: int = 1) -> Forecast:
    """Return the step of ``job`` on ``num_ranks``, shared equally by the replicas.

    Of a matrix of N elements a rank of p sends N s/p to its owner, and the owner sends
    N s (p - 1)/p back (s: bytes of an element). R replicas that share the work send
    1/R of it each, and the results among themselves: N s (R - 1)/(R p).

    Raises:
        ValueError: ranks that do not divide among the replicas.
    """
    if num_ranks < 1 or replicas < 1 or num_ranks % replicas:
        raise ValueError(
            f"got {num_ranks} ranks and {replicas} replicas, expected a positive "
            "number of ranks that the replicas divide: change one of the two"
        )
    p = num_ranks // replicas
    rule, matrices = _rule(job), job.matrices()
    state = _state(job, rule)
    # Without shards every replica iterates by itself.
    shared = replicas if p > 1 else 1
    sent, extra = 0.0, [0.0]
    flops, owned = Counter({0: 0}), Counter({0: 0})
    if matrices:
        cost = rule.matrix.matrix_preconditioner.cost.on("cuda")
        there, back = cost.payload().itemsize, cost.returned().itemsize
        buckets = planned([*matrices.values()], p * shared, cost)
        owners = dict[int, int]()
        for bucket in buckets:
            for owner, members in enumerate(bucket):
                owners |= dict.fromkeys(members, owner)
        extra = [0.0] * (p * shared)
        flops.update(dict.fromkeys(range(p * shared), 0))
        for i, (name, matrix) in enumerate(matrices.items()):
            numel, owner = matrix.rows * matrix.cols, owners[i]
            flops[owner] += cost.num_flops(matrix.rows, matrix.cols)
            owned[owner] += state["owner"][name]
            if p > 1:
                local = math.prod(matrix.shards(p)[owner % p])
                sent += (there / shared + back * (shared - 1) / shared) * numel / p
                extra[owner] += back * (numel - local) - there * local
    shards = {name: _largest_shard(shape, p) for name, shape in job.shapes.items()}
    return Forecast(
        parameters=job.dtype.itemsize * sum(shards.values()),
        state=max(owned.values())
        + sum(
            num_bytes * shards[name] // math.prod(job.shapes[name])
            for name, num_bytes in state["shard"].items()
        ),
        sent=sent + sum(extra) / len(extra),
        most_sent=sent + max(extra),
        flops=[*flops.values()],
    )


def planned(
    matrices: Sequence[Matrix], num_owners: int, work: MatrixCost
) -> list[Members]:
    """Return the matrices of each owner, bucket by bucket, as a mesh plans them."""
    sent = work.payload().itemsize / num_owners
    return plan(work, [m.shape for m in matrices], num_owners, sent)


def _largest_shard(shape: Sequence[int], num_ranks: int) -> int:
    """Return the elements of the first rank's shard: no other has more."""
    num_rows, *rest = shape
    return math.ceil(num_rows / num_ranks) * math.prod(rest)


def _rule(job: Job) -> Rule:
    return marsopt.mars(**{**job.options, "mars_type": job.mars_type})


def _state(job: Job, rule: Rule) -> dict[str, Counter[str]]:
    """Return the bytes of each parameter's state in its shards, and with its owner."""
    options = {n: job.options[n] for n in OF_ADAMW if n in job.options}
    adamw = marsopt.rule("adamw", **options).matrix
    params: dict[Algorithm, dict[str, Tensor]] = {}
    for name, shape in job.shapes.items():
        is_rest = rule.rest is not None and len(shape) != 2
        algorithm = rule.rest if is_rest else rule.matrix
        algorithm = adamw if name in job.elementwise else algorithm
        tensors = params.setdefault(algorithm, {})
        tensors[name] = torch.empty(tuple(shape), dtype=job.dtype, device="meta")
    num_bytes: dict[str, Counter[str]] = {"shard": Counter(), "owner": Counter()}
    for algorithm, tensors in params.items():
        for symbol, buffer in Rule(matrix=algorithm).init(tensors).buffers.items():
            home = num_bytes[algorithm.kept[symbol].home]
            home.update({name: x.nbytes for name, x in buffer.items()})
        if algorithm.h_from == "caller":
            # the class keeps h, and a copy of the next batch's gradient
            h = algorithm.buffers["h"]
            for name, x in tensors.items():
                size = algorithm.dtype_of(h, x).itemsize
                num_bytes["shard"][name] += 2 * x.numel() * size
    return num_bytes
