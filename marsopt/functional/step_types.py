"""What the one step is given, stacks of tensors with their hyperparameters, and what it
decides about them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from marsopt.rules.algorithm import Algorithm
from marsopt.rules.checks import Number
from marsopt.rules.matrices import MatrixRows
from marsopt.rules.registry import BUILT_IN
from marsopt.rules.rounding import HALF

FORMULAS: MutableMapping[Algorithm, Formula] = WeakKeyDictionary()
SHARED: MutableMapping[Hashable, Formula] = WeakValueDictionary()


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

    def flat(self) -> tuple[StackForm, list[Tensor]]:
        """Return its tensors, and all else: ``StackForm.stack`` joins the two."""
        tensors = [self.x, self.g, *self.buffers.values()]
        tensors += self.given.values()
        tensors += self.cuts.values()
        rows = self.rows
        if rows is not None and rows.index is not None:
            tensors.append(rows.index)
        form = StackForm(
            formula(self.algorithm),
            self.shape,
            tuple(self.buffers),
            tuple(self.given),
            tuple(self.cuts),
            None if rows is None else (rows.num, rows.rows, rows.index is not None),
        )
        return form, tensors


class Formula:
    """What is alike of algorithms that differ in the values of their hyperparameters
    alone: one graph moves the stacks of them all, by the numbers of each. Compared and
    hashed by identity.

    Args:
        algorithm: one of them, to be asked for formulas.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm


class StackForm(NamedTuple):
    """What a graph knows of a stack beside its tensors."""

    formula: Formula
    shape: torch.Size
    buffers: tuple[str, ...]
    given: tuple[str, ...]
    cuts: tuple[int, ...]
    rows: tuple[int, int, bool] | None  # of ``MatrixRows``; whether it has an index

    def stack(self, tensors: Iterator[Tensor]) -> Stack:
        """Return the stack of the next ``tensors``, in the order of ``Stack.flat``."""
        x, g = next(tensors), next(tensors)
        buffers = {symbol: next(tensors) for symbol in self.buffers}
        given = {symbol: next(tensors) for symbol in self.given}
        cuts = {dim: next(tensors) for dim in self.cuts}
        rows = None
        if self.rows is not None:
            num, num_rows, has_index = self.rows
            rows = MatrixRows(num, num_rows, next(tensors) if has_index else None)
        algorithm = self.formula.algorithm
        return Stack(algorithm, x, g, buffers, self.shape, rows, cuts, given)


def formula(algorithm: Algorithm) -> Formula:
    """Return the formula of an algorithm. One with a component of somebody else's,
    which may read its own fields in a graph, shares its formula with none.
    """
    found = FORMULAS.get(algorithm)
    if found is None:
        parts = algorithm.preconditioner, algorithm.correction
        found = Formula(replace(algorithm))  # a weak key is not to hold itself
        if {type(part) for part in parts} <= BUILT_IN:
            of_state = algorithm.state_dtype, algorithm.stochastic_rounding
            key = (*map(_structure, parts), *of_state, algorithm.matrices)
            found = SHARED.setdefault(key, found)
        FORMULAS[algorithm] = found
    return found


def _structure(component: object) -> Hashable:
    """Return a component's type, its structure, and which of its numbers are None."""
    if component is None:
        return None
    values = [(f, getattr(component, f.name)) for f in fields(component)]
    return type(component), *(
        value is None if f.metadata.get("number") else value for f, value in values
    )


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

    def flat(self) -> tuple[HyperparametersForm, list[Tensor]]:
        """Return the tensors among them, and all else."""
        tensors = [self.lr, self.gamma, self.t]
        tensors += [] if self.behind is None else [self.behind]
        is_read, has_behind = self.unread_lr is None, self.behind is not None
        form = HyperparametersForm(
            self.algorithm, self.dtypes, has_behind, self.parts, is_read
        )
        return form, tensors

    @property
    def num_parts(self) -> int:
        """Return how many parts all N tensors have."""
        if self.parts is None:
            return len(self.t)
        return sum(num * clipped for num, clipped in self.parts)

    def per_tensor(self, values: Tensor) -> Tensor:
        """Return (N,) what the first part of every tensor has of ``values`` (P,)."""
        if self.parts is None:
            return values
        cuts = values.split([num * clipped for num, clipped in self.parts])
        pairs = zip(cuts, self.parts, strict=True)
        return torch.cat([cut.view(parts)[:, 0] for cut, parts in pairs])

    def per_part(self, values: Tensor) -> Tensor:
        """Return (P,) what every part has of ``values``: 0-D, (N,) or (P,)."""
        if values.ndim == 0 or len(values) == self.num_parts:
            return values.expand(self.num_parts)
        cuts = values.split([num for num, _ in self.parts])
        pairs = zip(cuts, self.parts, strict=True)
        return torch.cat([cut.repeat_interleave(num) for cut, (_, num) in pairs])


class HyperparametersForm(NamedTuple):
    """What a graph knows of hyperparameters beside the tensors that change."""

    algorithm: Algorithm
    dtypes: tuple[torch.dtype, ...]
    has_behind: bool
    parts: tuple[tuple[int, int], ...] | None
    is_read: bool  # the learning rate, by the host

    def hyperparameters(self, tensors: Iterator[Tensor]) -> Hyperparameters:
        """Return those of the next ``tensors``, in the order of
        ``Hyperparameters.flat``.
        """
        lr, gamma, t = next(tensors), next(tensors), next(tensors)
        return Hyperparameters(
            self.algorithm,
            lr,
            gamma,
            t,
            self.dtypes,
            next(tensors) if self.has_behind else None,
            self.parts,
            None if self.is_read else lr,
        )


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
    """Scalars of a step (clip factors, rates, bias corrections), for each tensor of a
    stack, or each row where parts of a tensor are clipped by themselves; as factors of
    one of its tensors.
    """

    ok: Tensor  # bool: the step is finite and the tensor has a gradient
    grad_clip: Tensor  # factor of the global clip, with which a gradient is kept
    # c = weights[0] * gradient + weights[1] * first operand + ...
    weights: tuple[Tensor, ...]
    # by how many displacements y is ahead of x; None: parameters are x
    extrapolation: Tensor | None
    # numbers of the last step that lead from the parameters to x; None: x is there
    behind: tuple[Tensor, ...] | None
    # of the noise in this step, int64; None: nothing is rounded stochastically
    key: Tensor | None
    rule: tuple[Tensor, ...]  # the preconditioner's: rates and bias corrections

    def table(self, hyper: Hyperparameters) -> Tensor:
        """Return all but ``ok`` as floating point (P, K), a row for each part."""
        columns = [self.grad_clip, *self.weights]
        columns += [] if self.extrapolation is None else [self.extrapolation]
        columns += self.behind or ()
        if self.key is not None:  # 16 bits are exact in every dtype
            halves = self.key >> 16, self.key & HALF
            columns += [half.to(self.grad_clip.dtype) for half in halves]
        columns += self.rule
        columns = [hyper.per_part(column)[:, None] for column in columns]
        if not torch.compiler.is_compiling():
            return torch.cat(columns, 1)
        # inductor copies what it concatenates, column by column: a launch each
        place = torch.arange(len(columns), device=self.ok.device)
        table = columns[0]
        for i, column in enumerate(columns):
            table = torch.where(place == i, column, table)
        return table

    @classmethod
    def of(cls, numbers: Numbers, stack: Stack, like: Tensor) -> StepScalars:
        """Return what the numbers of a stack say, as factors of ``like``, a tensor (L,
        ...) that belongs to it.
        """
        algorithm = stack.algorithm
        ok, table = numbers  # a plain pair in a graph
        columns = [ok, *table.unbind(1)]
        if stack.num_clipped > 1:
            rows = stack.x.shape[: stack.num_row_dims]
            parts = [column.view(stack.num_tensors, -1) for column in columns]
            columns = [stack.rows.spread(column, rows) for column in parts]
        columns = [factor(column, like) for column in columns]
        num_behind, first = algorithm.num_behind, 3 + len(algorithm.operands)
        (ok, grad_clip, *weights), rest = columns[:first], columns[first:]
        extrapolation = behind = key = None
        if num_behind:
            behind, rest = tuple(rest[:num_behind]), rest[num_behind:]
        elif algorithm.is_ahead:
            extrapolation, *rest = rest
        if algorithm.stochastic_rounding:
            high, low, *rest = rest
            key = (high.to(torch.int64) << 16) | low.to(torch.int64)
        return cls(
            ok, grad_clip, tuple(weights), extrapolation, behind, key, tuple(rest)
        )


class Numbers(NamedTuple):
    """The scalars of a step for the parts of a stack's tensors."""

    ok: Tensor  # (parts,) bool, of its own: a GPU loads y behind this flag, widely
    table: Tensor  # (parts, K): ``StepScalars.table``


def factor(numbers: Tensor, x: Tensor) -> Tensor:
    """Return numbers over the first dims of ``x``, or one, as a factor of it."""
    return numbers.view(*numbers.shape, *(1 for _ in range(x.ndim - numbers.ndim)))


class Decision(NamedTuple):
    """What a step decides from all gradient statistics."""

    grad_norm: Tensor  # 0-D, global norm of the gradient before any clip
    finite: Tensor  # 0-D bool; False means that nothing changes
    t: list[Tensor]  # (N,) of every group, after the step
    behind: list[Tensor | None]  # as in ``Hyperparameters``, after the step
    ok: list[Tensor]  # (N,) bool of every group: which tensors move
    # of every group, ``StepScalars.table`` in each dtype that one of its stacks is
    # computed in: a wider one would widen the products
    tables: list[dict[torch.dtype, Tensor]]


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Scalars are float64, since 1 - beta^t cancels; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64
