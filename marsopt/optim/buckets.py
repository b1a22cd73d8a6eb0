"""Parameter buckets: parameters that share a stack, of one shape and one formula, with
their state. Param groups of one formula are joined, with a value of each hyperparameter
for each tensor. Parameters and state stay where they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.functional.binding import (
    entries_at_owner,
    matrix_rows,
    owned_leaves,
    rounding_cuts,
    start_at_owner,
    start_beside,
)
from marsopt.functional.collectives import LOCAL, Collectives, Owned
from marsopt.functional.stacks import group_by
from marsopt.functional.step_types import (
    Hyperparameters,
    Members,
    RuleGroup,
    Stack,
    formula,
    norms_per_tensor,
)
from marsopt.optim.compiled import flatten
from marsopt.optim.device_values import DeviceHyperparameters
from marsopt.optim.groups import moves
from marsopt.optim.portions import batch_of, should_stack, takes_batches
from marsopt.optim.state_dict import STAGE_COUNT, State
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.buffers import Buffer, owned_shapes
from marsopt.rules.dtypes import working_dtype
from marsopt.rules.hyperparameters import numbers_of, with_numbers
from marsopt.rules.matrices import MatrixRows
from marsopt.rules.preconditioner import MatrixPreconditioner
from marsopt.rules.registry import STATE_KEYS

Rows = Sequence[Tensor]


@dataclass
class ParameterBucket:
    """L parameters as their owner holds them, and the tensors of their state. One
    parameter is a stack by itself: views of its tensors. Several are small, and a step
    copies them into a stack and out again.
    """

    algorithm: Algorithm
    params: list[Tensor]
    labels: list[str]
    collectives: Collectives
    # by symbol, this rank's piece of a buffer for each parameter
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    # of each parameter, the buffers whose home is with the owners of matrices, and the
    # numbers of those matrices that have their owner here
    owned: list[tuple[Tensor, ...]] = field(default_factory=list)
    owns: list[Owned] = field(default_factory=list)
    # of each, the preconditioner with its group's numbers, where groups are joined
    own: list[MatrixPreconditioner] = field(default_factory=list)
    # views of one parameter; of several, copies of this step
    stack: Stack | None = None
    # of several: rows of the stack's tensors, and the tensors that they are copies of
    copied: list[tuple[Rows, Rows]] = field(default_factory=list)
    gradients: tuple[Tensor, Rows] | None = None  # a stack for copies, and its rows

    def __post_init__(self) -> None:
        # on this rank; detached tensors count writes together with their parameters
        self.pieces = [self.collectives.local(p).detach() for p in self.params]
        self.shape = self.params[0].shape  # of one whole parameter
        # whether a step copies several parameters into one stack
        self.is_copied = len(self.params) > 1
        self.rows: MatrixRows | None = matrix_rows(
            self.algorithm, self.params[0], self.shape, self.collectives
        )
        self.cuts = rounding_cuts(self.algorithm, self.params[0], self.collectives)
        # parts of each parameter that have a norm of their own
        self.num_clipped = self.algorithm.num_clipped(self.shape)
        kept = [buffer.key for buffer in self.algorithm.buffers.values()]
        # returns the tensors that the state's entry of a parameter holds for the
        # algorithm: of two keys or more a tuple
        self.kept = itemgetter("step", *(kept or ["step"]))

    def make_stack(self) -> Stack:
        """Return the stack of a step. It stays, with its form, until ``free``."""
        views = []
        for tensors in (self.pieces, *self.state.values()):
            if self.is_copied:
                view, rows = empty_rows(tensors, tensors[0].dtype)
                self.copied.append((rows, tensors))
            else:  # detached: a view refers to its base, which then cannot swap
                view = tensors[0].detach().unsqueeze(0)
            views.append(view)
        x, *buffers = views
        by_symbol = dict(zip(self.state, buffers, strict=True))
        stack = Stack(self.algorithm, x, by_symbol, self.shape, self.rows, self.cuts)
        held: list[Tensor] = []
        self.stack = stack._replace(flat=(flatten(stack, held), held))
        return self.stack

    def free(self) -> None:
        """Drop the memory of copies."""
        self.gradients = None
        if self.is_copied:
            self.stack, self.copied = None, []

    @property
    def members(self) -> Members:
        return Members(self.params, self.owned, self.own)

    @property
    def batch(self) -> Hashable:
        """Return what buckets share whose matrices are rows of one batch; None: their
        matrices are in none.
        """
        first = self.params[0]
        if self.collectives is not LOCAL or not takes_batches(first.device.type):
            return None
        return batch_of(self.algorithm, self.shape, first)

    def kind(self) -> Hashable:
        """Return the form on which a compiled graph relies; equal forms are equal on
        every rank too.
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


class MovingGroup(NamedTuple):
    """The parameters of a param group that move, and its algorithm; or of several
    groups, by ``joined``.
    """

    algorithm: Algorithm
    lr: Tensor
    gamma: Tensor
    # (K,) of ``DeviceHyperparameters``, or (K, N): lr, gamma and the numbers of
    # ``algorithm`` are views of its rows
    values: Tensor
    groups: list[dict[str, Any]]
    params: list[Tensor]


@dataclass(kw_only=True)
class BucketGroup(RuleGroup):
    """A group of stacks, and the buckets and param groups of its parameters."""

    buckets: list[ParameterBucket]
    groups: list[dict[str, Any]]
    # rows of the steps t in ``hyper``, and the tensors of ``optimizer.state`` from and
    # to which a step copies them; none if these are the rows
    counts: tuple[list[Tensor], list[Tensor]]
    refresh: Callable[[], None]  # takes over the groups' present ones


# ---- buckets -------------------------------------------------------------------------


def moving_group(
    group: dict[str, Any], hyper: DeviceHyperparameters, state: State
) -> MovingGroup:
    """Return the parameters of a group that move; there may be none."""
    return MovingGroup(
        hyper.algorithm,
        hyper.cells["lr"],
        hyper.cells["gamma"],
        hyper.values,
        [group],
        [p for p in group["params"] if moves(p, state)],
    )


def by_formula(moving_groups: Sequence[MovingGroup]) -> list[list[MovingGroup]]:
    """Return the groups that are moved together: groups of one formula, at one stage,
    whose hyperparameters then are vectors. Vectors have a value for each tensor, none
    for each of its parts: groups with norms of parts are moved one by one.
    """
    keys: list[Hashable] = []
    for i, moving in enumerate(moving_groups):
        clipped = map(moving.algorithm.num_clipped, (p.shape for p in moving.params))
        (group,) = moving.groups
        stage = group.get(STAGE_COUNT, 0) if moving.algorithm.has_stages else 0
        key = formula(moving.algorithm), stage
        keys.append(key if max(clipped) == 1 else i)
    return [[moving_groups[i] for i in members] for members in group_by(keys)]


def joined(moving_groups: Sequence[MovingGroup]) -> MovingGroup:
    """Return several groups of one formula on one device as one, with a value of each
    hyperparameter for each parameter (N,). ``refreshing`` fills them in.
    """
    if len(moving_groups) == 1:
        return moving_groups[0]
    algorithm = moving_groups[0].algorithm
    params = [p for moving in moving_groups for p in moving.params]
    num = 2 + len(numbers_of(algorithm))
    values = moving_groups[0].lr.new_zeros(num, len(params))
    lr, gamma, *others = values.unbind()
    groups = [group for moving in moving_groups for group in moving.groups]
    algorithm = with_numbers(algorithm, iter(others))
    return MovingGroup(algorithm, lr, gamma, values, groups, params)


def refreshing(
    moving_groups: Sequence[MovingGroup], whole: MovingGroup, params: Sequence[Tensor]
) -> Callable[[], None]:
    """Return a function by which ``whole`` takes over the present hyperparameters of
    its ``moving_groups``; ``params`` are theirs, in the order of buckets.
    """
    if len(moving_groups) == 1:
        return lambda: None
    cells = [
        cell
        for moving in moving_groups
        for cell in (moving.lr, moving.gamma, *numbers_of(moving.algorithm))
    ]
    number = {p: i for i, moving in enumerate(moving_groups) for p in moving.params}
    index = torch.tensor([number[p] for p in params], device=params[0].device)

    def refresh() -> None:
        table = torch.stack(cells).unflatten(0, (len(moving_groups), -1))
        torch.index_select(table.t(), 1, index, out=whole.values)

    return refresh


def build(
    moving_groups: Sequence[MovingGroup],
    labels: Mapping[Tensor, str],
    collectives: Collectives,
    is_printed: bool,
) -> tuple[MovingGroup, list[ParameterBucket]]:
    """Return groups that are moved together as one, and its buckets. Nothing is
    written.

    Args:
        moving_groups: of ``by_formula``.
        labels: the parameters' names in errors.
        collectives: of the ranks that hold the parameters.
        is_printed: whether kernels move parameters where they lie.
    """
    moving, own = joined(moving_groups), list[MatrixPreconditioner]()
    if len(moving_groups) > 1 and moving.algorithm.matrix_only:
        for each in moving_groups:
            own += [each.algorithm.matrix_preconditioner] * len(each.params)
    buckets = [
        ParameterBucket(
            algorithm=moving.algorithm,
            params=[moving.params[i] for i in members],
            labels=[labels[moving.params[i]] for i in members],
            collectives=collectives,
            own=[own[i] for i in members] if own else [],
        )
        for members in _by_dtype(
            _keys(moving.params, collectives, is_printed), moving.params
        )
    ]
    return moving, buckets


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
        got = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            local = collectives.local(value)
            if local.shape == piece.shape and local.device == piece.device:
                continue
            got = f"a tensor of shape {tuple(local.shape)} on {local.device}"
        raise ValueError(
            f"got {got} as state {buffer.key!r} of {what}, expected a tensor of shape "
            f"{tuple(piece.shape)} on {piece.device}, as the parameter is: change all "
            "state of a parameter with it, or delete optimizer.state[parameter], which "
            "then restarts"
        )


def join(
    moving_groups: Sequence[MovingGroup],
    moving: MovingGroup,
    buckets: list[ParameterBucket],
    state: State,
    is_printed: bool,
) -> BucketGroup:
    """Return buckets with the hyperparameters of ``moving``, as which ``moving_groups``
    move; ``state`` gets the steps of every parameter, as rows of one tensor if
    ``is_printed``: kernels copy none.
    """
    params = [p for bucket in buckets for p in bucket.params]
    algorithm, device = moving.algorithm, params[0].device
    t = torch.zeros(len(params), dtype=torch.float32, device=device)
    # cells are views of rows, whose offsets say which: an algorithm has no names of its
    # hyperparameters to look them up by
    cells = [moving.lr, moving.gamma]
    cells += numbers_of(algorithm) if formula(algorithm).is_shared else []
    size = moving.values[0].numel()
    hyper = Hyperparameters(
        algorithm=algorithm,
        lr=moving.lr,
        gamma=moving.gamma,
        t=t,
        dtypes=tuple(dict.fromkeys(working_dtype(b.params[0]) for b in buckets)),
        parts=norms_per_tensor([(len(b.params), b.num_clipped) for b in buckets]),
        values=moving.values,
        rows=tuple(cell.storage_offset() // size for cell in cells),
    )
    if is_printed:
        _view_steps(state, params, t)
        counts = list[Tensor](), list[Tensor]()
    else:
        counts = list(t.unbind()), _held_steps(state, params, t[0])
    refresh = refreshing(moving_groups, moving, params)
    refresh()
    return BucketGroup(
        hyper,
        [],
        buckets=buckets,
        groups=moving.groups,
        counts=counts,
        refresh=refresh,
    )


def _keys(
    params: Sequence[Tensor], collectives: Collectives, is_printed: bool
) -> list[Any]:
    """Return what parameters of one bucket share. Nothing here may differ from rank to
    rank: all ranks have to list their parameters in one order.
    """
    return [
        (p.shape, p.dtype, collectives.placement(p))
        if not is_printed and should_stack(p.shape) and p.is_contiguous()
        else i
        for i, p in enumerate(params)
    ]


def _by_dtype(keys: Sequence[Any], params: Sequence[Tensor]) -> list[list[int]]:
    """Return positions of parameters that share a bucket; buckets of one dtype follow
    each other.
    """
    dtypes = list(dict.fromkeys(p.dtype for p in params))
    return sorted(group_by(keys), key=lambda at: dtypes.index(params[at[0]].dtype))


def _held_steps(state: State, params: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Return the counts of steps that ``state`` holds of each parameter. Where there is
    none in the form of ``like``, the state gets one.
    """
    for p in params:
        before = state[p].get("step")
        if (
            type(before) is not Tensor
            or before.shape != like.shape
            or (before.dtype, before.device) != (like.dtype, like.device)
            or is_fake(before) != is_fake(like)
        ):
            number = torch.zeros_like(like)
            if before is not None:
                number.copy_(torch.as_tensor(before).reshape(like.shape))
            state[p]["step"] = number
    return [state[p]["step"] for p in params]


def _view_steps(state: State, params: Sequence[Tensor], t: Tensor) -> None:
    """Give ``state`` views of ``t`` (N,) as the parameters' counts of steps, with the
    values that it has.
    """
    views = t.unbind()
    for p, view in zip(params, views, strict=True):
        before = state[p].get("step")
        if before is not None and is_fake(torch.as_tensor(before)) == is_fake(t):
            view.copy_(torch.as_tensor(before).reshape(()))
        state[p]["step"] = view


def empty_rows(like: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Rows]:
    """Return an empty stack of tensors of one shape, and its rows."""
    shape = len(like), *like[0].shape
    stack = torch.empty(shape, dtype=dtype, device=like[0].device)
    return stack, stack.unbind()


# ---- their state ---------------------------------------------------------------------


def attach(bucket: ParameterBucket, state: State) -> None:
    """Give a bucket the tensors that ``state`` holds, and make the missing ones."""
    buffers = bucket.algorithm.buffers
    unwanted = STATE_KEYS - {buffer.key for buffer in buffers.values()}
    debiased = {buffer.key for buffer in buffers.values() if buffer.is_debiased}
    for p in bucket.params:
        state[p].setdefault("step", torch.zeros((), device="cpu"))
        for key in unwanted & set(state[p]):
            del state[p][key]  # of another rule: stale when that one returns
        if debiased - set(state[p]):
            # all of them start with the count of steps: one that is new beside an old
            # momentum would be far too small
            # (new tensors, so that a state dict that is refused has changed none)
            for key in debiased & set(state[p]):
                state[p][key] = torch.zeros_like(state[p][key])
            state[p]["step"] = torch.zeros((), device="cpu")
    for symbol, buffer in buffers.items():
        if buffer.home == "owner":
            continue
        bucket.state[symbol] = [
            bucket.collectives.local(_attached(bucket, buffer, p, piece, state[p]))
            for p, piece in zip(bucket.params, bucket.pieces, strict=True)
        ]


def _attached(
    bucket: ParameterBucket,
    buffer: Buffer,
    p: Tensor,
    piece: Tensor,
    entry: dict[str, Any],
) -> Tensor:
    """Return a buffer of a parameter as its ``entry`` of the state holds it: the tensor
    that is there, else a new tensor, with its values.
    """
    algorithm, local = bucket.algorithm, bucket.collectives.local
    before = entry.get(buffer.key)
    dtype = algorithm.dtype_of(buffer, piece)
    if isinstance(before, Tensor) and local(before).dtype == dtype:
        return before
    fresh = start_beside(algorithm, buffer, piece)
    if before is not None:
        fresh.copy_(local(before))
    held = entry[buffer.key] = bucket.collectives.wrap(fresh, p)
    return held


def _is_of_others(
    algorithm: Algorithm, p: Tensor, entry: Mapping[str, Any], numbers: Sequence[int]
) -> bool:
    """Return whether owners keep buffers of matrices of other shapes than the algorithm
    has: its ``sides`` or ``matrices`` have changed, so that they restart.

    Args:
        algorithm: what moves ``p``.
        p: a parameter.
        entry: of it, in the state.
        numbers: of its matrices to which the buffers belong.
    """
    for symbol in algorithm.owned:
        buffer = algorithm.buffers[symbol]
        value = entry.get(buffer.key)
        if value is None:
            continue
        if not algorithm.matrices.is_even(p.shape):
            sizes = entries_at_owner(algorithm, buffer, p.shape)
            if value.shape != (sum(sizes[n] for n in numbers),):
                return True
        elif value.shape[1:] != owned_shapes(algorithm.matrices, p.shape, buffer)[0]:
            return True
    return False


def attach_owned(
    buckets: Sequence[ParameterBucket],
    state: State,
    before: Mapping[Tensor, tuple[int, ...]] | None,
) -> None:
    """Give buckets the buffers whose home is with the owners of matrices: those that
    are in ``state``, or fresh ones.

    Args:
        buckets: all that share their exchanges.
        state: the optimizer's.
        before: the rows of parameters' parts in the layout before; None: there is none.
            The owners may differ from those then, as they do where other parameters
            share the exchanges: all ranks have handed over their buffers.
    """
    collectives = buckets[0].collectives
    leaves = [leaf for b in buckets for leaf in owned_leaves(b.algorithm, b.params)]
    owns = iter(collectives.owns(leaves))
    for bucket in buckets:
        algorithm = bucket.algorithm
        for p in bucket.params:
            ownership, buffers = next(owns), []
            parts = algorithm.matrices.part_rows(p.shape)
            every = range(algorithm.matrices.num_in(p.shape))
            here = ownership.numbers if before is None else every
            changed = before is not None and before.get(p, parts) != parts
            if changed or _is_of_others(algorithm, p, state[p], here):
                for symbol in algorithm.owned:
                    state[p].pop(algorithm.buffers[symbol].key, None)
                state[p]["step"] = torch.zeros((), device="cpu")
            for symbol in algorithm.owned:
                buffer = algorithm.buffers[symbol]
                value = state[p].get(buffer.key)
                if value is None:
                    value = start_at_owner(algorithm, buffer, p, ownership)
                elif before is not None:
                    sizes = entries_at_owner(algorithm, buffer, p.shape)
                    value = collectives.claim(value, ownership, sizes)
                state[p][buffer.key] = value
                buffers.append(value)
            bucket.owned.append(tuple(buffers))
            bucket.owns.append(ownership)
