"""One algorithm's state, and its trees as stacks and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt.functional.collectives import Collectives
from marsopt.functional.flat import (
    FlatGroup,
    leaf_shape,
    match_state,
    over_dims,
    rebuild,
)
from marsopt.functional.step import Decision, Hyperparameters, RuleGroup, Stack
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


def is_matrix(shape: torch.Size) -> bool:
    """Exactly two dims: a convolution kernel is no matrix, an embedding is one (the
    authors' rule).
    """
    return len(shape) == 2


def zeros(algorithm: Algorithm, params: Tree) -> State:
    """Return the state before the first step.

    Raises:
        ValueError: a tensor that the algorithm cannot move.
    """
    leaves = flatten(params, "params")
    for name, x in zip(names(params), leaves, strict=True):
        what = f"params[{name!r}]"
        check_parameter(x, what, algorithm.state_dtype)
        shape = leaf_shape(params, x)
        if algorithm.matrix_only and not is_matrix(shape):
            raise ValueError(
                f"got {what} of shape {tuple(shape)}, expected a matrix (ndim 2) for "
                f"{algorithm}: use marsopt.mars(...), which gives other tensors to "
                "AdamW, or route them yourself"
            )
    device = leaves[0].device
    # separate storage for every buffer: a shared one costs torch.compile a graph
    buffers = {
        symbol: rebuild(
            params,
            [
                x.detach().clone()  # y is x at first
                if symbol == "x"
                else torch.zeros_like(
                    over_dims(params, x, dims), dtype=algorithm.dtype_of(symbol, x)
                )
                for x in leaves
            ],
        )
        for symbol, dims in algorithm.buffers.items()
    }
    zero = torch.zeros((), dtype=torch.float32, device=device)
    return State(zero, zero.clone(), buffers)


def held(state: State, symbol: str) -> Tree:
    """Return one buffer of ``state``.

    Raises:
        ValueError: it has none of this symbol.
    """
    if symbol not in state.buffers:
        raise ValueError(
            f"got a state without {symbol}, expected one of a rule with the same "
            "options: clip, amsgrad and correction decide what it holds"
        )
    return state.buffers[symbol]


def _buffers(algorithm: Algorithm, params: Tree, state: State) -> dict[str, list]:
    """Return the leaves of every buffer of ``state``, checked."""
    return {
        symbol: match_state(params, held(state, symbol), f"state.{symbol}", dims)
        for symbol, dims in algorithm.buffers.items()
    }


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
    buffers = _buffers(algorithm, params, state)
    h = buffers.get("h") if reference is None else reference

    def local(tensor: Tensor) -> Tensor:
        return tensor if flat else collectives.local(tensor).unsqueeze(0)

    stacks = [
        Stack(
            algorithm=algorithm,
            x=local(x),
            g=local(grads[i]),
            h=None if h is None else local(h[i]),
            buffers={symbol: local(tree[i]) for symbol, tree in buffers.items()},
            shape=leaf_shape(params, x),
        )
        for i, x in enumerate(flatten(params, "params"))
    ]
    if gamma is None:
        gamma = 0.0 if algorithm.correction is None else algorithm.correction.gamma
    num = sum(stack.num_tensors for stack in stacks)
    dtypes = tuple(dict.fromkeys(working_dtype(stack.x) for stack in stacks))
    return RuleGroup(
        Hyperparameters(algorithm, lr, gamma, state.t.expand(num), dtypes), stacks
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

    def whole(parts, dims=None) -> list[Tensor]:
        if flat:
            return list(parts)
        return [
            collectives.wrap(new.squeeze(0), like, dims)
            for new, like in zip(parts, leaves, strict=True)
        ]

    buffers = {
        symbol: rebuild(params, whole([s.buffers[symbol] for s in stacks], dims))
        for symbol, dims in algorithm.buffers.items()
    }
    went = decision.finite.to(state.t.dtype)
    new = State(state.t + went, state.skipped + 1 - went, buffers)
    return whole([stack.x for stack in stacks]), new
