"""Bytes of one rank under FSDP2: what it keeps between steps, and what a step of the
optimizer holds at most on a GPU.

Parameters, gradients and state are float32 and cut along rows; counted is the first
rank, which has most. One rank alone has plain parameters, without FSDP2. Activations
are not in it, nor what FSDP gathers for forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from marsopt import NewtonSchulz
from marsopt.optim.state_dict import kept_buffers
from marsopt.rules.algorithm import Algorithm

from .ledger import FULL, Ledger, iterate_all, over_ranks
from .planner import Matrix, Plan

Shape = Sequence[int]
PARAMETER = torch.empty(0, device="meta")  # of their dtype


@dataclass(frozen=True)
class Stack:
    """Tensors of one shape that one algorithm moves together."""

    algorithm: Algorithm
    shape: Shape
    num: int
    num_ranks: int

    @property
    def local(self) -> tuple[int, ...]:
        """Return the first rank's piece of a tensor, as Shard(0) cuts."""
        first, *rest = self.shape
        return (-(-first // self.num_ranks), *rest)

    @property
    def numel(self) -> int:
        """Return the first rank's elements of all tensors."""
        return self.num * math.prod(self.local)

    @property
    def nbytes(self) -> int:
        """Return those of the parameters, or of anything like them."""
        return FULL * self.numel

    @property
    def state_bytes(self) -> int:
        """Return what the optimizer keeps; exact MARS keeps two references."""
        algorithm, local = self.algorithm, self.local
        sizes = {}
        for symbol in kept_buffers(algorithm):
            dims = local[: len(local) - algorithm.num_missing(symbol, local)]
            itemsize = algorithm.dtype_of(symbol, PARAMETER).itemsize
            sizes[symbol] = itemsize * self.num * math.prod(dims)
        following = sizes["h"] if algorithm.reads_h and not algorithm.keeps_h else 0
        return sum(sizes.values()) + following

    @property
    def packed_bytes(self) -> int:
        """Return what a step copies into stacks of its own."""
        return self.num_packed * self.nbytes

    @property
    def num_packed(self) -> int:
        """Return how many tensors of each parameter are copied: its gradient, which
        autograd leaves apart, and its shard, which FSDP holds. A parameter that nobody
        shards has moved into its stack once and for all.
        """
        if self.num == 1:
            return 0
        return 1 if self.num_ranks == 1 else 2


def stacks(
    shapes: Mapping[str, Shape], algorithms: Mapping[str, Algorithm], num_ranks: int
) -> list[Stack]:
    """Return the stacks of a model, as the optimizer makes them."""
    found: dict[tuple, int] = {}
    for name, shape in shapes.items():
        key = (algorithms[name], tuple(shape))
        found[key] = found.get(key, 0) + 1
    return [Stack(*key, num, num_ranks) for key, num in found.items()]


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that holds most."""

    parameters: int
    gradients: int
    state: int
    step: int  # beyond these, at most, while the optimizer steps

    @property
    def peak(self) -> int:
        """Return all of it."""
        return self.parameters + self.gradients + self.state + self.step


def memory(
    found: Sequence[Stack], matrices: Sequence[Matrix], plan: Plan, ns: NewtonSchulz
) -> Memory:
    """Return the bytes of the fullest rank of a ``plan`` for these ``matrices``."""
    parameters = sum(stack.nbytes for stack in found)
    # the matrix that is orthogonalized, where it is not the momentum itself
    made = sum(stack.nbytes for stack in found if stack.algorithm.makes_matrix)
    step = sum(stack.packed_bytes for stack in found) + made
    if matrices:
        step += _orthogonalizing(found, matrices, plan, ns)
    return Memory(
        parameters=parameters,
        gradients=parameters,
        state=sum(stack.state_bytes for stack in found),
        step=step,
    )


def _orthogonalizing(
    found: Sequence[Stack], matrices: Sequence[Matrix], plan: Plan, ns: NewtonSchulz
) -> int:
    """Return what Newton-Schulz holds at most on any rank."""
    if plan.num_ranks * plan.replicas == 1:
        ledger = Ledger()
        iterate_all(ledger, ((m.rows, m.cols) for m in matrices), FULL, ns)
        return ledger.most
    ranks = {divmod(owner, plan.num_ranks) for owner in plan.owners if owner >= 0}
    # factors come one by one, and are joined into stacks
    joined = sum(s.nbytes for s in found if s.algorithm.matrix_only and s.num > 1)
    most = 0
    for replica, rank in ranks or {(0, 0)}:
        ledger = Ledger()
        over_ranks(ledger, matrices, plan, replica, rank, ns)
        ledger.take(joined)
        most = max(most, ledger.most)
    return most
