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

from marsopt.functional.binding import (
    allocate,
    buffer_shape,
    matrix_rows,
    owned_leaves,
    rounding_cuts,
    start_at_owner,
)
from marsopt.functional.collectives import Collectives, Owned
from marsopt.functional.stacks import (
    adjacent,
    are_rows,
    can_relocate,
    flatten_into_stack,
    group_by,
    known_stack,
    separate_tensors,
)
from marsopt.functional.step_types import (
    Hyperparameters,
    Members,
    norms_per_tensor,
    scalar_dtype,
)
from marsopt.optim.groups import DeviceHyperparameters, moves
from marsopt.optim.state_dict import State
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.buffers import AHEAD, LOOKAHEAD, Buffer
from marsopt.rules.dtypes import working_dtype
from marsopt.rules.matrices import MatrixRows
from marsopt.rules.registry import STATE_KEYS


@dataclass
class ParameterBucket:
    """L parameters as their owner holds them, and their state as stacks of pieces."""

    algorithm: Algorithm
    params: list[Tensor]
    labels: list[str]
    collectives: Collectives
    state: dict[str, Tensor] = field(default_factory=dict)  # stacks by symbol
    # of each parameter, the buffers whose home is with the owners of matrices, and the
    # numbers of those matrices that have their owner here
    owned: list[tuple[Tensor, ...]] = field(default_factory=list)
    owns: list[Owned] = field(default_factory=list)
    flat: Tensor | None = None  # (L, *shape), whose rows the parameters are

    def __post_init__(self) -> None:
        self.rows: MatrixRows | None = matrix_rows(
            self.algorithm, self.params[0], self.shape, self.collectives
        )
        self.cuts = rounding_cuts(self.algorithm, self.params[0], self.collectives)
        # parts of each parameter that have a norm of their own
        self.num_clipped = self.algorithm.num_clipped(self.shape)

    @property
    def shape(self) -> torch.Size:
        """Return that of one whole parameter."""
        return self.params[0].shape

    @property
    def members(self) -> Members:
        return Members(self.params, self.owned)

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
            if self.flat is None and all(map(can_relocate, pieces, self.params)):
                self.flat = flatten_into_stack(self.params)
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
    group: dict[str, Any]  # the param group


# ---- buckets -------------------------------------------------------------------------


def build(
    group: dict[str, Any],
    hyper: DeviceHyperparameters,
    state: State,
    collectives: Collectives,
    stacked: Callable[[Tensor, int], bool],
    known: Mapping[int, Tensor],
) -> list[BucketGroup]:
    """Return the group's buckets, without state.

    Args:
        group: a param group.
        hyper: its hyperparameters.
        state: the optimizer's.
        collectives: who holds the parameters.
        stacked: whether a parameter shares its bucket with those of its shape, of which
            there are so many.
        known: stacks of the layout before, by address: what is in them stays there.
    """
    routing, params = hyper.routing, group["params"]
    names = group.get("param_names", [f"{i}" for i in range(len(params))])
    moving = [i for i, p in enumerate(params) if moves(p, state)]
    found = []
    for side in routing.sides([params[i] for i in moving]):
        part = [moving[n] for n in side.members]
        own_rate = side.is_fallback and routing.own_rate
        own_gamma = side.is_fallback and routing.own_gamma
        keys = _keys([params[i] for i in part], collectives, stacked)
        buckets = [
            ParameterBucket(
                algorithm=side.algorithm,
                params=[params[part[n]] for n in members],
                labels=[names[part[n]] for n in members],
                collectives=collectives,
            )
            for members in group_by(keys)
        ]
        dtypes = tuple(dict.fromkeys(working_dtype(b.params[0]) for b in buckets))
        every = [p for b in buckets for p in b.params]
        own = Hyperparameters(
            algorithm=side.algorithm,
            lr=hyper.lr_1d if own_rate else hyper.lr,
            gamma=hyper.gamma_1d if own_gamma else hyper.gamma,
            t=_steps(every, state),
            dtypes=dtypes,
            behind=_behind(side.algorithm.num_behind, every, state, known),
            parts=norms_per_tensor([(len(b.params), b.num_clipped) for b in buckets]),
        )
        found.append(BucketGroup(own, buckets, group))
    return found


def _keys(
    params: Sequence[Tensor],
    collectives: Collectives,
    stacked: Callable[[Tensor, int], bool],
) -> list[Any]:
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
    for p, step in zip(params, separate_tensors(t), strict=True):
        state[p]["step"] = step
    return t


def _behind(
    num: int, params: Sequence[Tensor], state: State, known: Mapping[int, Tensor]
) -> Tensor | None:
    """Return the numbers of the last step (N, num), from which x follows; ``state``
    holds its rows. None where there are none.
    """
    if not num:
        return None
    if all(LOOKAHEAD in state[p] for p in params):
        found = known_stack([state[p][LOOKAHEAD] for p in params], known)
        if found is not None:
            return found
    device = params[0].device
    found = torch.zeros(len(params), num, dtype=scalar_dtype(device), device=device)
    for p, row in zip(params, separate_tensors(found), strict=True):
        if LOOKAHEAD in state[p]:
            row.copy_(state[p][LOOKAHEAD])
        state[p][LOOKAHEAD] = row
    return found


# ---- their state ---------------------------------------------------------------------


def attach(bucket: ParameterBucket, state: State, known: Mapping[int, Tensor]) -> None:
    """Give a bucket its stacks: those that are there already, or fresh ones with what
    ``state`` holds, which from now on holds their rows.

    Args:
        bucket: the bucket.
        state: the optimizer's.
        known: stacks of buckets before these, by address: rows of them stay there.
    """
    pieces, buffers = bucket.pieces(), bucket.algorithm.buffers
    if len(pieces) > 1:
        bucket.flat = known_stack(pieces, known)
    unwanted = STATE_KEYS - {buffer.key for buffer in buffers.values()}
    if bucket.algorithm.num_behind:
        unwanted -= {LOOKAHEAD, AHEAD}
    wanted = {b.key for b in buffers.values() if b.home == "shard"}
    for p in bucket.params:
        stale = unwanted & set(state[p])
        for key in stale:
            del state[p][key]  # of another rule: stale when that one returns
        if LOOKAHEAD in state[p] and (stale or wanted - set(state[p])):
            state[p][LOOKAHEAD].zero_()  # x does not follow from what starts anew
    for symbol, buffer in buffers.items():
        if buffer.home == "owner":
            continue
        shape = buffer_shape(bucket.algorithm, buffer, bucket.shape)
        for p in bucket.params:
            if buffer.key in state[p] and state[p][buffer.key].ndim != len(shape):
                del state[p][buffer.key]  # of the rows of other matrices
        stack = _existing(bucket, buffer, state, known)
        if stack is None:
            stack = _fresh(bucket.algorithm, buffer, pieces)
            for p, row in zip(bucket.params, separate_tensors(stack), strict=True):
                if buffer.key in state[p]:
                    row.copy_(bucket.collectives.local(state[p][buffer.key]))
                elif buffer.start == "parameter":
                    row.copy_(bucket.collectives.local(p.detach()))
                state[p][buffer.key] = bucket.collectives.wrap(row, p)
        bucket.state[symbol] = stack


def _existing(
    bucket: ParameterBucket, buffer: Buffer, state: State, known: Mapping[int, Tensor]
) -> Tensor | None:
    if not all(buffer.key in state[p] for p in bucket.params):
        return None
    local = bucket.collectives.local
    rows = [local(state[p][buffer.key]) for p in bucket.params]
    dtype = bucket.algorithm.dtype_of(buffer, local(bucket.params[0]))
    if any(row.dtype != dtype for row in rows):
        return None  # of a parameter in another dtype, whose state was handed over
    if len(rows) == 1:
        return rows[0].unsqueeze(0)
    return known_stack(rows, known)


def _fresh(algorithm: Algorithm, buffer: Buffer, pieces: Sequence[Tensor]) -> Tensor:
    """Return a stack of zeros, for pieces of one shape."""
    zeros = buffer._replace(start="zeros")
    if len(pieces) == 1:  # its state has its strides
        return allocate(algorithm, zeros, pieces[0].detach(), stacked=False)[None]
    like = pieces[0].detach().expand(len(pieces), *pieces[0].shape)
    shape = buffer_shape(algorithm, buffer, like.shape[1:])
    return like.new_zeros(len(like), *shape, dtype=algorithm.dtype_of(buffer, like))


def attach_owned(
    buckets: Sequence[ParameterBucket], state: State, *, moved: bool
) -> None:
    """Give buckets the buffers whose home is with the owners of matrices: those that
    are in ``state``, or fresh ones.

    Args:
        buckets: all that share their exchanges.
        state: the optimizer's.
        moved: whether owners may be others than those that hold ``state``, as they are
            where other parameters share the exchanges: all ranks then hand over what
            they have.
    """
    collectives = buckets[0].collectives
    leaves = [one for b in buckets for one in owned_leaves(b.algorithm, b.params)]
    owns = iter(collectives.owns(leaves))
    for bucket in buckets:
        algorithm = bucket.algorithm
        for p in bucket.params:
            mine, buffers = next(owns), []
            for symbol in algorithm.matrix_preconditioner.owned:
                buffer = algorithm.buffers[symbol]
                found = state[p].get(buffer.key)
                if found is None:
                    found = start_at_owner(algorithm, buffer, p, mine)
                elif moved:
                    found = collectives.claim(found, mine.of(buffer))
                state[p][buffer.key] = found
                buffers.append(found)
            bucket.owned.append(tuple(buffers))
            bucket.owns.append(mine)
