"""What the one step is given, stacks of tensors with their hyperparameters, and what it
decides about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt.rules.algorithm import Algorithm
from marsopt.rules.checks import Number
from marsopt.rules.matrices import MatrixRows


class Stack(NamedTuple):
    """L tensors of one shape that take one algorithm, as (L, *shape) tensors of local
    pieces. A graph is as large as its number of stacks, whatever L.
    """

    algorithm: Algorithm
    x: Tensor
    g: Tensor
    buffers: dict[str, Tensor]  # by symbol, those at home in shards
    shape: torch.Size  # of one whole tensor
    # to which matrices rows belong, where parts of a tensor have a norm of their own
    rows: MatrixRows | None = None
    # where noise is needed: what lies here, as ``Collectives.cuts`` says
    cuts: Mapping[int, Tensor] = {}
    given: Mapping[str, Tensor] = {}  # operands in place of buffers of the same symbol

    @property
    def operands(self) -> list[Tensor]:
        """Return what c is made of beside the gradient."""
        found = {**self.buffers, **self.given}
        return [found[symbol] for symbol in self.algorithm.operands]

    @property
    def num_tensors(self) -> int:
        return self.x.shape[0]

    @property
    def num_clipped(self) -> int:
        """Return how many parts of each tensor have a norm of their own."""
        return self.algorithm.num_clipped(self.shape)

    @property
    def matrix_shape(self) -> torch.Size:
        """Return that of a whole matrix."""
        return self.algorithm.matrices.shape_in(self.shape)

    @property
    def num_row_dims(self) -> int:
        """Return how many dims of the stack, its first ones, count rows."""
        return 1 + self.algorithm.matrices.column_dim(len(self.shape))


class Members(NamedTuple):
    """The tensors of one stack as their owner holds them (DTensors too)."""

    leaves: Sequence[Tensor]
    # of each, its buffers that live where whole matrices do, (number here, *shape), in
    # the order of ``MatrixPreconditioner.owned``
    owned: Sequence[tuple[Tensor, ...]] = ()


class Hyperparameters(NamedTuple):
    """One algorithm with its rates in one step, for N tensors."""

    algorithm: Algorithm
    lr: Number
    gamma: Number
    t: Tensor  # (N,) steps that each tensor has taken
    dtypes: tuple[torch.dtype, ...]  # working dtypes of its stacks, each once
    # (N, num_behind) numbers of the last step, from which x follows; None: it is kept
    behind: Tensor | None = None
    # of each stack: its tensors, and the parts of each that have a norm of their own;
    # None: one part each (a graph would guard every number)
    parts: tuple[tuple[int, int], ...] | None = None
    # lr, where it is a tensor that the host does not read: a step looks into it
    unread_lr: Tensor | None = None

    @property
    def num_parts(self) -> int:
        """Return how many parts all N tensors have."""
        if self.parts is None:
            return len(self.t)
        return sum(num * clipped for num, clipped in self.parts)

    def per_tensor(self, values: Tensor) -> Tensor:
        """Return (N,) what the first part of every tensor has of ``values``."""
        if self.parts is None:
            return values
        cuts = values.split([num * clipped for num, clipped in self.parts])
        pairs = zip(cuts, self.parts, strict=True)
        return torch.cat([cut.view(parts)[:, 0] for cut, parts in pairs])


def norms_per_tensor(
    parts: Sequence[tuple[int, int]],
) -> tuple[tuple[int, int], ...] | None:
    """Return ``Hyperparameters.parts`` of these stacks."""
    return tuple(parts) if any(clipped > 1 for _, clipped in parts) else None


class RuleGroup(NamedTuple):
    """The stacks that one algorithm moves with one set of hyperparameters."""

    hyper: Hyperparameters
    stacks: Sequence[Stack]
    # steps that were taken before this one, as the host counts them
    count: int = 0


class StepScalars(NamedTuple):
    """Scalars of a step (clip factors, rates, bias corrections): vectors over the N
    tensors of a group or the L of a stack, or 0-D where all have the same. Weights are
    over parts that are clipped; of a stack of such tensors, all are over rows (L, ...,
    rows).
    """

    ok: Tensor  # bool: the step is finite and the tensor has a gradient
    grad_clip: Tensor  # factor of the global clip, with which a gradient is kept
    # c = weights[0] * gradient + weights[1] * first operand + ...
    weights: tuple[Tensor, ...]
    # by how many displacements y is ahead of x; None: parameters are x
    extrapolation: Tensor | None
    # numbers of the last step that lead from the parameters to x; None: x is there
    behind: tuple[Tensor, ...] | None
    rule: tuple[Tensor, ...]  # the preconditioner's: rates and bias corrections
    # of the noise in this step, int64; None: nothing is rounded stochastically
    key: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> StepScalars:
        """Return ``function`` of every vector."""
        k, behind, key = self.extrapolation, self.behind, self.key
        return StepScalars(
            ok=function(self.ok),
            grad_clip=function(self.grad_clip),
            weights=tuple(map(function, self.weights)),
            extrapolation=None if k is None else function(k),
            behind=None if behind is None else tuple(map(function, behind)),
            rule=tuple(map(function, self.rule)),
            key=None if key is None else function(key),
        )

    def per_stack(self, stacks: Sequence[Stack]) -> list[StepScalars]:
        """Return them for consecutive stacks."""
        clipped = [stack.num_clipped for stack in stacks]

        def cut(vector: Tensor, *, per_part: bool = False) -> Sequence[Tensor]:
            return _of_stacks(vector, stacks, clipped, per_part=per_part)

        def or_none(vector: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * len(stacks) if vector is None else cut(vector)

        def each(vectors: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
            found = zip(*map(cut, vectors), strict=True)
            return found if vectors else [()] * len(stacks)

        columns = zip(
            cut(self.ok),
            cut(self.grad_clip),
            zip(*(cut(v, per_part=True) for v in self.weights), strict=True),
            or_none(self.extrapolation),
            [None] * len(stacks) if self.behind is None else each(self.behind),
            each(self.rule),
            or_none(self.key),
            strict=True,
        )
        return [StepScalars(*own) for own in columns]

    def broadcast_to(self, x: Tensor) -> StepScalars:
        """Return them as factors of a stack ``x``."""
        return self.map(lambda v: factor(v, x))


def factor(numbers: Tensor, x: Tensor) -> Tensor:
    """Return numbers over the first dims of ``x``, or one, as a factor of it."""
    return numbers.view(*numbers.shape, *(1 for _ in range(x.ndim - numbers.ndim)))


def _of_stacks(
    vector: Tensor, stacks: Sequence[Stack], clipped: Sequence[int], *, per_part: bool
) -> Sequence[Tensor]:
    """Return what consecutive stacks have of a vector over tensors, or over the parts
    that are clipped (of each tensor of a stack so many): a number for each tensor, or
    for each row where a tensor has several parts. One loop then moves all of such a
    stack, where inductor would make one over rows and others over elements. A number
    that all have stays as it is.
    """
    if vector.ndim == 0:
        return [vector] * len(stacks)
    nums = zip(stacks, clipped, strict=True)
    sizes = [s.num_tensors * (parts if per_part else 1) for s, parts in nums]
    found: Sequence[Tensor] = vector.split(sizes)
    if max(clipped) == 1:
        return found
    return [
        v
        if parts == 1
        else s.rows.spread(
            v.view(s.num_tensors, -1).expand(-1, parts), s.x.shape[: s.num_row_dims]
        )
        for v, s, parts in zip(found, stacks, clipped, strict=True)
    ]


class Decision(NamedTuple):
    """What a step decides from all gradient statistics."""

    grad_norm: Tensor  # 0-D, global norm of the gradient before any clip
    finite: Tensor  # 0-D bool; False means that nothing changes
    t: list[Tensor]  # (N,) of every group, after the step
    behind: list[Tensor | None]  # as in ``Hyperparameters``, after the step
    ok: list[Tensor]  # (N,) bool of every group: which tensors move
    # of every group, in each dtype that one of its stacks is computed in: a wider one
    # would widen the products
    scalars: list[dict[torch.dtype, StepScalars]]


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Scalars are float64, since 1 - beta^t cancels; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64
