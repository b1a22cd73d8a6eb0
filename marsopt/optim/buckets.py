"""Parameter buckets: the parameters of one group that take one algorithm and have one
shape, with their state as stacks, ready for the one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

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
    can_relocate,
    flatten_into_stack,
    group_by,
    known_stack,
    separate_tensors,
)
from marsopt.functional.step_types import (
    Cells,
    Hyperparameters,
    Members,
    formula,
    norms_per_tensor,
    scalar_dtype,
)
from marsopt.optim.compiled import should_stack
from marsopt.optim.groups import DeviceHyperparameters, moves
from marsopt.optim.state_dict import State
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.buffers import LOOKAHEAD, Buffer, is_full
from marsopt.rules.dtypes import working_dtype
from marsopt.rules.hyperparameters import numbers_of, with_numbers
from marsopt.rules.matrices import MatrixRows
from marsopt.rules.registry import STATE_KEYS


@dataclass
class ParameterBucket:
    """L parameters as their owner holds them, and their state as stacks of pieces. Its
    tensors are those that it was bound to, as long as the layout fits.
    """

    algorithm: Algorithm
    params: list[Tensor]
    labels: list[str]
    collectives: Collectives
    state: dict[str, Tensor] = field(default_factory=dict)  # stacks by symbol
    # of each parameter, the buffers whose home is with the owners of matrices, and the
    # numbers of those matrices that have their owner here
    owned: list[tuple[Tensor, ...]] = field(default_factory=list)
    owns: list[Owned] = field(default_factory=list)
    x: Tensor | None = None  # (L, *shape) of pieces; None: a step copies them into one
    # what graphs know of its stack, by whether its gradients are ``spare``
    forms: dict[bool, Hashable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pieces = [self.collectives.local(p) for p in self.params]  # on this rank
        self.rows: MatrixRows | None = matrix_rows(
            self.algorithm, self.params[0], self.shape, self.collectives
        )
        self.cuts = rounding_cuts(self.algorithm, self.params[0], self.collectives)
        # parts of each parameter that have a norm of their own
        self.num_clipped = self.algorithm.num_clipped(self.shape)
        kept = [buffer.key for buffer in self.algorithm.buffers.values()]
        kept += [LOOKAHEAD] if self.algorithm.num_behind else []
        # of two keys or more it returns a tuple
        self._kept = itemgetter("step", *(kept or ["step"]))

    @property
    def shape(self) -> torch.Size:
        """Return that of one whole parameter."""
        return self.params[0].shape

    @property
    def members(self) -> Members:
        return Members(self.params, self.owned)

    @property
    def flat(self) -> Tensor | None:
        """Return the stack whose rows several parameters are; None where they are not,
        or there is one.
        """
        return self.x if len(self.params) > 1 else None

    def state_tensors(self, state: State) -> list[Tensor]:
        """Return the tensors that ``state`` holds of the parameters for its algorithm.

        Raises:
            KeyError: one is missing.
        """
        return [tensor for p in self.params for tensor in self._kept(state[p])]

    def place(self, known: Mapping[int, Tensor]) -> None:
        """Make the parameters rows of a stack, where they are that or can move.

        Args:
            known: stacks of the layout before, by address: what is in them stays there.
        """
        if len(self.pieces) == 1:
            self.x = self.pieces[0].detach().unsqueeze(0)
            return
        self.x = known_stack(self.pieces, known)
        if self.x is None:
            self.x = adjacent(self.pieces)  # laid out so by their owner
        if self.x is None and all(map(can_relocate, self.pieces, self.params)):
            self.x = flatten_into_stack(self.params)
        if self.x is not None:
            self.x = self.x.detach()

    def kind(self) -> Hashable:
        """Return what a compiled graph knows of it; equal ones are equal on every rank
        too.
        """
        first = self.params[0]
        return (
            formula(self.algorithm),
            len(self.params),
            first.shape,
            first.stride(),
            first.dtype,
            self.collectives.placement(first),
        )


class GroupSide(NamedTuple):
    """The parameters of one param group that one algorithm moves."""

    algorithm: Algorithm
    lr: Tensor
    gamma: Tensor
    values: Tensor  # of ``DeviceHyperparameters``
    group: dict[str, Any]
    params: list[Tensor]


class JoinedHyperparameters:
    """The hyperparameters of several groups whose algorithms have one formula, as one
    algorithm in which each is a vector over all their parameters (N,).

    Args:
        sides: those that are joined, on one device.
    """

    def __init__(self, sides: Sequence[GroupSide]) -> None:
        algorithm = sides[0].algorithm
        self._cells = [
            cell
            for side in sides
            for cell in (side.lr, side.gamma, *numbers_of(side.algorithm))
        ]
        self._num_sides, num = len(sides), sum(len(side.params) for side in sides)
        self.values = sides[0].lr.new_zeros(len(self._cells) // len(sides), num)
        self.lr, self.gamma, *others = self.values.unbind()
        self.algorithm = with_numbers(algorithm, iter(others))

    def refresh(self, index: Tensor) -> None:
        """Take over the groups' present hyperparameters.

        Args:
            index: (N,) the number of each parameter's side, int64.
        """
        table = torch.stack(self._cells).unflatten(0, (self._num_sides, -1))
        torch.index_select(table.t(), 1, index, out=self.values)


def cells_of(hyper: GroupSide | JoinedHyperparameters) -> Cells:
    """Return where graphs find the hyperparameters of a side, or of several. Each is a
    view of one row of ``values``, whose offset says which: an algorithm has no names
    of its hyperparameters to look them up by.
    """
    algorithm, size = hyper.algorithm, hyper.values[0].numel()
    places = [hyper.lr, hyper.gamma]
    places += numbers_of(algorithm) if formula(algorithm).is_shared else []
    lr, gamma, *others = [cell.storage_offset() // size for cell in places]
    return Cells(hyper.values, lr, gamma, tuple(others))


@dataclass
class BucketGroup:
    """The buckets that one algorithm moves, and its hyperparameters."""

    hyper: Hyperparameters
    buckets: list[ParameterBucket]
    groups: list[dict[str, Any]]  # the param groups of its parameters
    # what ``hyper`` has that a step brings from and to ``optimizer.state``, whose
    # tensors are in somebody's memory: (rows, entries)
    apart: tuple[list[Tensor], list[Tensor]]
    refresh: Callable[[], None]  # takes over the groups' present ones


# ---- buckets -------------------------------------------------------------------------


def split(
    group: dict[str, Any], hyper: DeviceHyperparameters, state: State
) -> list[GroupSide]:
    """Return the parameters of a group that move, by who moves them."""
    params, routing = group["params"], hyper.routing
    moving = [i for i, p in enumerate(params) if moves(p, state)]
    group_sides = []
    for side in routing.sides([params[i] for i in moving]):
        part = [moving[n] for n in side.members]
        own_rate = side.is_rest and routing.rest_ratio is not None
        own_gamma = side.is_rest and routing.rest_gamma is not None
        group_sides.append(
            GroupSide(
                side.algorithm,
                hyper.lr_1d if own_rate else hyper.lr,
                hyper.gamma_1d if own_gamma else hyper.gamma,
                hyper.values,
                group,
                [params[i] for i in part],
            )
        )
    return group_sides


def alike(sides: Sequence[GroupSide]) -> list[list[GroupSide]]:
    """Return the sides that are moved together: those of one formula, whose
    hyperparameters then are vectors. Owners of matrices read theirs from the algorithm
    itself, and vectors have a value for each tensor, none for each of its parts: sides
    with owners, or with norms of parts, are moved one by one.
    """
    return [
        [sides[i] for i in members]
        for members in group_by(
            [
                (formula(side.algorithm), _ahead_in(side)) if _may_join(side) else i
                for i, side in enumerate(sides)
            ]
        )
    ]


def _ahead_in(side: GroupSide) -> frozenset[torch.dtype]:
    """Return the dtype of the numbers from which x follows, where it does."""
    ahead = side.params if side.algorithm.num_behind else []
    return frozenset(map(working_dtype, ahead))


def _may_join(side: GroupSide) -> bool:
    algorithm = side.algorithm
    if any(algorithm.num_clipped(p.shape) > 1 for p in side.params):
        return False
    if not algorithm.matrix_only:
        return True
    preconditioner = algorithm.matrix_preconditioner
    return not (preconditioner.row_outputs or preconditioner.owned)


def build(
    sides: Sequence[GroupSide],
    labels: Mapping[Tensor, str],
    state: State,
    collectives: Collectives,
    compile: bool,
) -> tuple[JoinedHyperparameters | None, list[ParameterBucket]]:
    """Return the buckets of sides that are moved together, and where these are several,
    their hyperparameters. Nothing is written.

    Args:
        sides: of ``alike``.
        labels: what errors call parameters.
        state: the optimizer's.
        collectives: who holds the parameters.
        compile: whether the step is compiled.
    """
    joined = JoinedHyperparameters(sides) if len(sides) > 1 else None
    params = [p for side in sides for p in side.params]
    buckets = [
        ParameterBucket(
            algorithm=sides[0].algorithm if joined is None else joined.algorithm,
            params=[params[i] for i in members],
            labels=[labels[params[i]] for i in members],
            collectives=collectives,
        )
        for members in group_by(_keys(params, state, collectives, compile))
    ]
    return joined, buckets


def check_state(
    p: Tensor, what: str, algorithm: Algorithm, state: State, collectives: Collectives
) -> None:
    """Check what ``state`` holds of a parameter for ``algorithm``.

    Raises:
        ValueError: no tensor, or one of another shape or device than the parameter's.
    """
    entry, piece = state.get(p, {}), collectives.local(p)
    for buffer in algorithm.buffers.values():
        value = entry.get(buffer.key)
        if value is None or buffer.home == "owner":
            continue
        shape = buffer_shape(algorithm, buffer, piece.shape)
        got = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            local = collectives.local(value)
            if not is_full(buffer) and local.ndim != len(shape):
                continue  # of the rows of other matrices: it starts anew
            if local.shape == shape and local.device == piece.device:
                continue
            got = f"a tensor of shape {tuple(local.shape)} on {local.device}"
        raise ValueError(
            f"got {got} as state {buffer.key!r} of {what}, expected a tensor of shape "
            f"{tuple(shape)} on {piece.device}, as the parameter is: change all state "
            "of a parameter with it, or delete optimizer.state[parameter], which then "
            "starts anew"
        )


def join(
    sides: Sequence[GroupSide],
    joined: JoinedHyperparameters | None,
    buckets: list[ParameterBucket],
    state: State,
    known: Mapping[int, Tensor],
) -> BucketGroup:
    """Return buckets with their hyperparameters; ``state`` gets the rows of
    every parameter.
    """
    params = [p for bucket in buckets for p in bucket.params]
    apart: tuple[list[Tensor], list[Tensor]] = ([], [])
    present = sides[0] if joined is None else joined
    algorithm = present.algorithm
    hyper = Hyperparameters(
        algorithm=algorithm,
        lr=present.lr,
        gamma=present.gamma,
        t=_steps(params, state, apart),
        dtypes=tuple(dict.fromkeys(working_dtype(b.params[0]) for b in buckets)),
        behind=_behind(algorithm.num_behind, params, state, known, apart),
        parts=norms_per_tensor([(len(b.params), b.num_clipped) for b in buckets]),
        cells=cells_of(present),
    )
    groups = [side.group for side in sides]
    if joined is None:
        return BucketGroup(hyper, buckets, groups, apart, refresh=lambda: None)
    number = {p: i for i, side in enumerate(sides) for p in side.params}
    index = torch.tensor([number[p] for p in params], device=params[0].device)
    joined.refresh(index)
    return BucketGroup(hyper, buckets, groups, apart, partial(joined.refresh, index))


def _keys(
    params: Sequence[Tensor],
    state: State,
    collectives: Collectives,
    compile: bool,
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
        key
        if key is not None
        and should_stack(p, compile, num[key])
        and _may_move(p, state, key[-1])
        else i
        for i, (p, key) in enumerate(zip(params, alike, strict=True))
    ]


def _may_move(p: Tensor, state: State, placement: Hashable) -> bool:
    """Return whether the state of a parameter may become rows of stacks: not where it
    lies in memory that others look into, as after ``share_memory_()``. Steps then write
    it where it is.
    """
    return placement is not None or all(
        value.numel() == 0 or is_fake(value) or can_relocate(value, value)
        for key, value in state.get(p, {}).items()
        if key in STATE_KEYS - {LOOKAHEAD}
    )


def _steps(
    params: Sequence[Tensor], state: State, apart: tuple[list[Tensor], list[Tensor]]
) -> Tensor:
    """Return the steps taken (N,); ``state`` holds its rows."""
    before = [float(state.get(p, {}).get("step", 0.0)) for p in params]
    t = torch.tensor(before, dtype=torch.float32, device=params[0].device)
    for p, step in zip(params, separate_tensors(t), strict=True):
        _hold(state[p], "step", step, apart)
    return t


def _behind(
    num: int,
    params: Sequence[Tensor],
    state: State,
    known: Mapping[int, Tensor],
    apart: tuple[list[Tensor], list[Tensor]],
) -> Tensor | None:
    """Return the coefficients of the last step (N, num), by which x follows; ``state``
    holds its rows. None where there are none.
    """
    if not num:
        return None
    if all(LOOKAHEAD in state[p] for p in params):
        known_rows = known_stack([state[p][LOOKAHEAD] for p in params], known)
        if known_rows is not None:
            return known_rows
    device = params[0].device
    stack = torch.zeros(len(params), num, dtype=scalar_dtype(device), device=device)
    for p, row in zip(params, separate_tensors(stack), strict=True):
        if LOOKAHEAD in state[p]:
            row.copy_(state[p][LOOKAHEAD])
        _hold(state[p], LOOKAHEAD, row, apart)
    return stack


def _hold(
    entry: dict[str, Any],
    key: str,
    row: Tensor,
    apart: tuple[list[Tensor], list[Tensor]] | None = None,
) -> None:
    """Let ``entry[key]`` be a tensor in the memory of ``row``, which has its values:
    the tensor that is there, where it can move, so that whoever holds it sees later
    steps. Where it cannot, ``apart`` gets both.
    """
    before, form = entry.get(key), (row.shape, row.dtype, row.device)
    if (
        type(before) is not Tensor
        or (before.shape, before.dtype, before.device) != form
        or is_fake(row)
    ):
        entry[key] = row
    elif can_relocate(before, before):
        before.data = row
    elif apart is None:
        entry[key] = row
    else:
        apart[0].append(row)
        apart[1].append(before)


# ---- their state ---------------------------------------------------------------------


def attach(bucket: ParameterBucket, state: State, known: Mapping[int, Tensor]) -> None:
    """Give a bucket its stacks: those that are there already, or fresh ones with what
    ``state`` holds, which from now on holds their rows.

    Args:
        bucket: the bucket.
        state: the optimizer's.
        known: stacks of buckets before these, by address: rows of them stay there.
    """
    pieces, buffers = bucket.pieces, bucket.algorithm.buffers
    bucket.place(known)
    unwanted = STATE_KEYS - {buffer.key for buffer in buffers.values()}
    if bucket.algorithm.num_behind:
        unwanted -= {LOOKAHEAD}
    wanted = {b.key for b in buffers.values() if b.home == "shard"}
    debiased = {buffer.key for buffer in buffers.values() if buffer.is_debiased}
    for p in bucket.params:
        stale = unwanted & set(state[p])
        for key in stale:
            del state[p][key]  # of another rule: stale when that one returns
        if debiased - set(state[p]):
            # all of them start with the count of steps: one that is new beside an old
            # momentum would be far too small
            # (new tensors, so that a state dict that is refused has changed none)
            for key in debiased & set(state[p]):
                state[p][key] = torch.zeros_like(state[p][key])
            if "step" in state[p]:
                state[p]["step"].zero_()
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
            like = pieces[0].detach().expand(len(pieces), *pieces[0].shape)
            zeros = buffer._replace(start="zeros")
            stack = allocate(bucket.algorithm, zeros, like)
            for p, row in zip(bucket.params, separate_tensors(stack), strict=True):
                if buffer.key in state[p]:
                    row.copy_(bucket.collectives.local(state[p][buffer.key]))
                elif buffer.start == "parameter":
                    row.copy_(bucket.collectives.local(p))
                _hold(state[p], buffer.key, bucket.collectives.wrap(row, p))
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
    if len(rows) == 1:  # detached: a view refers to its base, which then cannot swap
        return rows[0].detach().unsqueeze(0)
    return known_stack(rows, known)


def _is_of_others(algorithm: Algorithm, p: Tensor, entry: Mapping[str, Any]) -> bool:
    """Return whether owners keep buffers of matrices of other shapes than the algorithm
    has: its ``sides`` or ``matrices`` have changed, so that they start anew.
    """
    for symbol in algorithm.owned:
        buffer = algorithm.buffers[symbol]
        value = entry.get(buffer.key)
        if value is not None:
            size = algorithm.matrices.shape_in(p.shape)
            if value.shape[1:] != buffer.shape(size, algorithm.matrices):
                return True
    return False


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
    leaves = [leaf for b in buckets for leaf in owned_leaves(b.algorithm, b.params)]
    owns = iter(collectives.owns(leaves))
    for bucket in buckets:
        algorithm = bucket.algorithm
        for p in bucket.params:
            ownership, buffers = next(owns), []
            if _is_of_others(algorithm, p, state[p]):
                for symbol in algorithm.owned:
                    state[p].pop(algorithm.buffers[symbol].key, None)
                state[p]["step"].zero_()
            for symbol in algorithm.owned:
                buffer = algorithm.buffers[symbol]
                value = state[p].get(buffer.key)
                if value is None:
                    value = start_at_owner(algorithm, buffer, p, ownership)
                elif moved:
                    value = collectives.claim(value, ownership)
                state[p][buffer.key] = value
                buffers.append(value)
            bucket.owned.append(tuple(buffers))
            bucket.owns.append(ownership)
