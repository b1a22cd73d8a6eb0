"""One algorithm's state over trees of tensors, and trees as stacks and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt.functional.binding import (
    allocate,
    matrix_rows,
    owned_starts,
    rounding_cuts,
)
from marsopt.functional.collectives import Collectives
from marsopt.functional.flat import (
    FlatGroup,
    check_matching,
    leaf_shape,
    rebuild,
)
from marsopt.functional.step_types import (
    Decision,
    Hyperparameters,
    Members,
    RuleGroup,
    Stack,
    norms_per_tensor,
    scalar_dtype,
)
from marsopt.functional.trees import Tree, check_parameter, flatten, names
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.buffers import Buffer, is_full
from marsopt.rules.checks import Number, can_read
from marsopt.rules.dtypes import working_dtype


class State(NamedTuple):
    """What one algorithm remembers: steps taken and skipped (0-D); by symbol its
    buffers, each in the container of the parameters; and with transport, where x is no
    such buffer, the numbers of the last step (num_behind,) from which it follows.
    """

    t: Tensor
    skipped: Tensor
    buffers: dict[str, Tree]
    behind: Tensor | None = None

    @property
    def h(self) -> Tree | None:
        """Return the reference gradient; None where the algorithm keeps none."""
        return self.buffers.get("h")

    @property
    def x(self) -> Tree | None:
        """Return the parameters behind the lookahead; None where ``Rule.iterate``
        computes them, or there is no lookahead.
        """
        return self.buffers.get("x")

    @property
    def m(self) -> Tree:
        """Return the first moment."""
        return self.buffers["m"]

    @property
    def v(self) -> Tree:
        """Return the second moment."""
        return self.buffers["v"]


def new_state(algorithm: Algorithm, params: Tree, collectives: Collectives) -> State:
    """Return the state before the first step.

    Raises:
        ValueError: a tensor that the algorithm cannot move.
    """
    leaves = flatten(params, "params")
    for name, x in zip(names(params), leaves, strict=True):
        what = f"params[{name!r}]"
        check_parameter(x, what, algorithm.state_dtype, algorithm.stochastic_rounding)
        shape, matrices = leaf_shape(params, x), algorithm.matrices
        if algorithm.matrix_only and not matrices.takes(shape):
            raise ValueError(
                f"got {what} of shape {tuple(shape)}, expected {matrices.expected} for "
                f"{algorithm}: use marsopt.mars(...), which gives other tensors to "
                "AdamW, or route them yourself"
            )
        matrices.check(shape, what)
    # separate storage for every buffer: a shared one costs torch.compile a graph
    buffers = {
        symbol: rebuild(params, _starts(algorithm, buffer, params, collectives))
        for symbol, buffer in algorithm.kept.items()
    }
    zero = torch.zeros((), dtype=torch.float32, device=leaves[0].device)
    behind = None
    if algorithm.num_behind:
        dtype = scalar_dtype(zero.device)
        behind = torch.zeros(algorithm.num_behind, dtype=dtype, device=zero.device)
    return State(zero, zero.clone(), buffers, behind)


def _starts(
    algorithm: Algorithm, buffer: Buffer, params: Tree, collectives: Collectives
) -> list[Tensor]:
    """Return a buffer before the first step, leaf by leaf or stack by stack."""
    flat, leaves = isinstance(params, FlatGroup), flatten(params, "params")
    if buffer.home == "owner":
        owned = owned_starts(algorithm, buffer, _unbound(params), collectives)
        if not flat:
            return owned
        rest = iter(owned)
        return [torch.stack([next(rest) for _ in x]) for x in leaves]
    if flat or is_full(buffer):  # of a DTensor, one like it
        return [allocate(algorithm, buffer, x, stacked=flat) for x in leaves]
    pieces = [
        allocate(algorithm, buffer, collectives.local(x), stacked=False) for x in leaves
    ]
    return [collectives.wrap(p, x) for p, x in zip(pieces, leaves, strict=True)]


def _unbound(params: Tree) -> list[Tensor]:
    """Return every parameter, those of a FlatGroup too."""
    leaves = flatten(params, "params")
    if not isinstance(params, FlatGroup):
        return leaves
    return [x for stack in leaves for x in stack.unbind()]


def held(algorithm: Algorithm, symbol: str, params: Tree, state: State) -> list[Tensor]:
    """Return the leaves of one buffer of ``state`` in the order of ``params``, in the
    algorithm's dtype where that is the wider one: as ``init`` made them, unless they
    were saved by a rule of another ``state_dtype``.

    Raises:
        ValueError: it has none of this symbol, or one with other names or shapes than
            the parameters'.
    """
    if symbol not in state.buffers:
        raise ValueError(
            f"got a state without {symbol}, expected one of a rule with the same "
            "options: clip, amsgrad and correction decide what it holds"
        )
    what, buffers = f"state.{symbol}", state.buffers[symbol]
    check_matching(params, buffers, what)
    buffer, flat = algorithm.buffers[symbol], isinstance(params, FlatGroup)
    for name in names(params):
        x = params[name]
        if buffer.home == "owner":
            continue  # how many matrices have their owner here, its owner knows
        expected = buffer.shape(leaf_shape(params, x), algorithm.matrices)
        actual = buffers[name].shape[1:] if flat else buffers[name].shape
        if actual != expected:
            raise ValueError(
                f"got {what}[{name!r}] of shape {tuple(buffers[name].shape)}, expected "
                f"{(*x.shape[:1], *expected) if flat else tuple(expected)}: make the "
                "state by init on them"
            )
    return [
        buffers[name].to(
            torch.promote_types(
                buffers[name].dtype, algorithm.dtype_of(buffer, params[name])
            )
        )
        for name in names(params)
    ]


def check_behind(algorithm: Algorithm, state: State) -> Tensor | None:
    """Return the numbers from which x follows, or None where it is a buffer.

    Raises:
        ValueError: the state has x itself where it is to follow.
    """
    if not algorithm.num_behind:
        return None
    if state.behind is None:
        raise ValueError(
            "got a state without the numbers of its last step, expected one of a rule "
            "with the same options: store_iterate=True takes a state that has x itself"
        )
    return state.behind


def iterates(
    algorithm: Algorithm, params: Tree, state: State, collectives: Collectives
) -> list[Tensor]:
    """Return what parameters are ahead of, leaf by leaf or stack by stack.

    Raises:
        ValueError: a state of another rule or of other parameters.
    """
    numbers = check_behind(algorithm, state)
    if numbers is None:
        return held(algorithm, "x", params, state)
    flat, leaves = isinstance(params, FlatGroup), flatten(params, "params")
    declared = algorithm.preconditioner.buffers
    buffers = {symbol: held(algorithm, symbol, params, state) for symbol in declared}
    xs = []
    for i, y in enumerate(leaves):
        local = (lambda x: x) if flat else collectives.local
        moments = {symbol: local(tree[i]) for symbol, tree in buffers.items()}
        behind = numbers.to(y.dtype).unbind()
        x = algorithm.preconditioner.behind(local(y), moments, behind)
        xs.append(x if flat else collectives.wrap(x, y))
    return xs


def bind(
    algorithm: Algorithm,
    params: Tree,
    grads: list[Tensor],
    operands: dict[str, list[Tensor]],
    state: State,
    lr: Number,
    gamma: Number | None,
    collectives: Collectives,
    count: int,
) -> tuple[RuleGroup, list[Members]]:
    """Return the tensors that take ``algorithm`` as stacks, one per tensor or one per
    shape of a FlatGroup, and their members.
    """
    flat = isinstance(params, FlatGroup)
    buffers = {s: held(algorithm, s, params, state) for s in algorithm.kept}
    at_owner = algorithm.matrix_preconditioner.owned if algorithm.matrix_only else ()
    sharded = {s: tree for s, tree in buffers.items() if s not in at_owner}

    def local(tensor: Tensor, like: Tensor | None = None) -> Tensor:
        return tensor if flat else collectives.local(tensor, like).unsqueeze(0)

    stacks, members = [], []
    for i, x in enumerate(flatten(params, "params")):
        shape = leaf_shape(params, x)
        stacks.append(
            Stack(
                algorithm=algorithm,
                x=local(x),
                g=local(grads[i], x),
                buffers={symbol: local(tree[i]) for symbol, tree in sharded.items()},
                shape=shape,
                rows=matrix_rows(algorithm, x, shape, collectives),
                cuts=rounding_cuts(algorithm, x, collectives),
                given={symbol: local(tree[i], x) for symbol, tree in operands.items()},
            )
        )
        owner_buffers = [buffers[symbol][i] for symbol in at_owner]
        owned = list(
            zip(*(o.unbind() if flat else [o] for o in owner_buffers), strict=True)
        )
        members.append(Members(list(x.unbind()) if flat else [x], owned))
    if gamma is None:
        gamma = 0.0 if algorithm.correction is None else algorithm.correction.gamma
    num = sum(stack.num_tensors for stack in stacks)
    behind = check_behind(algorithm, state)
    dtypes = tuple(dict.fromkeys(working_dtype(stack.x) for stack in stacks))
    parts = norms_per_tensor([(s.num_tensors, s.num_clipped) for s in stacks])
    hyper = Hyperparameters(
        algorithm,
        lr,
        gamma,
        state.t.expand(num),
        dtypes,
        behind=None if behind is None else behind.expand(num, -1),
        parts=parts,
        unread_lr=lr if isinstance(lr, Tensor) and not can_read(lr) else None,
    )
    return RuleGroup(hyper, stacks, count), members


def trees(
    algorithm: Algorithm,
    params: Tree,
    stacks: Sequence[Stack],
    owned: Sequence[list[tuple[Tensor, ...]]],
    state: State,
    decision: Decision,
    behind: Tensor | None,
    collectives: Collectives,
) -> tuple[list[Tensor], State]:
    """Return the leaves (or stacks of a FlatGroup) and the state after a step."""
    flat, leaves = isinstance(params, FlatGroup), flatten(params, "params")

    def whole(parts: Iterable[Tensor]) -> list[Tensor]:
        if flat:
            return list(parts)
        return [
            collectives.wrap(new.squeeze(0), like)
            for new, like in zip(parts, leaves, strict=True)
        ]

    at_owner = algorithm.matrix_preconditioner.owned if algorithm.matrix_only else ()
    buffers = {}
    for symbol in algorithm.kept:
        if symbol in at_owner:
            n = at_owner.index(symbol)
            by_stack = [[t[n] for t in o] for o in owned]
            values = [torch.stack(v) if flat else v[0] for v in by_stack]
        else:
            values = whole([s.buffers[symbol] for s in stacks])
        buffers[symbol] = rebuild(params, values)
    went = decision.finite.to(state.t.dtype)
    last = None if behind is None else behind[0]  # all tensors have the same
    new = State(state.t + went, state.skipped + 1 - went, buffers, last)
    return whole([stack.x for stack in stacks]), new
