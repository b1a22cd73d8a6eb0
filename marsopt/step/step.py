"""The one step, over leaves: measure all gradients, sum over shards, decide, update,
let owners work on whole matrices, apply. ``Rule.step`` and ``MARS.step`` both take it;
a ``Runner`` says how its formulas are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from marsopt.rules import formats, numerics
from marsopt.rules.checks import Number
from marsopt.rules.component import Algorithm, MatrixInput, MatrixOutput
from marsopt.rules.formats import LOW_BITS
from marsopt.rules.matrices import Matrices
from marsopt.rules.numerics import scalar_dtype, working
from marsopt.step.decide import (
    Decision,
    Inputs,
    Scalars,
    StepScalars,
    decide,
    decide_alone,
    sums_of_norms,
)
from marsopt.step.leaf import Leaf
from marsopt.step.owners import LOCAL, Collectives, OwnedTensors, Request

ROW = 512  # elements that are summed before rows are
BATCH = Matrices(kind="batched")
REFERENCE = "h", "h" + formats.SCALE  # the operands that hold h

Result = TypeVar("Result")
Gradients = Sequence[Sequence[Tensor | None]]  # (P, n) of every leaf of every group
Operands = Mapping[str, Sequence[Tensor | None]]  # (P, n) of every leaf, by name
Results = dict[str, Tensor]  # (P, n) of one leaf, by name
# of an algorithm, scalars of its parts, operands, and the numbers of their elements
Formula = Callable[[Algorithm, StepScalars, Results, Tensor | None], Results]

# ---- tensors of a step ---------------------------------------------------------------


class Leaves:
    """Leaves of one formula that are updated together.

    Args:
        inputs: the tables of their formula.
        leaves: the leaves.
        rows: of each, its rows of a table of parts (P, S).
    """

    places: Sequence[int]  # their numbers in their group

    def __init__(
        self, inputs: Inputs, leaves: Sequence[Leaf], rows: Sequence[slice]
    ) -> None:
        self.inputs, self.algorithm = inputs, inputs.algorithm
        self.leaves, self.rows = leaves, rows
        of_each = [leaf.operands for leaf in leaves]
        self.operands = {name: [o[name] for o in of_each] for name in of_each[0]}
        # of each, the tensors that hold h
        self.references = [
            [o[name] for name in REFERENCE if name in o] for o in of_each
        ]

    @property
    def group(self) -> Group:
        """Return all leaves of their formula. An attribute that refers to itself would
        keep the group's memory until the garbage collector runs.
        """
        assert isinstance(self, Group)
        return self

    @property
    def num_norms(self) -> list[int]:
        """Return the number of norms of each param."""
        return [num for leaf in self.leaves for num in leaf.num_norms]


class Group(Leaves):
    """All leaves of one formula.

    Args:
        inputs: the tables of their formula.
        leaves: the leaves.
        stages: of each of their params, the extra work of its owners in this step, if
            steps differ.
    """

    def __init__(
        self, inputs: Inputs, leaves: Sequence[Leaf], stages: Sequence[Hashable] = ()
    ) -> None:
        parts = accumulate([len(leaf.norms) for leaf in leaves], initial=0)
        super().__init__(inputs, leaves, [slice(*pair) for pair in pairwise(parts)])
        self.stages = stages
        self.places = range(len(leaves))
        # the param of each norm
        self.of_norms = [
            p
            for leaf in leaves
            for p, num in zip(leaf.params, leaf.num_norms, strict=True)
            for _ in range(num)
        ]
        # the number of the first of each leaf's params
        self.firsts = [*accumulate([len(leaf.params) for leaf in leaves], initial=0)]


class Batch(Sequence[Tensor | None]):
    """Matrices of one shape one behind the other, as an operand (P, n) of leaves. A
    kernel reads its addresses; each view that a graph takes costs a GPU's host 3 us.

    Args:
        matrices: (num, rows, cols), or (rows, cols).
        shapes: (P, n) of each leaf; None: it has no matrix here.
    """

    def __init__(self, matrices: Tensor, shapes: Sequence[torch.Size | None]) -> None:
        self.matrices, self.shapes = matrices.contiguous(), shapes
        sizes = [0 if shape is None else shape.numel() for shape in shapes]
        self._starts = [*accumulate(sizes, initial=0)]

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, number: Any) -> Any:
        shape, start = self.shapes[number], self._starts[number]
        if shape is None:
            return None
        return self.matrices.view(-1)[start:][: shape.numel()].view(shape)

    @property
    def addresses(self) -> list[int]:
        """Return the address of each leaf's matrices, 0 if there are none."""
        first, size = self.matrices.data_ptr(), self.matrices.itemsize
        pairs = zip(self.shapes, self._starts, strict=False)
        return [0 if x is None else first + size * start for x, start in pairs]


class MatrixLeaves(Leaves):
    """Leaves of a matrix algorithm whose matrices go to their owners together.

    Args:
        number: of their group.
        group: their group.
        places: their numbers in it.
        is_batch: whether their matrices are made as one batch.
    """

    def __init__(
        self, number: int, group: Group, places: Sequence[int], is_batch: bool
    ) -> None:
        leaves = [group.leaves[i] for i in places]
        super().__init__(group.inputs, leaves, [group.rows[i] for i in places])
        self.number, self._group, self.places = number, group, places
        self._is_batch = is_batch

    @property
    def group(self) -> Group:
        return self._group

    @cached_property
    def output(self) -> torch.dtype | None:
        """The dtype of o, the matrices that owners get; None: they get m, and no o is
        written.
        """
        if not (self._is_batch or self.algorithm.makes_matrix):
            return None
        return self.algorithm.cost_on(self.leaves[0].x.device).payload(
            self.inputs.dtype
        )

    @cached_property
    def _shape(self) -> torch.Size | None:
        """The (rows, cols) of all matrices, if owners get a batch of them, and nothing
        beside it.
        """
        leaf, *_ = self.leaves
        shapes = self.algorithm.matrices.shapes_in(leaf.params[0].shape)
        in_order = not any(leaf.strides for leaf in self.leaves)
        is_alone = in_order and len(shapes) == 1 and not self.algorithm.owned
        return shapes[0][1] if is_alone else None

    def outputs(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return new tensors for the matrices of leaves with a gradient, (P, n), which
        are the rows of one if they are a batch.
        """
        xs = self.operands["x"]
        active = [None if g is None else x for x, g in zip(xs, grads, strict=True)]
        if not self._is_batch:
            empty = torch.empty_like
            return [x if x is None else empty(x, dtype=self.output) for x in active]
        shapes = [None if x is None else x.shape for x in active]
        size = sum(shape.numel() for shape in shapes if shape is not None)
        matrices = xs[0].new_empty(size, dtype=self.output)
        if self._shape is None:
            return [*Batch(matrices, shapes)]
        num = size // max(1, self._shape.numel())
        many = (num,) if num > 1 else ()
        return Batch(matrices.view(*many, *self._shape), shapes)


def exchanges_of(
    groups: Sequence[Group], is_local: bool, is_batch: bool
) -> list[list[MatrixLeaves]]:
    """Return the leaves of matrix algorithms by exchanges with owners: the algorithms
    of one exchange have one cost. Temporaries of an exchange are freed before the next.

    Args:
        groups: everything that is updated.
        is_local: whether one process has all matrices whole.
        is_batch: whether its device is fastest on all matrices of one shape at once; a
            CPU takes large matrices one by one.
    """
    exchanges: dict[Hashable, dict[int, list[int]]] = {}
    for number, group in enumerate(groups):
        if not group.algorithm.matrix_only:
            continue
        for i, leaf in enumerate(group.leaves):
            key: Hashable = group.algorithm.matrix_preconditioner.cost
            if is_local:
                shapes = group.algorithm.matrices.shapes_in(leaf.params[0].shape)
                sizes = tuple(dict.fromkeys(size for _, size in shapes))
                key = (number, sizes) if is_batch else (number, i)
            exchanges.setdefault(key, {}).setdefault(number, []).append(i)
    return [
        [MatrixLeaves(n, groups[n], each, is_batch) for n, each in sets.items()]
        for sets in exchanges.values()
    ]


class Runner(Protocol):
    """Computes the formulas of a step."""

    writes: bool  # whether ``map`` writes its results into operands

    def reduce(self, leaves: Leaves, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the ``products`` of all parts of these leaves, (P, pairs) in the dtype
        of scalars; zeros for missing gradients.
        """

    def map(
        self, function: Formula, leaves: Leaves, operands: Operands, scalars: Scalars
    ) -> list[Results]:
        """Return the results of a formula by name for each leaf. A runner that writes
        returns nothing: it writes them into the operands of these names, but for leaves
        with a missing operand. Parts that are not ``ok`` keep the values that the
        operands have.

        Args:
            function: the formula.
            leaves: of one formula.
            operands: tensors (P, n) of each leaf, by name; g as ``reduce`` got it.
            scalars: of all parts of the leaves' group.
        """

    def small(self, function: Callable[..., Result], *args: Any) -> Result:
        """Return ``function(*args)``, of small tables; it writes nothing."""


def named_range(name: str) -> AbstractContextManager[object]:
    """Return a range of this name in the trace of the profiler, if a profiler runs:
    entering and leaving a range costs some microseconds.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(name)
    return nullcontext()


# ---- formulas over parts -------------------------------------------------------------


def product_terms(g: Tensor, h: Tensor | None) -> list[Tensor]:
    """Return the products that sum up to <g, g> and, with h, to <g, h> and <h, h>."""
    return [g * g] if h is None else [g * g, g * h, h * h]


def reference(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return h in its working dtype from the tensors that hold it, if there are any."""
    h, scales = (tensors.get(name) for name in REFERENCE)
    if h is None or scales is None:
        return None if h is None else working(h)
    return formats.decode(h, scales, are_squares=False)


def products(g: Tensor, h: Tensor | None, is_long: bool) -> Tensor:
    """Return the inner products of parts, from one read of g and h (P, n): (P, 1), of
    (g, g); with h (P, 3), of (g, g), (g, h) and (h, h).

    Rows of ``ROW`` elements are summed first, in the working dtype: a CPU then adds
    vectors. Their sums are added in the dtype of scalars, so that long sums lose no
    digits.

    Args:
        g: the gradient.
        h: the reference gradient, if there is one.
        is_long: whether n is at least ``ROW``.
    """
    g, h, dtype = working(g), None if h is None else working(h), scalar_dtype(g.device)
    if not is_long:
        terms = product_terms(g, h)
        return torch.stack([term.sum(1, dtype=dtype) for term in terms], 1)
    end = g.shape[1] // ROW * ROW

    def sums(start: int, stop: int) -> list[Tensor]:
        of_h = None if h is None else h[:, start:stop]
        return product_terms(g[:, start:stop], of_h)

    rows = [t.unflatten(1, (-1, ROW)).sum(2) for t in sums(0, end)]
    rows = [row.sum(1, dtype=dtype) for row in rows]
    rest = [t.sum(1, dtype=dtype) for t in sums(end, g.shape[1])]
    return torch.stack([a + b for a, b in zip(rows, rest, strict=True)], 1)


def weight(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return x in its working dtype, with the bits that the state holds below it."""
    return formats.joined(tensors["x"], formats.low_bits(tensors))


def stored(
    algorithm: Algorithm, s: StepScalars, x: Tensor, index: Tensor | None
) -> Results:
    """Return a new x by the names of the tensors that hold it."""
    bits = algorithm.master_weight_bits
    if bits is None:
        return {"x": x}
    noise = None
    if bits == 24:
        assert index is not None and s.key is not None
        number = list(algorithm.buffers).index(LOW_BITS[0])
        noise = numerics.noise(index, s.key, number)
    tensors = formats.split(x, bits, noise)
    return dict(zip(("x", *formats.low_symbols(bits)), tensors, strict=True))


def buffer_value(
    algorithm: Algorithm, tensors: Mapping[str, Tensor], symbol: str
) -> Tensor:
    """Return a buffer in its working dtype."""
    buffer, tensor = algorithm.buffers[symbol], tensors[symbol]
    if not algorithm.stores_codes(buffer):
        return working(tensor)
    scales = tensors[symbol + formats.SCALE]
    return formats.decode(tensor, scales, buffer.codes == "squares")


def updated(
    algorithm: Algorithm,
    s: StepScalars,
    tensors: dict[str, Tensor],
    index: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return new values by name: x of an elementwise algorithm, or the matrix o for the
    owners of a matrix algorithm, if that is another one than m; and the buffers, in
    their own dtypes.

    Args:
        algorithm: the algorithm of x.
        s: scalars of the step, as factors of x.
        tensors: x, its gradient g, its buffers at home in shards, and h if there is
            one, (P, n) each.
        index: (n,) numbers of the elements in a part, for stochastic rounding.
    """
    x, g = weight(tensors), working(tensors["g"])
    c = s.weights[0] * g
    if algorithm.h_from is not None:
        c = c + s.weights[1] * buffer_value(algorithm, tensors, "h")
    moments = {
        symbol: buffer_value(algorithm, tensors, symbol) for symbol in algorithm.moments
    }
    out, new = algorithm.preconditioner.update(x, c, moments, s.rule)
    if algorithm.correction is not None and s.global_clip is not None:
        h = buffer_value(algorithm, tensors, "h")
        new["h"] = algorithm.correction.next_h(s.global_clip * g, h)
    buffers = algorithm.buffers
    results = {}
    for symbol, value in new.items():
        dtype, buffer = tensors[symbol].dtype, buffers[symbol]
        has_codes = algorithm.stores_codes(buffer)
        if s.key is None or not (has_codes or algorithm.rounds(buffer, dtype)):
            results[symbol] = value.to(dtype)
            continue
        assert index is not None
        noise = numerics.noise(index, s.key, list(buffers).index(symbol))
        if has_codes:
            coded = formats.encode(value, noise, buffer.codes == "squares")
            results[symbol], results[symbol + formats.SCALE] = coded
        else:
            results[symbol] = numerics.stochastic(value, noise)
    if not algorithm.matrix_only:
        assert out is not None
        return {**results, **stored(algorithm, s, out, index)}
    if algorithm.makes_matrix or "o" in tensors:
        results["o"] = new["m"] if out is None else out
    return results


def applied(
    algorithm: Algorithm,
    s: StepScalars,
    tensors: dict[str, Tensor],
    index: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the new x of a matrix algorithm, from x and the owners' results o, both
    (P, n).
    """
    assert s.scale is not None
    x, o = weight(tensors), working(tensors["o"])
    x = algorithm.matrix_preconditioner.apply(x, o, s.rule, s.scale)
    return stored(algorithm, s, x, index)


# ---- the step ------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The results of a step."""

    decision: Decision
    sums: Tensor  # (norms, pairs + 1), complete
    # by group and leaf, for a runner that writes nothing
    values: list[list[Results]]  # new x and buffers, (P, n)
    owned: list[list[list[OwnedTensors]]]  # of each param, the buffers at its owners


def step(
    groups: Sequence[Group],
    exchanges: Sequence[Sequence[MatrixLeaves]],
    grads: Gradients,
    *,
    max_norm: Number | None,
    collectives: Collectives,
    runner: Runner,
    has_grad: Tensor | None = None,
) -> Outcome:
    """Take a step; if it is not finite, everything keeps its values.

    Args:
        groups: everything that is updated, N norms in all.
        exchanges: the leaves of matrix algorithms, as ``exchanges_of`` returns them.
        grads: of each leaf, (P, n); None: its tensors have no gradient, on any rank.
        max_norm: threshold of the global gradient norm; None = off.
        collectives: they sum over shards, and bring matrices to their owners.
        runner: computes the formulas.
        has_grad: (N,) bool, False for tensors without a gradient here; None = all have
            gradients.
    """
    with named_range("marsopt: norms"):
        sums, decision = _decided(
            groups, grads, max_norm, collectives, runner, has_grad
        )
    values: list[list[Results]] = []
    owned: list[list[list[OwnedTensors]]] = []
    if not runner.writes:
        values = [[leaf.operands for leaf in group.leaves] for group in groups]
        owned = [[list(leaf.owned) for leaf in group.leaves] for group in groups]
    outcome = Outcome(decision, sums, values, owned)
    with named_range("marsopt: update"):
        for number, group in enumerate(groups):
            if not group.algorithm.matrix_only:
                operands = {**group.operands, "g": grads[number]}
                scalars = decision.scalars[number]
                results = runner.map(updated, group, operands, scalars)
                if results:
                    _take(outcome, number, group.places, results)
    for sets in exchanges:
        _exchange(sets, grads, outcome, collectives, runner)
    return outcome


def _decided(
    groups: Sequence[Group],
    grads: Gradients,
    max_norm: Number | None,
    collectives: Collectives,
    runner: Runner,
    has_grad: Tensor | None,
) -> tuple[Tensor, Decision]:
    """Return the complete sums of all gradients, and the decision from them."""
    inputs = [group.inputs for group in groups]
    partial = list(map(runner.reduce, groups, grads))
    if collectives is LOCAL:
        return runner.small(decide_alone, inputs, partial, has_grad, max_norm)
    sums = sums_of_norms(inputs, partial, has_grad)
    with named_range("marsopt: exchange"):
        sums = collectives.sum(sums, [p for group in groups for p in group.of_norms])
    return sums, runner.small(decide, inputs, sums, max_norm)


def _take(
    outcome: Outcome,
    number: int,
    members: Iterable[int],
    results: Sequence[Results],
) -> None:
    """Take over the results of a runner that writes nothing."""
    for i, result in zip(members, results, strict=False):
        outcome.values[number][i] |= result


def _exchange(
    sets: Sequence[MatrixLeaves],
    grads: Gradients,
    outcome: Outcome,
    collectives: Collectives,
    runner: Runner,
) -> None:
    """Update the leaves of one exchange, let owners work on their matrices, and apply
    the results.
    """
    decision = outcome.decision
    requests: list[Request] = []  # Dynamo traces this, but no list[Request]()
    of_sets: list[tuple[MatrixLeaves, Batch | list[Tensor | None]]] = []
    for leaves in sets:
        number = leaves.number
        of_leaves = [grads[number][i] for i in leaves.places]
        if not any(map(torch.is_tensor, of_leaves)):
            continue
        operands: Operands = {**leaves.operands, "g": of_leaves}
        if runner.writes and leaves.output is not None:
            operands = {**operands, "o": leaves.outputs(of_leaves)}
        with named_range("marsopt: update"):
            results = runner.map(updated, leaves, operands, decision.scalars[number])
        if not runner.writes:
            operands = {"o": [r.pop("o", r.get("m")) for r in results]}
            _take(outcome, number, leaves.places, results)
        made = operands["o" if "o" in operands else "m"]
        matrices: Batch | list[Tensor | None]
        if isinstance(made, Batch):
            matrices = made
        else:
            matrices = [
                None if g is None else matrix
                for matrix, g in zip(made, of_leaves, strict=True)
            ]
        requests += _requests(leaves, matrices, decision, runner.writes)
        of_sets.append((leaves, matrices))
    if not requests:
        return
    with named_range("marsopt: matrices"):
        outputs = iter(collectives.on_owners(requests))
    del requests, operands, results, made, matrices
    while of_sets:
        leaves, matrices = of_sets.pop(0)
        if isinstance(matrices, Batch):
            matrices = Batch(next(outputs).matrix, matrices.shapes)
        else:
            _from_owners(leaves, matrices, outputs, outcome)
        known = leaves.operands.items()
        operands = {name: x for name, x in known if name in ("x", *LOW_BITS)}
        operands["o"] = matrices
        scalars = decision.scalars[leaves.number]
        with named_range("marsopt: update"):
            results = runner.map(applied, leaves, operands, scalars)
        if results:
            _take(outcome, leaves.number, leaves.places, results)


def _from_owners(
    leaves: MatrixLeaves,
    matrices: list[Tensor | None],
    outputs: Iterator[MatrixOutput],
    outcome: Outcome,
) -> None:
    """Put the results of owners into the place of their matrices, (P, n)."""
    for n, (i, leaf) in enumerate(zip(leaves.places, leaves.leaves, strict=True)):
        if matrices[n] is not None:
            matrices[n] = None  # the matrix is not needed any more
            back = [next(outputs) for _ in leaf.params]
            pieces = [output.matrix for output in back]
            matrix = pieces[0] if len(pieces) == 1 else torch.stack(pieces)
            matrices[n] = leaf.as_parts(matrix)
            if outcome.owned:
                of_params = [output.owned for output in back]
                outcome.owned[leaves.number][i] = of_params  # type: ignore[assignment]


def _requests(
    leaves: MatrixLeaves,
    matrices: Sequence[Tensor | None],
    decision: Decision,
    writes: bool,
) -> list[Request]:
    """Return the request of each param with a gradient to the owners of its
    matrices.
    """
    group, algorithm = leaves.group, leaves.algorithm
    if isinstance(matrices, Batch):
        x = matrices.matrices
        batch = MatrixInput(x), x, BATCH, algorithm.matrix_preconditioner
        return [Request(*batch)] if x.numel() else []
    requests: list[Request] = []
    ok, table = decision.ok[leaves.number], decision.scalars[leaves.number].table
    for i, matrix, rows in zip(leaves.places, matrices, leaves.rows, strict=True):
        leaf, first = group.leaves[i], group.firsts[i]
        if matrix is None:
            continue
        each = len(leaf.norms) // len(leaf.params)
        for n, piece in enumerate(leaf.as_pieces(matrix)):
            owned: OwnedTensors = leaf.owned[n] if leaf.owned else ()
            s = owned
            if owned:
                columns = table[rows.start + n * each].unbind()
                s = StepScalars.read(algorithm, columns).rule
            requests.append(
                Request(
                    MatrixInput(piece, owned, s),
                    leaf.params[n],
                    algorithm.matrices,
                    algorithm.matrix_preconditioner,
                    group.stages[first + n] if group.stages else None,
                    ok[first + n],
                    writes,
                )
            )
    return requests


# ---- without writing -----------------------------------------------------------------


class Pure:
    """The runner of a pure step: every result is a new tensor."""

    writes = False

    def reduce(self, leaves: Leaves, grads: Sequence[Tensor | None]) -> Tensor:
        sums = []
        for n, g in enumerate(grads):
            assert g is not None
            h = reference(dict(zip(REFERENCE, leaves.references[n], strict=False)))
            sums.append(products(g, h, g.shape[1] >= ROW))
        return torch.cat(sums)

    def map(
        self, function: Formula, leaves: Leaves, operands: Operands, scalars: Scalars
    ) -> list[Results]:
        ok, table = scalars
        results: list[Results] = []
        for n, rows in enumerate(leaves.rows):
            of_leaf = ((name, column[n]) for name, column in operands.items())
            tensors = {name: tensor for name, tensor in of_leaf if tensor is not None}
            results.append(
                masked(function, leaves.algorithm, ok[rows], table[rows], tensors)
            )
        return results

    def small(self, function: Callable[..., Result], *args: Any) -> Result:
        return function(*args)


def masked(
    function: Formula,
    algorithm: Algorithm,
    ok: Tensor,
    table: Tensor,
    tensors: Results,
) -> Results:
    """Return the results of a formula for parts (P, n): where ``ok`` (P,) is False the
    values of the operands of these names.
    """
    columns = [table[:, k, None] for k in range(table.shape[1])]
    s = StepScalars.read(algorithm, columns)
    index = None
    if algorithm.has_noise:
        x = tensors["x"]
        index = torch.arange(x.shape[1], device=x.device)
    ok = ok[:, None]
    new = function(algorithm, s, tensors, index)
    return {
        name: torch.where(ok, value.to(old.dtype), old)
        if name != "o" and (old := tensors.get(name)) is not None
        else value
        for name, value in new.items()
    }
