"""One algorithm's state over trees of tensors, and trees as groups of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt.functional.buffers import (
    check_like,
    check_parameter,
    index_of_leaves,
    leaf_of,
    owned_starts,
    start_beside,
)
from marsopt.functional.trees import (
    FlatGroup,
    Name,
    Tree,
    check_matching,
    flatten,
    names,
    rebuild,
    subtree,
)
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.dtypes import working_dtype
from marsopt.step.owners import Collectives, Tensors
from marsopt.step.step import Group, Leaf
from marsopt.step.tables import Decision, Inputs


class State(NamedTuple):
    """The memory of one algorithm: steps taken and skipped (0-D), and by symbol its
    buffers, each in the container of the parameters.
    """

    t: Tensor
    skipped: Tensor
    buffers: dict[str, Tree]

    @property
    def h(self) -> Tree | None:
        """Return the reference gradient; None if the algorithm keeps none."""
        return self.buffers.get("h")

    @property
    def m(self) -> Tree:
        """Return the first moment."""
        return self.buffers["m"]

    @property
    def v(self) -> Tree:
        """Return the second moment."""
        return self.buffers["v"]


class Leaves:
    """The leaves of a tree that one algorithm moves: the stacks of a FlatGroup, else
    every tensor by itself.

    Args:
        algorithm: the algorithm that moves them.
        params: the tree of all parameters.
        part: the names of these leaves; None: all.
        collectives: of the ranks that hold them.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        params: Tree,
        part: Sequence[Name] | None,
        collectives: Collectives,
    ) -> None:
        self.algorithm, self.collectives, self._part = algorithm, collectives, part
        self.tree = subtree(params, part)
        self.tensors, self.names = flatten(self.tree, "params"), names(self.tree)
        self.is_packed = isinstance(params, FlatGroup)
        # of one whole parameter each
        self.shapes = [x.shape[1:] if self.is_packed else x.shape for x in self.tensors]

    def matching(self, tree: Tree, label: str) -> list[Tensor]:
        """Return the pieces of the leaves of these names of a tree like the
        parameters'.

        Raises:
            ValueError: a leaf has another shape or dtype.
        """
        other = subtree(tree, self._part)
        for name, x in zip(self.names, self.tensors, strict=True):
            check_like(x, other[name], f"{label}[{name!r}]")
        return self.pieces([other[name] for name in self.names], self.tensors)

    def pieces(
        self, tensors: Sequence[Tensor], like: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Return the pieces that lie here of tensors that lie as the leaves do.

        Args:
            tensors: one for each leaf.
            like: the leaves, of gradients, which may lie otherwise.
        """
        if self.is_packed:
            return list(tensors)
        local = self.collectives.local
        if like is None:
            return list(map(local, tensors))
        return [local(tensor, x) for tensor, x in zip(tensors, like, strict=True)]

    def whole(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return pieces as tensors that lie as the leaves do: inverse of ``pieces``."""
        if self.is_packed:
            return list(pieces)
        pairs = zip(pieces, self.tensors, strict=True)
        return [self.collectives.wrap(piece, x) for piece, x in pairs]

    def rows(self, leaf: Tensor) -> list[Tensor]:
        """Return the part of each parameter in a leaf, or in an owner's buffer."""
        return list(leaf.unbind()) if self.is_packed else [leaf]

    def joined(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the inverse of ``rows``."""
        return torch.stack(list(rows)) if self.is_packed else rows[0]


def new_state(leaves: Leaves) -> State:
    """Return the state before the first step.

    Raises:
        ValueError: a tensor that the algorithm cannot move.
    """
    algorithm = leaves.algorithm
    matrices, dtype = algorithm.matrices, algorithm.state_dtype
    for name, x, shape in zip(leaves.names, leaves.tensors, leaves.shapes, strict=True):
        label = f"params[{name!r}]"
        check_parameter(x, label, dtype, algorithm.stochastic_rounding)
        if algorithm.matrix_only and not matrices.takes(shape):
            raise ValueError(
                f"got {label} of shape {tuple(shape)}, expected {matrices.expected} "
                f"for {algorithm}: use marsopt.mars(...), which gives other tensors to "
                "AdamW, or route them yourself"
            )
        matrices.check(shape, label)
    # separate storage for every buffer: a shared one costs torch.compile a graph
    buffers = {
        symbol: rebuild(leaves.tree, _starts(leaves, buffer))
        for symbol, buffer in algorithm.kept.items()
    }
    zero = torch.zeros((), dtype=torch.float32, device=leaves.tensors[0].device)
    return State(zero, zero.clone(), buffers)


def _starts(leaves: Leaves, buffer: Buffer) -> list[Tensor]:
    """Return a buffer before the first step, for each leaf."""
    algorithm = leaves.algorithm
    if buffer.home == "owner":
        by_leaf = [leaves.rows(x) for x in leaves.tensors]
        params = [p for rows in by_leaf for p in rows]
        starts = iter(owned_starts(algorithm, buffer, params, leaves.collectives))
        return [leaves.joined([next(starts) for _ in rows]) for rows in by_leaf]
    return [start_beside(algorithm, buffer, x) for x in leaves.tensors]


def held(leaves: Leaves, symbol: str, state: State) -> list[Tensor]:
    """Return one buffer of ``state``, in the order of the leaves, in the dtype of the
    state or the algorithm's, whichever is wider: as ``init`` made it, unless it was
    saved by a rule of another ``state_dtype``.

    Raises:
        ValueError: the state has no buffer of this symbol, or its names or shapes are
            not the parameters'.
    """
    if symbol not in state.buffers:
        raise ValueError(
            f"got a state without {symbol}, expected one of a rule with the same "
            "options: clip, amsgrad and correction decide its buffers"
        )
    label, tree = f"state.{symbol}", state.buffers[symbol]
    check_matching(leaves.tree, tree, label)
    algorithm, tensors = leaves.algorithm, [tree[name] for name in leaves.names]
    buffer = algorithm.buffers[symbol]
    for name, x, tensor in zip(leaves.names, leaves.tensors, tensors, strict=True):
        if buffer.home == "owner":
            break  # how many matrices have their owner here, their owner knows
        if tensor.shape != x.shape:
            raise ValueError(
                f"got {label}[{name!r}] of shape {tuple(tensor.shape)}, expected "
                f"{tuple(x.shape)}: make the state by init on them"
            )
    dtypes = [algorithm.dtype_of(buffer, x) for x in leaves.tensors]
    return [
        tensor.to(torch.promote_types(tensor.dtype, dtype))
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]


def bind(
    leaves: Leaves,
    grads: Tree,
    reference: Tree | None,
    state: State,
    lr: Number,
    gamma: Number | None,
    count: int,
) -> list[Bound]:
    """Return the leaves as groups of a step, a group for each working dtype.

    Args:
        leaves: of one algorithm.
        grads, reference: as ``Rule.step`` has them, of all parameters.
        state: of these leaves.
        lr, gamma, count: as ``Rule.step`` has them.

    Raises:
        ValueError: gradients or a state that do not belong to the leaves.
    """
    algorithm, tensors = leaves.algorithm, leaves.tensors
    at_owner = algorithm.owned
    kept = {symbol: held(leaves, symbol, state) for symbol in algorithm.kept}
    owned = [kept.pop(symbol) for symbol in at_owner]
    buffers = {symbol: leaves.pieces(tree) for symbol, tree in kept.items()}
    if reference is not None and algorithm.h_from is not None:
        buffers["h"] = leaves.matching(reference, "reference")
    g = leaves.matching(grads, "grads")
    if gamma is None:
        gamma = 0.0 if algorithm.correction is None else algorithm.correction.gamma
    of_dtypes: dict[torch.dtype, list[int]] = {}
    step_leaves = []
    for i, (x, leaf) in enumerate(zip(leaves.pieces(tensors), tensors, strict=True)):
        of_dtypes.setdefault(working_dtype(x), []).append(i)
        by_param = zip(*(leaves.rows(buffer[i]) for buffer in owned), strict=True)
        of_x = {symbol: pieces[i] for symbol, pieces in buffers.items()}
        step_leaves.append(
            leaf_of(
                algorithm,
                leaves.shapes[i],
                x,
                of_x,
                leaves.rows(leaf),
                leaves.collectives,
                is_stack=leaves.is_packed,
            )._replace(owned=list(by_param))
        )
    bound = []
    for dtype, positions in of_dtypes.items():
        of_group = [step_leaves[i] for i in positions]
        shapes = [leaves.shapes[i] for i in positions]
        index = index_of_leaves(algorithm, shapes, of_group)
        num = sum(len(leaf.params) for leaf in of_group)
        inputs = Inputs(algorithm, lr, gamma, index, state.t.expand(num), dtype)
        group = Group(algorithm, of_group, inputs, count)
        bound.append(Bound(group, [g[i] for i in positions], positions))
    return bound


class Bound(NamedTuple):
    """A group of a step, its gradients, and which leaves these are, by number."""

    group: Group
    grads: list[Tensor]
    positions: list[int]


def unbind(
    leaves: Leaves,
    moved: Sequence[Leaf],
    owned: Sequence[Sequence[Tensors | None]],
    state: State,
    decision: Decision,
) -> tuple[list[Tensor], State]:
    """Return the leaves and their state after a step: inverse of ``bind``.

    Args:
        leaves: as given to ``bind``.
        moved: of each leaf, the step's.
        owned: of each leaf, the buffers that its owners keep (``advance``).
        state: before the step.
        decision: the step's.
    """
    algorithm = leaves.algorithm
    at_owner = algorithm.owned
    buffers = {}
    for symbol in algorithm.kept:
        if symbol in at_owner:
            n = at_owner.index(symbol)
            # new tensors for all: nothing is written in place
            by_leaf = [[o[n] for o in of_leaf if o is not None] for of_leaf in owned]
            tensors = [leaves.joined(rows) for rows in by_leaf]
        else:
            tensors = leaves.whole([leaf.buffers[symbol] for leaf in moved])
        buffers[symbol] = rebuild(leaves.tree, tensors)
    went = decision.finite.to(state.t.dtype)
    new = State(state.t + went, state.skipped + 1 - went, buffers)
    return leaves.whole([leaf.x for leaf in moved]), new
