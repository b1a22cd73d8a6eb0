"""The runner of graphs: one torch.compile graph a formula, over parts (P, n) of any
size; small tensors are copied into rows, which are parts to it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from marsopt.rules.algorithm import Algorithm
from marsopt.rules.dtypes import working_dtype
from marsopt.step.compiling import (
    Graph,
    announce,
    backend_failed,
    compile_graph,
    declined,
    graph_of,
    is_spent,
    named_range,
)
from marsopt.step.owners import Tensors
from marsopt.step.parts import dense_view, laid_as, numbers_of_elements
from marsopt.step.step import (
    ROW,
    Gradients,
    Group,
    Leaf,
    Place,
    Result,
    applied,
    products,
    updated,
)
from marsopt.step.tables import (
    Decision,
    Formula,
    StepScalars,
    formula,
    num_columns,
    scalar_dtype,
)

SMALL = 4096  # elements; a copy of fewer costs less than a call of a graph
WIDTH = 64  # elements of a row of small tensors, or a divisor: a cache line or more

Say = Callable[[int, str], None]


# ---- formulas over lists of tensors --------------------------------------------------


class Kind(NamedTuple):
    """A formula's graph: everything but its tensors."""

    formula: Formula
    symbols: tuple[str, ...]  # of buffers
    num_columns: int  # of the table
    has_positions: bool  # elements have numbers, for stochastic rounding
    has_output: bool  # matrices for owners are written into a tensor

    def scalars(self, ok: Tensor, table: Tensor) -> StepScalars:
        """Return the scalars as factors of (P, n)."""
        columns = [table[:, k, None] for k in range(self.num_columns)]
        return StepScalars.read(self.formula.algorithm, ok[:, None], columns)


class Products(NamedTuple):
    """The graph of ``products``: everything but its tensors."""

    is_long: bool
    has_h: bool


def measure(kind: Products, tensors: list[Tensor]) -> Tensor:
    """Return the inner products of g and, if there is one, h, both (P, n)."""
    return products(tensors[0], tensors[1] if kind.has_h else None, kind.is_long)


def update(kind: Kind, tensors: list[Tensor]) -> None:
    """Write new values into x (but of a matrix algorithm) and the buffers; the matrices
    for owners into an output, if there is one.

    Args:
        kind: says which tensors there are.
        tensors: ok, table, x, g, positions, the output, buffers; (P, n) each.
    """
    algorithm, rest = kind.formula.algorithm, iter(tensors)
    s = kind.scalars(next(rest), next(rest))
    x, g = next(rest), next(rest)
    index = numbers_of_elements(next(rest), x.shape) if kind.has_positions else None
    output = next(rest) if kind.has_output else None
    buffers = dict(zip(kind.symbols, rest, strict=True))
    out, new = updated(algorithm, s, x, g, buffers, index)
    assert out is not None
    if not algorithm.matrix_only:
        x.copy_(out)
    elif output is not None:
        output.copy_(out)
    for symbol, value in new.items():
        buffers[symbol].copy_(value)


def apply(kind: Kind, tensors: list[Tensor]) -> None:
    """Write the new x of a matrix algorithm into x.

    Args:
        kind: says which tensors there are.
        tensors: ok, table, x and the owners' results.
    """
    ok, table, x, o = tensors
    x.copy_(applied(kind.formula.algorithm, kind.scalars(ok, table), x, o))


class Call(NamedTuple):
    """A function of tables, and its arguments but for tensors."""

    function: Callable[..., Any]
    spec: pytree.TreeSpec
    statics: tuple[Any, ...]  # the arguments' leaves; TENSOR in the place of a tensor


TENSOR = object()


def call(kind: Call, tensors: list[Tensor]) -> Any:
    """Return the result of a function of tables."""
    rest = iter(tensors)
    leaves = [next(rest) if leaf is TENSOR else leaf for leaf in kind.statics]
    return kind.function(*pytree.tree_unflatten(leaves, kind.spec))


# ---- memory --------------------------------------------------------------------------


def leaf_views(leaf: Leaf) -> list[Tensor] | None:
    """Return x and the buffers of a leaf as tensors (P, n) over their memory; None if
    their strides differ, or their memory has gaps.
    """
    if any(t.stride() != leaf.x.stride() for t in leaf.tensors):
        return None
    views = [dense_view(t, leaf.parts) for t in leaf.tensors]
    dense = [view for view in views if view is not None]
    return dense if len(dense) == len(views) else None


def batch_dtype(algorithm: Algorithm, x: Tensor) -> torch.dtype:
    """Return the dtype in which ``update`` writes the matrices of ``x``."""
    cost = algorithm.matrix_preconditioner.cost.on(x.device.type)
    return cost.payload(working_dtype(x))


def takes_batches(device: torch.device, is_local: bool) -> bool:
    """Return whether matrices are made as batches: if one process has everything, and
    its device is fastest on all matrices of one shape at once. A CPU takes large
    matrices one by one.
    """
    return is_local and device.type != "cpu"


def batch_key(algorithm: Algorithm, leaf: Leaf) -> Hashable:
    """Return a key: matrices of leaves with equal keys are orthogonalized together, if
    one process has everything.
    """
    if not takes_batches(leaf.x.device, is_local=True):
        return id(leaf.x)
    shape = leaf.params[0].shape
    sizes = tuple(dict.fromkeys(s for _, s in algorithm.matrices.shapes_in(shape)))
    return algorithm.matrix_preconditioner, sizes, working_dtype(leaf.x)


def writes_matrices(algorithm: Algorithm, is_batch: bool) -> bool:
    """Return whether ``update`` writes matrices for their owners into a tensor of their
    own: else these are m, or there are none.
    """
    return algorithm.matrix_only and (is_batch or algorithm.makes_matrix)


def matrix_outputs(
    algorithm: Algorithm, leaves: Sequence[Leaf], is_batch: bool
) -> list[Tensor]:
    """Return tensors for the matrices of leaves: rows of one new batch, or tensors of
    their own; m itself, if that is what goes to the owners.
    """
    if not writes_matrices(algorithm, is_batch):
        return [leaf.buffers["m"] for leaf in leaves]
    xs = [leaf.x for leaf in leaves]
    dtype = batch_dtype(algorithm, xs[0])
    if not is_batch:
        return [torch.empty_like(x, dtype=dtype) for x in xs]
    sizes = [x.numel() for x in xs]
    batch = xs[0].new_empty(sum(sizes), dtype=dtype)
    rows = batch.split(sizes)
    # a formula goes through the memory of x, so that its results lie as x does
    return [
        row.as_strided(x.shape, x.stride(), row.storage_offset())
        for row, x in zip(rows, xs, strict=True)
    ]


def widest(tensors: Sequence[Tensor | None], default: torch.dtype) -> torch.dtype:
    """Return the dtype that holds all of these; ``default`` if there are none."""
    dtypes = [tensor.dtype for tensor in tensors if tensor is not None]
    return reduce(torch.promote_types, dict.fromkeys(dtypes)) if dtypes else default


class Copy(NamedTuple):
    """Rows (R, n) of small tensors, which are copied in and out."""

    rows: Tensor
    views: list[Tensor]  # of the rows, shaped as the tensors
    held: list[Tensor]
    # 1-D views of the tensors, and zeros, that fill the rows: joining them takes a
    # third of the time of copying; None if a tensor is not contiguous
    lines: list[Tensor] | None = None


class FlatSet:
    """Small tensors of one formula: a step copies them behind each other into rows
    (R, n), and out again. Rows have the scalars of their parts.

    Args:
        group: the tensors of a formula.
        members: which of its leaves, by number.
    """

    def __init__(self, group: Group, members: Sequence[int]) -> None:
        self.members, leaves = members, [group.leaves[i] for i in members]
        self._leaves = leaves
        several = [leaf.parts.sizes[0] for leaf in leaves if leaf.parts.num > 1]
        self._width = math.gcd(WIDTH, *several)
        parts = list[int]()  # of each row
        self._starts = list[int]()  # of each leaf, in elements
        for i, leaf in zip(members, leaves, strict=True):
            self._starts.append(len(parts) * self._width)
            for part, size in enumerate(leaf.parts.sizes, group.rows[i].start):
                parts += [part] * -(-size // self._width)
        # Dynamo makes a graph of its own for 1, and takes equal sizes for one size
        while len(parts) in (0, 1, self._width, num_columns(group.algorithm)):
            parts.append(0)
        x = leaves[0].x
        self.part_of_row = torch.tensor(parts, device=x.device)
        self._x = self._copy([leaf.x.detach() for leaf in leaves])
        self._state = {
            symbol: self._copy([leaf.buffers[symbol].detach() for leaf in leaves])
            for symbol in leaves[0].buffers
        }
        self.x = self._x.rows
        self.buffers = {symbol: copy.rows for symbol, copy in self._state.items()}
        self.positions = None
        if leaves[0].positions is not None:
            rows, views = self._empty(torch.int64)
            for leaf, view in zip(leaves, views, strict=True):
                assert leaf.positions is not None
                shape = torch.Size((leaf.parts.num, leaf.parts.sizes[0]))
                numbers = numbers_of_elements(leaf.positions, shape)
                view.copy_(numbers.view(leaf.x.shape))
            self.positions = rows.flatten()
        self.g, self._gs = self._empty(x.dtype)
        self._zero = torch.zeros((), device=x.device)

    def _empty(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return rows (R, n), and views of them shaped as the leaves."""
        shape = len(self.part_of_row), self._width
        rows = torch.zeros(shape, dtype=dtype, device=self.part_of_row.device)
        return rows, self.split(rows)

    def gather_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Copy this step's gradients in; zeros for missing ones."""
        dtype = widest(grads, self.x.dtype)
        if self.g.dtype != dtype:
            self.g, self._gs = self._empty(dtype)
        pairs = zip(grads, self._gs, strict=True)
        zero = self._zero.to(dtype)
        torch._foreach_copy_(
            self._gs, [zero.expand_as(v) if g is None else g for g, v in pairs]
        )

    def _copy(self, held: list[Tensor]) -> Copy:
        """Return empty rows for tensors of the leaves."""
        rows, views = self._empty(held[0].dtype)
        if not all(tensor.is_contiguous() for tensor in held):
            return Copy(rows, views, held)
        slots = pairwise([*self._starts, rows.numel()])
        gaps = [
            rows.new_zeros(stop - start - tensor.numel())
            for (start, stop), tensor in zip(slots, held, strict=True)
        ]
        pairs = zip(held, gaps, strict=True)
        lines = [line for tensor, gap in pairs for line in (tensor.view(-1), gap)]
        return Copy(rows, views, held, [line for line in lines if line.numel()])

    def gather(self) -> None:
        """Copy parameters and state in."""
        for copy in (self._x, *self._state.values()):
            if copy.lines is not None:
                torch.cat(copy.lines, out=copy.rows.view(-1))
            else:
                torch._foreach_copy_(copy.views, copy.held)

    def scatter_state(self) -> None:
        """Copy the state out."""
        for copy in self._state.values():
            torch._foreach_copy_(copy.held, copy.views)

    def scatter_params(self) -> None:
        """Copy parameters out."""
        torch._foreach_copy_(self._x.held, self._x.views)

    def gather_directions(self, directions: Sequence[Tensor]) -> Tensor:
        """Return the owners' results (R, n)."""
        rows, views = self._empty(directions[0].dtype)
        torch._foreach_copy_(views, list(directions))
        return rows

    def split(self, rows: Tensor) -> list[Tensor]:
        """Return views of rows (R, n), shaped as the leaves."""
        elements = rows.view(-1)
        return [
            elements[start : start + leaf.x.numel()].view(leaf.x.shape)
            for start, leaf in zip(self._starts, self._leaves, strict=True)
        ]


class Single(NamedTuple):
    """A tensor that a step updates where it lies: views (P, n)."""

    x: Tensor
    buffers: list[Tensor]
    strides: tuple[int, ...]


class BoundGroup:
    """The tensors of one formula where they lie.

    Args:
        group: the tensors of one formula.
        taken: the leaves that another runner updates.
    """

    def __init__(self, group: Group, taken: Sequence[int] = ()) -> None:
        self.group, self.taken = group, taken
        self.formula = formula(group.algorithm)
        self.symbols = tuple(group.leaves[0].buffers)
        self.singles: dict[int, Single] = {}
        small = []
        for i in sorted(set(range(len(group.leaves))) - set(taken)):
            leaf = group.leaves[i]
            single = self._single(leaf)
            if single is None:
                small.append(i)
            else:
                self.singles[i] = single
        self.flat = FlatSet(group, small) if small else None

    def _single(self, leaf: Leaf) -> Single | None:
        """Return views of a leaf; None if a step copies it."""
        # Dynamo makes a graph of its own for a size of 1
        if leaf.x.numel() < (max(SMALL, 2) if leaf.x.device.type == "cpu" else 2):
            return None
        views = leaf_views(leaf)
        return None if views is None else Single(views[0], views[1:], leaf.x.stride())

    def as_parts(self, i: int, tensor: Tensor) -> Tensor:
        """Return a gradient or direction as its leaf lies, (P, n)."""
        leaf = self.group.leaves[i]
        if tensor.stride() != self.singles[i].strides or tensor.is_neg():
            tensor = laid_as(leaf.x, tensor, tensor.dtype)
        view = dense_view(tensor, leaf.parts)
        assert view is not None
        return view


# ---- the runner ----------------------------------------------------------------------


class Graphs:
    """A runner that writes new values into the tensors of its groups.

    Ranges named "marsopt: ..." show the parts of a step in a profiler's trace.

    Graphs run eagerly wherever Dynamo declines to trace: under a TorchDispatchMode
    (CommDebugMode, FlopCounterMode: the tools that count see every operation then) and
    with TORCH_COMPILE_DISABLE=1. If the backend fails, which it does while it compiles
    and so before anything is written, all graphs run eagerly from then on.

    Args:
        groups: the tensors of a step; the runner keeps views of them.
        device: of the tensors.
        is_local: whether one process has everything.
        compile: False = eager.
        required: whether a backend that fails raises.
        say: told, with a level of logging, why graphs run eagerly.
        taken: of each group, the leaves that another runner updates.
    """

    # while a profile asks for it: of each run of a graph, in order, its key and how
    # many elements it went over
    runs: ClassVar[list[tuple[Hashable, int]] | None] = None

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        device: torch.device,
        is_local: bool,
        compile: bool,
        required: bool,
        say: Say,
        taken: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._device, self._is_local = device, is_local
        self._is_batch = takes_batches(device, is_local)
        self._compile, self._required, self._say = compile, required, say
        # those that this runner calls stay, however many other optimizers have
        self._graphs: dict[Hashable, Graph] = {}
        taken = taken or [[]] * len(groups)
        pairs = zip(groups, taken, strict=True)
        self._bound = [BoundGroup(group, leaves) for group, leaves in pairs]
        self._is_used = any(bound.singles or bound.flat for bound in self._bound)
        self._portions = self._find_portions(groups)
        self._tables: list[tuple[Tensor, Tensor]] = []  # ok and scalars, by group
        self._rows: list[list[tuple[Tensor, Tensor]]] = []  # of each leaf, views
        self._sums = [self._empty_sums(group) for group in groups]

    def _empty_sums(self, group: Group) -> tuple[Tensor, list[Tensor]]:
        pairs = 1 if group.algorithm.h_from is None else 3
        num = group.rows[-1].stop
        options: Any = dict(dtype=scalar_dtype(self._device), device=self._device)
        sums = torch.zeros(num, pairs, **options)
        return sums, [sums[rows] for rows in group.rows]

    @property
    def copied(self) -> set[Place]:
        """Return the leaves that a step copies into rows, and out again."""
        flats = [(n, bound.flat) for n, bound in enumerate(self._bound) if bound.flat]
        return {(n, i) for n, flat in flats for i in flat.members}

    # ---- the parts of a step ---------------------------------------------------------

    def measure(self, groups: Sequence[Group], grads: Gradients) -> list[Tensor]:
        with named_range("marsopt: norms"):
            pairs = zip(self._bound, grads, strict=True)
            return [self._measure(n, *pair) for n, pair in enumerate(pairs)]

    def _measure(
        self, number: int, bound: BoundGroup, grads: Sequence[Tensor | None]
    ) -> Tensor:
        sums, rows = self._sums[number]
        has_h = bound.group.algorithm.h_from is not None
        if bound.flat is not None:
            sums.zero_()
        targets, results = [], []
        for i, single in bound.singles.items():
            g = self._gradient(bound, i, grads[i])
            if g is None:
                rows[i].zero_()
                continue
            tensors = [g]
            if has_h:
                tensors.append(single.buffers[bound.symbols.index("h")])
            kind = Products(g.shape[1] >= ROW, has_h)
            targets.append(rows[i])
            results.append(self.compute(measure, kind, tensors))
        if results:
            torch._foreach_copy_(targets, results)
        if (flat := bound.flat) is not None:
            flat.gather()
            flat.gather_gradients([grads[i] for i in flat.members])
            # eager operators take less time here than a graph's guards
            h = flat.buffers["h"] if has_h else None
            of_rows = products(flat.g, h, is_long=False)
            sums.index_add_(0, flat.part_of_row, of_rows)
        return sums

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Return ``function(*args)``. A CPU takes no longer eagerly for a few numbers,
        where a graph takes seconds to compile.
        """
        with named_range("marsopt: norms"):
            if self._device.type == "cpu" or not self._compile or declined():
                return function(*args)
            leaves, spec = pytree.tree_flatten(args)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            statics = [TENSOR if isinstance(x, Tensor) else x for x in leaves]
            kind = Call(function, spec, tuple(statics))
            result: Result = self.compute(call, kind, tensors, dynamic=False)
            return result

    def run_collective(
        self, label: str, function: Callable[..., Result], *args: Any
    ) -> Result:
        with named_range(f"marsopt: {label}"):
            return function(*args)

    def start(
        self, groups: Sequence[Group], grads: Gradients, decision: Decision
    ) -> None:
        """Copy the decision into tables that stay, so that views of their rows do."""
        self._grads: Gradients = grads
        if not self._is_used:
            return
        if not self._tables:
            pairs = zip(decision.ok_parts, decision.tables, strict=True)
            self._tables = [(ok.clone(), table.clone()) for ok, table in pairs]
            self._rows = [
                [(ok[rows], table[rows]) for rows in group.rows]
                for group, (ok, table) in zip(groups, self._tables, strict=True)
            ]
            return
        old = [tensor for pair in self._tables for tensor in pair]
        pairs = zip(decision.ok_parts, decision.tables, strict=True)
        torch._foreach_copy_(old, [tensor for pair in pairs for tensor in pair])

    def _find_portions(self, groups: Sequence[Group]) -> list[list[Place]]:
        rest = list[Place]()
        batches: dict[Hashable, list[Place]] = {}
        for number, (group, bound) in enumerate(zip(groups, self._bound, strict=True)):
            small = set() if bound.flat is None else set(bound.flat.members)
            others = small - {min(small, default=0)}
            for i, leaf in enumerate(group.leaves):
                if not group.algorithm.matrix_only:
                    if i not in others:  # one small tensor stands for all of them
                        rest.append((number, i))
                    continue
                key: Hashable = number
                if i not in small:
                    key = batch_key(group.algorithm, leaf)
                key = key if self._is_local else "all"
                batches.setdefault(key, []).append((number, i))
        return [rest, *batches.values()]

    def portions(self, groups: Sequence[Group]) -> Sequence[Sequence[Place]]:
        if not self._is_local:
            return self._portions
        return [[p for p in places if self._moves(p)] for places in self._portions]

    def _moves(self, place: Place) -> bool:
        """Return whether a leaf has to be computed: it, or another leaf of its flat
        set, may have a gradient.
        """
        number, i = place
        is_flat = i not in self._bound[number].singles
        return is_flat or self._grads[number][i] is not None

    def update(self, places: Sequence[Place]) -> list[Tensor]:
        with named_range("marsopt: update"):
            outputs: dict[Place, Tensor] = {}
            for number, members in _by_group(places):
                self._update(number, members, outputs)
            return [outputs[place] for place in places if place in outputs]

    def _update(
        self, number: int, members: list[int], outputs: dict[Place, Tensor]
    ) -> None:
        bound, grads = self._bound[number], self._grads[number]
        group, algorithm = bound.group, bound.group.algorithm
        singles = [i for i in members if i in bound.singles]
        if not singles and bound.flat is None:
            return
        if algorithm.matrix_only and singles:
            leaves = [group.leaves[i] for i in singles]
            made = matrix_outputs(algorithm, leaves, self._is_batch)
            for i, output in zip(singles, made, strict=True):
                outputs[number, i] = output
        kind = self._kind(number)
        for i in singles:
            g = self._gradient(bound, i, grads[i])
            assert g is not None
            single, leaf = bound.singles[i], group.leaves[i]
            tensors = [*self._rows[number][i], single.x, g]
            tensors += [] if leaf.positions is None else [leaf.positions]
            if kind.has_output:
                tensors.append(bound.as_parts(i, outputs[number, i]))
            tensors += single.buffers
            self.compute(update, kind, tensors)
        flat = bound.flat
        if flat is None or flat.members[0] not in members:
            return
        tensors = [*self._rows_of(number, flat), flat.x, flat.g]
        tensors += [] if flat.positions is None else [flat.positions]
        if kind.has_output:
            output = torch.empty_like(flat.x, dtype=batch_dtype(algorithm, flat.x))
            tensors.append(output)
        self.compute(update, kind, [*tensors, *flat.buffers.values()])
        flat.scatter_state()
        if not algorithm.matrix_only:
            flat.scatter_params()
            return
        matrices = flat.split(output if kind.has_output else flat.buffers["m"])
        for i, matrix in zip(flat.members, matrices, strict=True):
            outputs[number, i] = matrix

    def apply(self, places: Sequence[Place], directions: Sequence[Tensor]) -> None:
        with named_range("marsopt: update"):
            by_place = dict(zip(places, directions, strict=True))
            for number, members in _by_group(places):
                self._apply(number, members, by_place)

    def _apply(
        self, number: int, members: list[int], directions: dict[Place, Tensor]
    ) -> None:
        bound = self._bound[number]
        if not bound.singles and bound.flat is None:
            return
        kind = self._kind(number)._replace(has_output=False)
        for i in members:
            if i in bound.singles:
                o = bound.as_parts(i, directions[number, i])
                tensors = [*self._rows[number][i], bound.singles[i].x, o]
                self.compute(apply, kind, tensors)
        flat = bound.flat
        if flat is not None and flat.members[0] in members:
            o = flat.gather_directions([directions[number, i] for i in flat.members])
            tensors = [*self._rows_of(number, flat), flat.x, o]
            self.compute(apply, kind, tensors)
            flat.scatter_params()

    def finish(self) -> None:
        """Let gradients go, and tell autograd which tensors were written."""
        written = [
            tensor
            for bound, grads in zip(self._bound, self._grads, strict=True)
            for i in (*bound.singles, *bound.taken)
            if grads[i] is not None or not self._is_local
            for tensor in bound.group.leaves[i].tensors
        ]
        torch.autograd.graph.increment_version(written)
        self._grads = []

    def store(
        self, ok: Tensor, old: Tensors, new: tuple[Tensor | None, ...]
    ) -> Tensors | None:
        for o, n in zip(old, new, strict=True):
            if n is not None:
                torch.where(ok, n.to(o.dtype), o, out=o)
        return None

    # ---- graphs ----------------------------------------------------------------------

    def _gradient(self, bound: BoundGroup, i: int, g: Tensor | None) -> Tensor | None:
        """Return a gradient (P, n); None if its tensor is left out of this step."""
        if g is None and self._is_local:
            return None
        x = bound.group.leaves[i].x
        return bound.as_parts(i, torch.zeros_like(x) if g is None else g)

    def _rows_of(self, number: int, flat: FlatSet) -> list[Tensor]:
        """Return ok and scalars of the rows of small tensors."""
        return [
            table.index_select(0, flat.part_of_row) for table in self._tables[number]
        ]

    def _kind(self, number: int) -> Kind:
        bound = self._bound[number]
        algorithm = bound.group.algorithm
        return Kind(
            bound.formula,
            bound.symbols,
            self._tables[number][1].shape[1],
            bound.group.leaves[0].positions is not None,
            writes_matrices(algorithm, self._is_batch),
        )

    def compute(
        self,
        function: Callable[[Any, list[Tensor]], Any],
        kind: Any,
        tensors: list[Tensor],
        dynamic: bool = True,
    ) -> Any:
        """Return ``function(kind, tensors)``, by a graph."""
        if not self._compile:
            return function(kind, tensors)
        if (off := declined()) is not None:
            self._say(logging.INFO, f"the optimizer step runs eagerly {off}")
            return function(kind, tensors)
        forms: list[Hashable] = [self._device.type, *(t.dtype for t in tensors)]
        if dynamic:  # Dynamo makes graphs of their own for sizes of 1
            forms += [t.shape[0] == 1 for t in tensors[:1]]
            forms += [tensors[-1].ndim, tensors[-1].shape[0] == 1]
            # inductor chooses threads of a CPU by the first sizes
            forms.append(self._device.type == "cpu" and tensors[-1].numel() < SMALL)
        else:
            forms += [(t.shape, t.stride()) for t in tensors]
        key = function, kind, tuple(forms), dynamic
        try:
            return self._run_graph(key, tensors)
        except Exception as error:
            if self._required or not backend_failed(error):
                raise
            self._compile = False
            why = str(error).partition("\n")[0]
            self._say(
                logging.WARNING,
                "the optimizer step runs eagerly, since compiling it failed "
                f"({type(error).__name__}: {why}); compile=True raises this error",
            )
        return function(kind, tensors)

    def _run_graph(self, key: tuple[Any, ...], tensors: list[Tensor]) -> Any:
        if self.runs is not None:
            self.runs.append((key, max(x.numel() for x in tensors)))
        graph = self._graphs.get(key)
        if graph is None:
            announce()
            graph = self._graphs[key] = graph_of(*key)
        try:
            return graph(tensors)
        except Exception as error:
            if not is_spent(error):
                raise
        graph = self._graphs[key] = compile_graph(*key)
        return graph(tensors)


def _by_group(places: Sequence[Place]) -> list[tuple[int, list[int]]]:
    """Return the numbers of leaves, by group."""
    members: dict[int, list[int]] = {}
    for number, i in places:
        members.setdefault(number, []).append(i)
    return list(members.items())
