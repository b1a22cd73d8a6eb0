"""One algorithm's state over trees of tensors, and trees as groups of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.functional.buffers import (
    buffer_shape,
    check_like,
    check_parameter,
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
from marsopt.rules.checks import Number
from marsopt.rules.component import Algorithm
from marsopt.rules.formats import CODED, LOW_BITS, SCALE_DTYPE, check_piece
from marsopt.rules.numerics import scalar_dtype, working_dtype
from marsopt.step.decide import Decision, Inputs
from marsopt.step.leaf import index_of, leaf_of
from marsopt.step.owners import Collectives, OwnedTensors
from marsopt.step.step import Group


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


class RouteLeaves:
    """The leaves of a tree that an algorithm updates: the stacks of a FlatGroup, or the
    tensors.

    Args:
        algorithm: the algorithm that updates them.
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
        places = {name: place for place, name in enumerate(names(params))}
        self.numbers = [places[name] for name in self.names]  # in the tree
        if algorithm.state_dtype == CODED:
            # a step returns contiguous tensors, whose state would have another form
            self.tensors = [x.contiguous() for x in self.tensors]
        self.is_packed = isinstance(params, FlatGroup)
        # a stack holds several parameters of a shape
        self.shapes = [x.shape[1:] if self.is_packed else x.shape for x in self.tensors]
        pairs = zip(self.tensors, self.shapes, strict=True)
        self.algorithms = [algorithm.of_tensor(*pair) for pair in pairs]

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
        """Return this process's pieces of tensors that are sharded as the leaves are.

        Args:
            tensors: a tensor for each leaf.
            like: the leaves, if gradients may be sharded in another way.
        """
        if self.is_packed:
            return list(tensors)
        local = self.collectives.local
        if like is None:
            return list(map(local, tensors))
        return [local(tensor, x) for tensor, x in zip(tensors, like, strict=True)]

    def whole(self, pieces: Sequence[Tensor], name: str) -> list[Tensor]:
        """Return the pieces of x, or of the buffer of this name, as tensors that are
        sharded as the leaves are: inverse of ``pieces``.
        """
        if self.is_packed:
            return list(pieces)
        has = [
            name == "x" or name in algorithm.buffers for algorithm in self.algorithms
        ]
        return [
            self.collectives.wrap(piece, x) if is_held else piece
            for piece, x, is_held in zip(pieces, self.tensors, has, strict=True)
        ]

    def rows(self, leaf: Tensor) -> list[Tensor]:
        """Return the part of each parameter in a leaf, or in an owner's buffer."""
        return list(leaf.unbind()) if self.is_packed else [leaf]

    def repacked(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the inverse of ``rows``."""
        return torch.stack(list(rows)) if self.is_packed else rows[0]


def new_state(leaves: RouteLeaves) -> State:
    """Return the state before the first step.

    Raises:
        ValueError: a tensor that the algorithm cannot move.
    """
    algorithm = leaves.algorithm
    matrices, dtype = algorithm.matrices, algorithm.state_dtype
    for i, (name, x) in enumerate(zip(leaves.names, leaves.tensors, strict=True)):
        label, shape = f"params[{name!r}]", leaves.shapes[i]
        if leaves.algorithms[i].state_dtype == CODED:
            check_piece(leaves.pieces([x])[0], label)
        options = algorithm.stochastic_rounding, algorithm.master_weight_bits
        check_parameter(x, label, dtype, *options)
        if algorithm.matrix_only and not matrices.takes(shape):
            raise ValueError(
                f"got {label} of shape {tuple(shape)}, expected {matrices.expected} "
                f"for {algorithm}: use marsopt.mars(...), which gives other tensors to "
                "AdamW, or route them yourself"
            )
        matrices.check(shape, label)
    # separate storage for every buffer: a shared one costs torch.compile a graph
    buffers = {
        symbol: rebuild(leaves.tree, _starts(leaves, symbol))
        for symbol in algorithm.kept
    }
    zero = torch.zeros((), dtype=torch.float32, device=leaves.tensors[0].device)
    return State(zero, zero.clone(), buffers)


def _starts(leaves: RouteLeaves, symbol: str) -> list[Tensor]:
    """Return a buffer before the first step, for each leaf; scales of a leaf without
    codes have no element.
    """
    algorithm = leaves.algorithm
    buffer = algorithm.buffers[symbol]
    if buffer.home == "owner":
        by_leaf = [leaves.rows(x) for x in leaves.tensors]
        params = [p for rows in by_leaf for p in rows]
        owned = iter(owned_starts(algorithm, buffer, params, leaves.collectives))
        return [leaves.repacked([next(owned) for _ in rows]) for rows in by_leaf]
    if algorithm.state_dtype != CODED:  # state of a DTensor is a DTensor
        return [start_beside(algorithm, buffer, x) for x in leaves.tensors]
    starts = [
        start_beside(variant, buffer, piece)
        if symbol in variant.buffers
        else piece.new_zeros(0, dtype=SCALE_DTYPE)
        for variant, piece in zip(
            leaves.algorithms, leaves.pieces(leaves.tensors), strict=True
        )
    ]
    return leaves.whole(starts, symbol)


def state_leaves(leaves: RouteLeaves, symbol: str, state: State) -> list[Tensor]:
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
    for i, (name, tensor) in enumerate(zip(leaves.names, tensors, strict=True)):
        if buffer.home == "owner":
            break  # how many matrices have their owner here, their owner knows
        variant, x = leaves.algorithms[i], leaves.tensors[i]
        shape = buffer_shape(variant, buffer, x)
        if symbol in variant.buffers and tensor.shape != shape:
            raise ValueError(
                f"got {label}[{name!r}] of shape {tuple(tensor.shape)}, expected "
                f"{tuple(shape)}: make the state by init on them"
            )
        dtype = algorithm.dtype_of(buffer, x)
        if symbol in LOW_BITS and tensor.dtype != dtype:
            raise ValueError(
                f"got {label}[{name!r}] of {tensor.dtype}, expected {dtype}: make the "
                "state by init of a rule with this master_weight_bits"
            )
    pairs = zip(leaves.algorithms, leaves.tensors, strict=True)
    dtypes = [algorithm.dtype_of(buffer, x) for algorithm, x in pairs]
    return [
        tensor.to(torch.promote_types(tensor.dtype, dtype))
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]


class Bound(NamedTuple):
    """A group of a step, its gradients, and which leaves these are, by number."""

    group: Group
    grads: list[Tensor]  # (P, n)
    positions: list[int]


def bind(
    leaves: RouteLeaves,
    grads: Tree,
    reference: Tree | None,
    state: State,
    lr: Number,
    gamma: Number | None,
    count: int,
) -> list[Bound]:
    """Return the leaves as groups of a step, a group for each working dtype; leaves
    with codes are a group of their own.

    Args:
        leaves: of one algorithm.
        grads, reference: as ``Rule.step`` has them, of all parameters.
        state: of these leaves.
        lr, gamma, count: as ``Rule.step`` has them.

    Raises:
        ValueError: gradients or a state that do not belong to the leaves.
    """
    algorithm, tensors = leaves.algorithm, leaves.tensors
    trees = {symbol: state_leaves(leaves, symbol, state) for symbol in algorithm.kept}
    owned = [trees.pop(symbol) for symbol in algorithm.owned]
    buffers = {symbol: leaves.pieces(tree) for symbol, tree in trees.items()}
    if reference is not None and algorithm.h_from is not None:
        buffers["h"] = leaves.matching(reference, "reference")
    g = leaves.matching(grads, "grads")
    positions_by_form: dict[tuple[Algorithm, torch.dtype], list[int]] = {}
    step_leaves = []
    for i, (x, leaf) in enumerate(zip(leaves.pieces(tensors), tensors, strict=True)):
        variant = leaves.algorithms[i]
        positions_by_form.setdefault((variant, working_dtype(x)), []).append(i)
        params, piece = leaves.rows(leaf), leaves.rows(x)[0]
        shape, number = leaves.shapes[i], leaves.numbers[i]
        bare, parts = leaf_of(variant, shape, piece, params, leaves.collectives, number)
        num = len(bare.norms)
        leaf_buffers = {
            k: pieces[i] for k, pieces in buffers.items() if k in variant.buffers
        }
        step_leaves.append(
            bare._replace(
                x=x.reshape(num, parts.size),
                buffers={
                    k: b.reshape(num, b.numel() // num) for k, b in leaf_buffers.items()
                },
                owned=list(zip(*(leaves.rows(b[i]) for b in owned), strict=True)),
            )
        )
    numbers = _row(algorithm.defaults(lr, gamma), tensors[0].device)
    bound = []
    for (variant, dtype), positions in positions_by_form.items():
        group_leaves = [step_leaves[i] for i in positions]
        num = sum(len(leaf.params) for leaf in group_leaves)
        t = state.t.expand(num)
        index = index_of(group_leaves, variant.has_noise)
        inputs = Inputs(variant, numbers, None, index, t, dtype)
        stages = []
        if algorithm.has_stages:
            stage = algorithm.matrix_preconditioner.stage
            stages = [stage(count, number) for number in range(num)]
        group = Group(inputs, group_leaves, stages)
        pairs = zip(group_leaves, positions, strict=True)
        group_grads = [leaf.as_parts(g[i]) for leaf, i in pairs]
        bound.append(Bound(group, group_grads, positions))
    return bound


def _row(numbers: Sequence[Number], device: torch.device) -> Tensor:
    """Return the numbers of a step as a table of one row (1, K)."""
    options: Any = dict(dtype=scalar_dtype(device), device=device)
    if not any(isinstance(number, Tensor) for number in numbers):
        return torch.tensor([numbers], **options)
    cells = [
        n.to(**options).reshape(())
        if isinstance(n, Tensor)
        else torch.tensor(n, **options)
        for n in numbers
    ]
    return torch.stack(cells)[None]


def unbind(
    leaves: RouteLeaves,
    values: Sequence[Mapping[str, Tensor]],
    owned: Sequence[Sequence[OwnedTensors]],
    state: State,
    decision: Decision,
) -> tuple[list[Tensor], State]:
    """Return the leaves and their state after a step: inverse of ``bind``.

    Args:
        leaves: as given to ``bind``.
        values: of each leaf, its x and buffers (P, n) after the step.
        owned: of each leaf and param, the buffers that its owners keep.
        state: before the step.
        decision: the step's.
    """
    algorithm = leaves.algorithm
    at_owner = algorithm.owned

    def whole(name: str, before: Sequence[Tensor]) -> list[Tensor]:
        pieces = leaves.pieces(before)
        pairs = zip(values, pieces, strict=True)
        new = [v[name].view(p.shape) if name in v else p for v, p in pairs]
        return leaves.whole(new, name)

    buffers = {}
    for symbol in algorithm.kept:
        if symbol in at_owner:
            n = at_owner.index(symbol)
            # new tensors for all: nothing is written in place
            tensors = [leaves.repacked([o[n] for o in of_leaf]) for of_leaf in owned]
        else:
            tree = state.buffers[symbol]
            tensors = whole(symbol, [tree[name] for name in leaves.names])
        buffers[symbol] = rebuild(leaves.tree, tensors)
    went = decision.finite.to(state.t.dtype)
    new = State(state.t + went, state.skipped + 1 - went, buffers)
    return whole("x", leaves.tensors), new
