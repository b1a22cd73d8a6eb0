"""One algorithm's state, and its trees as stacks and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt.functional.collectives import Collectives
from marsopt.functional.flat import (
    FlatGroup,
    check_matching,
    leaf_shape,
    rebuild,
)
from marsopt.functional.rows import matrix_rows
from marsopt.functional.step_types import (
    Decision,
    Hyperparameters,
    RuleGroup,
    Stack,
    several,
)
from marsopt.functional.trees import Tree, check_parameter, flatten, names
from marsopt.rules.algorithm import Algorithm, working_dtype
from marsopt.rules.checks import Number


class State(NamedTuple):
    """What one algorithm remembers: steps taken and skipped (0-D), and by symbol its
    buffers, each in the container of the parameters.
    """

    t: Tensor
    skipped: Tensor
    buffers: dict[str, Tree]

    @property
    def h(self) -> Tree | None:
        """Return the reference gradient; None where the algorithm keeps none."""
        return self.buffers.get("h")

    @property
    def x(self) -> Tree | None:
        """Return the parameters behind the lookahead; None without transport."""
        return self.buffers.get("x")

    @property
    def m(self) -> Tree:
        """Return the first moment."""
        return self.buffers["m"]

    @property
    def v(self) -> Tree:
        """Return the second moment."""
        return self.buffers["v"]


def zeros(algorithm: Algorithm, params: Tree) -> State:
    """Return the state before the first step.

    Raises:
        ValueError: a tensor that the algorithm cannot move.
    """
    leaves = flatten(params, "params")
    for name, x in zip(names(params), leaves, strict=True):
        what = f"params[{name!r}]"
        check_parameter(x, what, algorithm.state_dtype)
        shape, matrices = leaf_shape(params, x), algorithm.matrices
        if algorithm.matrix_only and not matrices.takes(shape):
            raise ValueError(
                f"got {what} of shape {tuple(shape)}, expected {matrices.expected} for "
                f"{algorithm}: use marsopt.mars(...), which gives other tensors to "
                "AdamW, or route them yourself"
            )
        matrices.check(shape, what)
    device = leaves[0].device
    # separate storage for every buffer: a shared one costs torch.compile a graph
    buffers = {
        symbol: rebuild(
            params,
            [
                x.clone()  # y is x at first, for gradients too
                if symbol == "x"
                else torch.zeros_like(
                    _without_last(
                        x, algorithm.num_missing(symbol, leaf_shape(params, x))
                    ),
                    dtype=algorithm.dtype_of(symbol, x),
                )
                for x in leaves
            ],
        )
        for symbol in algorithm.buffers
    }
    zero = torch.zeros((), dtype=torch.float32, device=device)
    return State(zero, zero.clone(), buffers)


def _without_last(x: Tensor, num_dims: int) -> Tensor:
    """Return a tensor like ``x``, a leaf or a stack of a FlatGroup, without so many of
    its dims. Its values mean nothing.
    """
    x = x.detach()
    for _ in range(num_dims):
        x = x.sum(-1) if x.shape[-1] == 0 else x.select(-1, 0)
    return x


def held(algorithm: Algorithm, symbol: str, params: Tree, state: State) -> list[Tensor]:
    """Return the leaves of one buffer of ``state`` in the order of ``params``.

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
    for name in names(params):
        x = params[name]
        num_missing = algorithm.num_missing(symbol, leaf_shape(params, x))
        expected = tuple(x.shape[: x.ndim - num_missing])
        if buffers[name].shape != expected:
            raise ValueError(
                f"got {what}[{name!r}] of shape {tuple(buffers[name].shape)}, expected "
                f"{expected}: make the state by init on them"
            )
    return [buffers[name] for name in names(params)]


def group(
    algorithm: Algorithm,
    params: Tree,
    grads: list[Tensor],
    reference: list[Tensor] | None,
    state: State,
    lr: Number,
    gamma: Number | None,
    collectives: Collectives,
) -> RuleGroup:
    """Return the tensors that take ``algorithm`` as stacks: one per tensor, or one per
    shape of a FlatGroup.
    """
    flat = isinstance(params, FlatGroup)
    buffers = {s: held(algorithm, s, params, state) for s in algorithm.buffers}
    h = buffers.get("h") if reference is None else reference

    def local(tensor: Tensor) -> Tensor:
        return tensor if flat else collectives.local(tensor).unsqueeze(0)

    stacks = []
    for i, x in enumerate(flatten(params, "params")):
        shape = leaf_shape(params, x)
        stacks.append(
            Stack(
                algorithm=algorithm,
                x=local(x),
                g=local(grads[i]),
                h=None if h is None else local(h[i]),
                buffers={symbol: local(tree[i]) for symbol, tree in buffers.items()},
                shape=shape,
                rows=matrix_rows(algorithm, x, shape, collectives),
            )
        )
    if gamma is None:
        gamma = 0.0 if algorithm.correction is None else algorithm.correction.gamma
    num = sum(stack.num_tensors for stack in stacks)
    dtypes = tuple(dict.fromkeys(working_dtype(stack.x) for stack in stacks))
    parts = several([(s.num_tensors, s.num_clipped) for s in stacks])
    return RuleGroup(
        Hyperparameters(algorithm, lr, gamma, state.t.expand(num), dtypes, parts),
        stacks,
    )


def trees(
    algorithm: Algorithm,
    params: Tree,
    stacks: Sequence[Stack],
    state: State,
    decision: Decision,
    collectives: Collectives,
) -> tuple[list[Tensor], State]:
    """Return the leaves (or stacks of a FlatGroup) and the state after a step."""
    flat, leaves = isinstance(params, FlatGroup), flatten(params, "params")

    def whole(parts) -> list[Tensor]:
        if flat:
            return list(parts)
        return [
            collectives.wrap(new.squeeze(0), like)
            for new, like in zip(parts, leaves, strict=True)
        ]

    buffers = {
        symbol: rebuild(params, whole([s.buffers[symbol] for s in stacks]))
        for symbol in algorithm.buffers
    }
    went = decision.finite.to(state.t.dtype)
    new = State(state.t + went, state.skipped + 1 - went, buffers)
    return whole([stack.x for stack in stacks]), new
