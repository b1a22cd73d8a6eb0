"""Parameter buckets: the parameters of one group that take one algorithm and have one
shape, with their state as stacks, ready for the one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from marsopt.functional.collectives import Collectives
from marsopt.functional.rows import matrix_rows
from marsopt.functional.stacks import adjacent, group_by
from marsopt.functional.step_types import Hyperparameters, several
from marsopt.optim.hyperparameters import DeviceHyperparameters
from marsopt.optim.state_dict import (
    ITERATE,
    OWN_KEYS,
    State,
    kept_buffers,
    state_key,
)
from marsopt.optim.storage import are_rows, known_stack, may_move, move_in, own_rows
from marsopt.rules.algorithm import Algorithm, working_dtype
from marsopt.rules.matrices import MatrixRows


@dataclass
class ParameterBucket:
    """L parameters as their owner holds them, and their state as stacks of pieces."""

    algorithm: Algorithm
    params: list[Tensor]
    labels: list[str]
    collectives: Collectives
    state: dict[str, Tensor] = field(default_factory=dict)  # stacks by symbol
    flat: Tensor | None = None  # (L, *shape), whose rows the parameters are

    def __post_init__(self) -> None:
        self.rows: MatrixRows | None = matrix_rows(
            self.algorithm, self.params[0], self.shape, self.collectives
        )
        # parts of each parameter that have a norm of their own
        self.num_clipped = self.algorithm.num_clipped(self.shape)

    @property
    def shape(self) -> torch.Size:
        """Return that of one whole parameter."""
        return self.params[0].shape

    def pieces(self) -> list[Tensor]:
        """Return the parameters' local pieces."""
        return [self.collectives.local(p) for p in self.params]

    def flattened(self, pieces: Sequence[Tensor]) -> Tensor | None:
        """Return x as a stack that needs no copy, or None.

        Whoever gives a parameter other storage (``p.data = ...``, ``model.to``) finds
        it moved in again at the next step.
        """
        if len(pieces) == 1:
            return pieces[0].unsqueeze(0)
        if self.flat is None or not are_rows(pieces, self.flat):
            self.flat = adjacent(pieces)  # laid out so by their owner
            if self.flat is None and all(map(may_move, pieces, self.params)):
                self.flat = move_in(self.params)
        return self.flat

    def kind(self) -> Hashable:
        """Return what a compiled graph knows of it; the same on every rank."""
        first = self.params[0]
        return (
            id(self.algorithm),
            len(self.params),
            first.shape,
            first.stride(),
            first.dtype,
            self.collectives.placement(first),
        )


@dataclass
class BucketGroup:
    """The buckets that one algorithm moves with one set of hyperparameters."""

    hyper: Hyperparameters
    buckets: list[ParameterBucket]


def build(
    group: dict[str, Any],
    hyper: DeviceHyperparameters,
    state: State,
    options: Mapping[str, Any],
    stacked: Callable[[Tensor, int], bool],
    known: Mapping[int, Tensor],
) -> list[BucketGroup]:
    """Return the group's buckets, over existing state and fresh zeros where there is
    none.

    A frozen parameter gets no state before its first gradient.

    Args:
        group: a param group.
        hyper: its hyperparameters.
        state: the optimizer's.
        options: what the optimizer was built with.
        stacked: whether a parameter shares its bucket with those of its shape, of which
            there are so many.
        known: stacks of buckets before these, by address: rows of them stay there.
    """
    routing, params = hyper.routing, group["params"]
    moving = [
        i
        for i, p in enumerate(params)
        if p.requires_grad or p.grad is not None or "step" in state.get(p, ())
    ]
    names = group.get("param_names", [f"{i}" for i in range(len(params))])
    takes = routing.matrix.matrices.takes
    matrix = [i for i in moving if routing.rest is None or takes(params[i].shape)]
    matrices = set(matrix)
    rest = [i for i in moving if i not in matrices]
    rest_rate = hyper.lr_1d if routing.own_rate else hyper.lr
    rest_gamma = hyper.gamma_1d if routing.own_gamma else hyper.gamma
    found = []
    for algorithm, lr, gamma, part in (
        (routing.matrix, hyper.lr, hyper.gamma, matrix),
        (routing.rest, rest_rate, rest_gamma, rest),
    ):
        keys = _keys([params[i] for i in part], options["collectives"], stacked)
        buckets = [
            ParameterBucket(
                algorithm=algorithm,
                params=[params[part[n]] for n in members],
                labels=[names[part[n]] for n in members],
                collectives=options["collectives"],
            )
            for members in group_by(keys)
        ]
        if not buckets:
            continue
        for bucket in buckets:
            _attach(bucket, state, known)
        dtypes = tuple(dict.fromkeys(working_dtype(b.params[0]) for b in buckets))
        t = _steps([p for b in buckets for p in b.params], state)
        parts = several([(len(b.params), b.num_clipped) for b in buckets])
        found.append(
            BucketGroup(
                Hyperparameters(algorithm, lr, gamma, t, dtypes, parts), buckets
            )
        )
    return found


def _keys(
    params: Sequence[Tensor],
    collectives: Collectives,
    stacked: Callable[[Tensor, int], bool],
) -> list:
    """Return what parameters of one bucket share. Nothing here may differ from rank to
    rank: all ranks have to list their parameters in one order.
    """
    alike = [
        (p.shape, p.stride(), p.dtype, collectives.placement(p))
        if p.is_contiguous()
        else None
        for p in params
    ]
    num = Counter(alike)
    return [
        i if key is None or not stacked(p, num[key]) else key
        for i, (p, key) in enumerate(zip(params, alike, strict=True))
    ]


def _steps(params: Sequence[Tensor], state: State) -> Tensor:
    """Return the steps taken (N,); ``state`` holds its rows."""
    before = [float(state.get(p, {}).get("step", 0.0)) for p in params]
    t = torch.tensor(before, dtype=torch.float32, device=params[0].device)
    for p, step in zip(params, own_rows(t), strict=True):
        state[p]["step"] = step
    return t


def _attach(bucket: ParameterBucket, state: State, known: Mapping[int, Tensor]) -> None:
    """Give a bucket its stacks: those that are there already, or fresh ones with what
    ``state`` holds, which from now on holds their rows.
    """
    pieces, wanted = bucket.pieces(), kept_buffers(bucket.algorithm)
    if len(pieces) > 1:
        bucket.flat = known_stack(pieces, known)
    keys = {symbol: state_key(bucket.algorithm, symbol) for symbol in wanted}
    unwanted = OWN_KEYS - {"step", *keys.values()}
    for p in bucket.params:
        for key in unwanted & set(state[p]):
            del state[p][key]  # of another rule: stale when that one returns
    for symbol, key in keys.items():
        num_missing = bucket.algorithm.num_missing(symbol, bucket.shape)
        num_dims = len(bucket.shape) - num_missing
        for p in bucket.params if num_missing else ():
            if key in state[p] and state[p][key].ndim != num_dims:
                del state[p][key]  # of the rows of other matrices
        dtype = bucket.algorithm.dtype_of(symbol, pieces[0])
        stack = _existing(bucket, key, dtype, state, known)
        if stack is None:
            stack = _zeros(pieces, dtype, num_dims)
            for p, row in zip(bucket.params, own_rows(stack), strict=True):
                if key in state[p]:
                    row.copy_(bucket.collectives.local(state[p][key]))
                elif key == ITERATE:
                    row.copy_(bucket.collectives.local(p.detach()))
                state[p][key] = bucket.collectives.wrap(row, p)
        bucket.state[symbol] = stack


def _existing(
    bucket: ParameterBucket,
    key: str,
    dtype: torch.dtype,
    state: State,
    known: Mapping[int, Tensor],
) -> Tensor | None:
    if not all(key in state[p] for p in bucket.params):
        return None
    rows = [bucket.collectives.local(state[p][key]) for p in bucket.params]
    if any(row.dtype != dtype for row in rows):
        return None  # of a parameter in another dtype, whose state was handed over
    if len(rows) == 1:
        return rows[0].unsqueeze(0)
    return known_stack(rows, known)


def _zeros(pieces: Sequence[Tensor], dtype: torch.dtype, num_dims: int) -> Tensor:
    """Return zeros over the first dims of the pieces, a stack."""
    first = pieces[0]
    if len(pieces) == 1 and num_dims == first.ndim:  # its state has its strides
        return torch.zeros_like(first, dtype=dtype).unsqueeze(0)
    return first.new_zeros(len(pieces), *first.shape[:num_dims], dtype=dtype)
