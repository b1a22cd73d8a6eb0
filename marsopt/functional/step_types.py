"""The inputs of the one step, stacks of tensors with their hyperparameters, and its
decision about them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import repeat
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from marsopt.rules.algorithm import Algorithm
from marsopt.rules.checks import Number
from marsopt.rules.hyperparameters import static, with_numbers
from marsopt.rules.matrices import MatrixRows
from marsopt.rules.preconditioner import MatrixPreconditioner
from marsopt.rules.registry import BUILT_IN
from marsopt.rules.rounding import HALF

FORMULAS: MutableMapping[Algorithm, Formula] = WeakKeyDictionary()
SHARED: MutableMapping[Hashable, Formula] = WeakValueDictionary()


class Stack(NamedTuple):
    """L tensors of one shape that take one algorithm, as (L, *shape) tensors of local
    pieces, without gradients. A graph is as large as its number of stacks, whatever L.
    """

    algorithm: Algorithm
    x: Tensor
    buffers: dict[str, Tensor]  # by symbol, those at home in shards
    shape: torch.Size  # of one whole tensor
    # to which matrices rows belong, where these have norms of their own or several
    # shapes
    rows: MatrixRows | None = None
    # where noise is needed: what lies here, as ``Collectives.cuts`` says
    cuts: Mapping[int, Tensor] = {}
    given: Tensor | None = None  # h, if the caller hands it over
    # what ``optim.compiled.flatten`` makes of it, where it stays for many steps
    flat: tuple[Hashable, Sequence[Tensor]] | None = None

    @property
    def h(self) -> Tensor | None:
        """Return the reference gradient of this step; None if there is none."""
        if self.algorithm.h_from is None:
            return None
        return self.buffers["h"] if self.given is None else self.given

    @property
    def num_tensors(self) -> int:
        return self.x.shape[0]

    @property
    def num_clipped(self) -> int:
        """Return how many parts of each tensor have a norm of their own."""
        return self.algorithm.num_clipped(self.shape)

    @property
    def clipped_rows(self) -> MatrixRows | None:
        """Return ``rows`` where parts of a tensor have a norm of their own."""
        return self.rows if self.num_clipped > 1 else None

    def scale_of(self, x: Tensor) -> Number:
        """Return the preconditioner's ``scale`` of the matrices; where they have
        several, as a factor of ``x``, a stack of pieces.
        """
        preconditioner = self.algorithm.matrix_preconditioner
        shapes = self.algorithm.matrices.shapes_in(self.shape)
        scales = [preconditioner.scale(*shape) for _, shape in shapes]
        if self.rows is None or len(set(scales)) == 1:
            return scales[0]
        per_row = self.rows.by_run(scales, x)
        return factor(per_row.view(1, *x.shape[1 : self.num_row_dims]), x)

    @property
    def num_row_dims(self) -> int:
        """Return how many dims of the stack, its first ones, count rows."""
        return 1 + self.algorithm.matrices.column_dim(len(self.shape))


class Formula:
    """The formulas of algorithms that differ only in the values of their
    hyperparameters: one graph moves the stacks of them all, by the values of each.
    Compared and hashed by identity.

    Args:
        algorithm: one of them, to be asked for formulas.
        is_shared: whether several algorithms may have this formula. A graph then gets
            their values from outside, and reading them from the algorithm raises.
    """

    def __init__(self, algorithm: Algorithm, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.algorithm = (
            with_numbers(algorithm, repeat(...)) if is_shared else replace(algorithm)
        )


def formula(algorithm: Algorithm) -> Formula:
    """Return the formula of an algorithm. A user's component may read its own fields in
    a graph: such an algorithm shares its formula with no other.
    """
    cached = FORMULAS.get(algorithm)
    if cached is None:
        parts = algorithm.preconditioner, algorithm.correction
        is_shared = {type(part) for part in parts} <= BUILT_IN
        cached = Formula(algorithm, is_shared=is_shared)  # does not hold its weak key
        if is_shared:
            of_state = algorithm.state_dtype, algorithm.stochastic_rounding
            key = (*map(_structure, parts), *of_state, algorithm.matrices)
            cached = SHARED.setdefault(key, cached)
        FORMULAS[algorithm] = cached
    return cached


def _structure(component: Any) -> Hashable:
    """Return a component's type and its structure."""
    if component is None:
        return None
    values = [(f, getattr(component, f.name)) for f in fields(component)]
    return type(component), *(
        static(value) if f.metadata.get("number") else value for f, value in values
    )


class Members(NamedTuple):
    """The tensors of one stack as their owner holds them (DTensors too)."""

    leaves: Sequence[Tensor]
    # of each, its buffers that live where whole matrices do, (number here, *shape), in
    # the order of ``MatrixPreconditioner.owned``
    owned: Sequence[tuple[Tensor, ...]] = ()
    # of each, the preconditioner with the numbers of its param group, where tensors of
    # several groups are matrices of one stack's algorithm
    own: Sequence[MatrixPreconditioner] = ()


class Hyperparameters(NamedTuple):
    """One algorithm with its rates in one step, for N tensors."""

    algorithm: Algorithm
    lr: Number
    gamma: Number
    t: Tensor  # (N,) steps that each tensor has taken
    dtypes: tuple[torch.dtype, ...]  # working dtypes of its stacks, each once
    # of each stack: its tensors, and the parts of each that have a norm of their own;
    # None: one part each (a graph would guard every number)
    parts: tuple[tuple[int, int], ...] | None = None
    # lr, where it is a tensor that the host does not read: a step looks into it
    unread_lr: Tensor | None = None
    # (K,), or (K, N) where N tensors have their own: graphs read lr, gamma and, in the
    # order of ``numbers_of``, the algorithm's numbers from these ``rows`` of it
    values: Tensor | None = None
    rows: tuple[int, ...] = ()

    def from_rows(self) -> Hyperparameters:
        """Return them as a graph reads them, which has only their ``values``."""
        assert self.values is not None
        values, algorithm = self.values.unbind(), self.algorithm
        lr, gamma, *numbers = [values[i] for i in self.rows]
        if numbers:
            algorithm = with_numbers(algorithm, iter(numbers))
        return self._replace(algorithm=algorithm, lr=lr, gamma=gamma)

    @property
    def num_parts(self) -> int:
        """Return how many parts all N tensors have."""
        return sum(self.sizes) or len(self.t)

    @property
    def sizes(self) -> list[int]:
        """Return how many parts each stack has; nothing where each tensor is one."""
        return [num * clipped for num, clipped in self.parts or ()]

    def per_tensor(self, values: Tensor) -> Tensor:
        """Return (N,) the values of the first part of every tensor, of (P,)."""
        if self.parts is None:
            return values
        cuts = values.split(self.sizes)
        pairs = zip(cuts, self.parts, strict=True)
        return torch.cat([cut.view(parts)[:, 0] for cut, parts in pairs])

    def per_part(self, values: Tensor) -> Tensor:
        """Return (P,) what every part has of ``values``: 0-D, (N,) or (P,)."""
        if values.ndim == 0 or len(values) == self.num_parts:
            return values.expand(self.num_parts)
        parts = self.parts or ()
        cuts = values.split([num for num, _ in parts])
        pairs = zip(cuts, parts, strict=True)
        return torch.cat([cut.repeat_interleave(num) for cut, (_, num) in pairs])


def norms_per_tensor(
    parts: Sequence[tuple[int, int]],
) -> tuple[tuple[int, int], ...] | None:
    """Return ``Hyperparameters.parts`` of these stacks."""
    return tuple(parts) if any(clipped > 1 for _, clipped in parts) else None


@dataclass
class RuleGroup:
    """The stacks that one algorithm moves with one set of hyperparameters."""

    hyper: Hyperparameters
    stacks: Sequence[Stack]
    num_steps: int = 0  # that were taken before this one, as the host counts them


class StepScalars(NamedTuple):
    """Scalars of a step (clip factors, rates, bias corrections), for each tensor of a
    stack, or each row where parts of a tensor are clipped by themselves; as factors of
    one of its tensors.
    """

    ok: Tensor  # bool: the step is finite and the tensor has a gradient
    # factor of the global clip, with which a gradient is kept; None: none is
    grad_clip: Tensor | None
    # of the gradient and, if there is one, of h
    weights: tuple[Tensor, ...]
    # of the noise in this step, int64; None: nothing is rounded stochastically
    key: Tensor | None
    rule: tuple[Tensor, ...]  # the preconditioner's: rates and bias corrections

    def table(self, hyper: Hyperparameters) -> Tensor:
        """Return all but ``ok`` as floating point (P, K), a row for each part."""
        columns = [] if self.grad_clip is None else [self.grad_clip]
        columns += self.weights
        if self.key is not None:  # 16 bits are exact in every dtype
            halves = self.key >> 16, self.key & HALF
            columns += [half.to(self.weights[0].dtype) for half in halves]
        columns += self.rule
        columns = [hyper.per_part(column)[:, None] for column in columns]
        if not torch.compiler.is_compiling():
            return torch.cat(columns, 1)
        # inductor copies the columns that it concatenates: a launch each
        place = torch.arange(len(columns), device=self.ok.device)
        table = columns[0]
        for i, column in enumerate(columns):
            table = torch.where(place == i, column, table)
        return table

    @classmethod
    def of(cls, scalars: StackScalars, stack: Stack, like: Tensor) -> StepScalars:
        """Return the scalars of a stack, as factors of ``like``, a tensor (L, ...) that
        belongs to it.
        """
        algorithm = stack.algorithm
        ok, table = scalars  # a plain pair in a graph
        columns = [ok, *table.unbind(1)]
        rows = stack.clipped_rows
        if rows is not None:
            shape = stack.x.shape[: stack.num_row_dims]
            parts = [column.view(stack.num_tensors, -1) for column in columns]
            columns = [rows.spread(column, shape) for column in parts]
        columns = [factor(column, like) for column in columns]
        return cls.read(algorithm, *columns)

    @classmethod
    def read(cls, algorithm: Algorithm, ok: Tensor, *columns: Tensor) -> StepScalars:
        """Return the scalars from the columns of ``table``."""
        num_weights = 1 if algorithm.h_from is None else 2
        grad_clip = key = None
        rest = list(columns)
        if algorithm.h_from == "step":
            grad_clip, *rest = rest
        weights, rest = rest[:num_weights], rest[num_weights:]
        if algorithm.stochastic_rounding:
            high, low, *rest = rest
            key = (high.to(torch.int64) << 16) | low.to(torch.int64)
        return cls(ok, grad_clip, tuple(weights), key, tuple(rest))


class StackScalars(NamedTuple):
    """The scalars of a step for the parts of a stack's tensors."""

    ok: Tensor  # (parts,) bool
    table: Tensor  # (parts, K): ``StepScalars.table``


def factor(values: Tensor, x: Tensor) -> Tensor:
    """Return values over the first dims of ``x``, or one, as a factor of it."""
    return values.view(*values.shape, *(1 for _ in range(x.ndim - values.ndim)))


class Decision(NamedTuple):
    """The decision of a step from all gradient statistics."""

    grad_norm: Tensor  # 0-D, global norm of the gradient before any clip
    finite: Tensor  # 0-D bool; False means that nothing changes
    t: list[Tensor]  # (N,) of every group, after the step
    ok: list[Tensor]  # (N,) bool of every group: which tensors move
    # of every group, ``StepScalars.table`` in each dtype that one of its stacks is
    # computed in: a wider one would widen the products
    tables: list[dict[torch.dtype, Tensor]]


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Scalars are float64, since 1 - beta^t cancels; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64
