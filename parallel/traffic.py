"""Bytes that a step of the optimizer moves in a rank's memory, and sends beside what
Newton-Schulz does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from marsopt.profiling.optimizer import full_buffers, passes

from .agreement import Agreement
from .ledger import FULL
from .memory import Stack
from .planner import Plan

NUM_SUMS = 4  # of every tensor: <g,g>, <g,h>, <h,h>, and who has a gradient
NUM_NORMS = 2  # of every matrix whose rows are scaled


def moved(stack: Stack) -> int:
    """Return the bytes that elementwise passes over a stack read and write: norms,
    update, application, and the way into stacks and back; Newton-Schulz not.
    """
    algorithm, one = stack.algorithm, stack.nbytes
    h, buffers = one if algorithm.reads_h else 0, len(full_buffers(algorithm)) * one
    norms, update = passes(algorithm, g=one, x=one, h=h, m=one, buffers=buffers)
    # gradients are packed; shards of parameters go there and back
    packed = (0, 2, 6)[stack.num_packed] * one
    return norms + update + packed + _protocol(stack)


def _protocol(stack: Stack) -> int:
    """Return what exact MARS moves beside a step: the norm of the next gradient, its
    copy, and the copy of that into h.
    """
    return 5 * stack.nbytes if _is_exact(stack) else 0


def _is_exact(stack: Stack) -> bool:
    return stack.algorithm.reads_h and not stack.algorithm.keeps_h


def _scales_rows(stack: Stack) -> bool:
    page = stack.algorithm.preconditioner
    return page.matrix_only and page.scales_rows


def reductions(stacks: Sequence[Stack], num_shards: int) -> list[int]:
    """Return the bytes of each all-reduce over shards but that of Gram matrices: of all
    norms, with the rows by which ranks compare hyperparameters; with exact MARS of the
    next gradient's norms, for ``max_norm``; of the norms by which NorMuon rescales.
    """
    if num_shards == 1:
        return []
    parts = sum(s.num * s.algorithm.num_clipped(torch.Size(s.shape)) for s in stacks)
    told = Agreement().rows("", num_shards, torch.empty(0, NUM_SUMS))
    found = [NUM_SUMS * parts + told.numel()]
    if any(map(_is_exact, stacks)):
        found.append(sum(s.num for s in stacks))
    if any(map(_scales_rows, stacks)):
        found.append(NUM_NORMS * sum(s.num for s in stacks if _scales_rows(s)))
    return [FULL * num for num in found]


def sent(stacks: Sequence[Stack], num_shards: int) -> float:
    """Return the bytes that a rank sends for these, by ring all-reduces."""
    return 2 * (num_shards - 1) / num_shards * sum(reductions(stacks, num_shards))


def collectives(stacks: Sequence[Stack], plan: Plan) -> dict[str, int]:
    """Return how many collectives a step after the first calls, by kind."""
    gram = bool(plan.members("gram"))
    buckets = max(len(plan.exchanges(r)) for r in range(plan.replicas))
    return {
        "all-reduce": len(reductions(stacks, plan.num_ranks)) + gram,
        "all-to-all": 2 * buckets,
        "all-gather": int(plan.replicas > 1 and buckets > 0),
    }
