"""The one step, over parts of tensors: measure all gradients, sum over shards, decide,
update, let owners work on whole matrices, apply. ``Rule.step`` and ``MARS.step`` both
take it; a ``Runner`` says how its formulas are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from marsopt.rules import rounding
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.checks import Number
from marsopt.rules.dtypes import working
from marsopt.rules.preconditioner import (
    MatrixCost,
    MatrixInput,
    MatrixOutput,
    MatrixPreconditioner,
)
from marsopt.step.owners import LOCAL, Collectives, Request, Tensors
from marsopt.step.parts import Parts, numbers_of_elements
from marsopt.step.tables import (
    Decision,
    GroupInputs,
    Inputs,
    StepScalars,
    decide,
    decide_alone,
    scalar_dtype,
    sums_of_norms,
)

ROW = 512  # elements that are summed before rows are

Result = TypeVar("Result")
Place = tuple[int, int]  # of a leaf: its group, and its number there
Gradients = Sequence[Sequence[Tensor | None]]  # of every leaf of every group

# ---- the tensors of a step -----------------------------------------------------------


class Leaf(NamedTuple):
    """A tensor of a step, or with ``is_stack`` a stack (L, ...) of tensors: the pieces
    that lie here, without gradient.
    """

    x: Tensor
    buffers: Mapping[str, Tensor]  # by symbol, those at home in shards, and h, like x
    parts: Parts  # of all its elements
    params: Sequence[Tensor]  # as the user holds them: DTensors, too
    # numbers of the elements in whole tensors: (base, run, stride) of each part (P, 3),
    # or of each element (n,); None: nothing is rounded stochastically
    positions: Tensor | None = None
    owned: Sequence[Tensors] = ()  # of each tensor, the buffers that its owners keep
    # the matrix preconditioner with the numbers of the tensor's param group
    preconditioner: MatrixPreconditioner | None = None
    is_stack: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """Return x and all buffers."""
        return [self.x, *self.buffers.values()]

    def unbind(self, values: Tensor) -> Sequence[Tensor]:
        """Return ``values``, shaped as x, of each tensor."""
        return values.unbind() if self.is_stack else [values]

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Return the values of each tensor, shaped as x."""
        return torch.stack(list(values)) if self.is_stack else values[0]


@dataclass
class Group:
    """The tensors of one formula."""

    algorithm: Algorithm  # asked for formulas, not for numbers
    leaves: Sequence[Leaf]
    inputs: Inputs | GroupInputs
    num_steps: int = 0  # taken before this one, as the host counts them

    def __post_init__(self) -> None:
        parts = accumulate([leaf.parts.num for leaf in self.leaves], initial=0)
        # of each leaf: its rows of the table, and the number of its first tensor
        self.rows = [slice(*pair) for pair in pairwise(parts)]
        self.firsts = [*accumulate([len(x.params) for x in self.leaves], initial=0)]


class Runner(Protocol):
    """Computes the formulas of a step."""

    def measure(self, groups: Sequence[Group], grads: Gradients) -> list[Tensor]:
        """Return the ``products`` of all parts of each group, (P, pairs)."""

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Return ``function(*args)``: a function of ``tables`` that writes nothing."""

    def run_collective(
        self, label: str, function: Callable[..., Result], *args: Any
    ) -> Result:
        """Run ``function``, which contains a collective, eagerly; ``label`` names it in
        a trace.
        """

    def start(
        self, groups: Sequence[Group], grads: Gradients, decision: Decision
    ) -> None:
        """Take over what ``update`` and ``apply`` of this step read."""

    def portions(self, groups: Sequence[Group]) -> Sequence[Sequence[Place]]:
        """Return which leaves are updated together: the temporaries of one portion are
        freed before the next. No portion has leaves of matrix algorithms beside leaves
        of elementwise ones.
        """

    def update(self, places: Sequence[Place]) -> list[Tensor]:
        """Compute ``new_values`` of leaves. If their algorithm is one of matrices,
        return of each leaf the matrices for their owners, shaped as the leaf.
        """

    def apply(self, places: Sequence[Place], directions: Sequence[Tensor]) -> None:
        """Compute the new x of leaves of matrices from their owners' results."""

    def finish(self) -> None:
        """Let this step's gradients go."""

    def store(
        self, ok: Tensor, old: Tensors, new: tuple[Tensor | None, ...]
    ) -> Tensors | None:
        """Return ``new`` if ``ok`` (0-D bool), else ``old``, as in the place of None;
        None if the result was written into ``old``.
        """


# ---- formulas over parts -------------------------------------------------------------


def product_terms(g: Tensor, h: Tensor | None) -> list[Tensor]:
    """Return the products that sum up to <g, g> and, with h, to <g, h> and <h, h>."""
    return [g * g] if h is None else [g * g, g * h, h * h]


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


def new_values(
    algorithm: Algorithm,
    s: StepScalars,
    x: Tensor,
    g: Tensor,
    buffers: Mapping[str, Tensor],
    index: Tensor | None,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return two results: the new x of an elementwise algorithm, or the matrix for the
    owners of a matrix algorithm (None stands for m); and the new buffers by symbol, in
    their own dtypes.

    Args:
        algorithm: the algorithm of x.
        s: scalars of the step, as factors of x.
        x, g: (P, n), a tensor and its gradient.
        buffers: at home in shards, and h if there is one, by symbol (P, n).
        index: numbers of the elements in the whole tensor, for stochastic rounding.
    """
    g = working(g)
    c = s.weights[0] * g
    if algorithm.h_from is not None:
        c = c + s.weights[1] * working(buffers["h"])
    moments = {symbol: working(buffers[symbol]) for symbol in algorithm.moments}
    out, new = algorithm.preconditioner.update(working(x), c, moments, s.rule)
    correction = algorithm.active_correction
    if correction is not None and s.global_clip is not None:
        new["h"] = correction.next_h(s.global_clip * g, working(buffers["h"]))
    return out, {
        symbol: _rounded(algorithm, symbol, value, buffers[symbol].dtype, s.key, index)
        for symbol, value in new.items()
    }


def _rounded(
    algorithm: Algorithm,
    symbol: str,
    value: Tensor,
    dtype: torch.dtype,
    key: Tensor | None,
    index: Tensor | None,
) -> Tensor:
    """Return a new value of a buffer in the buffer's dtype.

    Args:
        algorithm: the algorithm of the parameter.
        symbol: the buffer's.
        value: the new value, in the working dtype.
        dtype: of the buffer.
        key: of the noise in this step, a factor of ``value``.
        index: numbers of the elements in the whole tensor.
    """
    buffers = algorithm.buffers
    if key is None or index is None or not algorithm.rounds(buffers[symbol], dtype):
        return value.to(dtype)
    noise = rounding.noise(index, key, list(buffers).index(symbol))
    return rounding.stochastic(value, noise)


def updated(
    algorithm: Algorithm,
    s: StepScalars,
    x: Tensor,
    g: Tensor,
    buffers: Mapping[str, Tensor],
    index: Tensor | None,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return ``new_values``; parts that do not move keep the old ones."""
    out, new = new_values(algorithm, s, x, g, buffers, index)
    new = {k: torch.where(s.ok, value, buffers[k]) for k, value in new.items()}
    if algorithm.matrix_only:
        return (new["m"] if out is None else out), new
    assert out is not None
    return torch.where(s.ok, out.to(x.dtype), x), new


def applied(algorithm: Algorithm, s: StepScalars, x: Tensor, o: Tensor) -> Tensor:
    """Return the new x of a matrix algorithm, given its owners' results, x and o both
    (P, n). Parts that do not move keep the old one.
    """
    assert s.scale is not None
    preconditioner = algorithm.matrix_preconditioner
    new = preconditioner.apply(working(x), working(o), s.rule, s.scale)
    return torch.where(s.ok, new.to(x.dtype), x)


# ---- the step ------------------------------------------------------------------------


def assess(
    groups: Sequence[Group],
    grads: Gradients,
    *,
    max_norm: Number | None,
    collectives: Collectives,
    runner: Runner,
    has_grad: Tensor | None = None,
) -> tuple[Tensor, Decision]:
    """Measure all gradients and decide about the step; nothing is written.

    Args:
        groups: everything that moves, N norms in all.
        grads: pieces that lie as the leaves; None: the tensor has no gradient here.
        max_norm: threshold of the global gradient norm; None = off.
        collectives: they sum over shards.
        runner: computes the formulas.
        has_grad: (N,) bool, False for tensors without a gradient here; None = all have
            gradients.

    Returns:
        Complete sums, and the decision from them: see ``tables``.
    """
    inputs = [group.inputs for group in groups]
    partial = runner.measure(groups, grads)
    if collectives is LOCAL:
        return runner.call(decide_alone, inputs, partial, has_grad, max_norm)
    leaves: list[Tensor] = []
    for group in groups:
        for leaf in group.leaves:
            each = leaf.parts.num_norms // len(leaf.params)
            leaves += [p for p in leaf.params for _ in range(each)]
    sums = sums_of_norms(inputs, partial, has_grad)
    sums = runner.run_collective("exchange", collectives.sum, sums, leaves)
    return sums, runner.call(decide, inputs, sums, max_norm)


def advance(
    groups: Sequence[Group],
    grads: Gradients,
    decision: Decision,
    *,
    collectives: Collectives,
    runner: Runner,
) -> dict[Place, list[Tensors | None]]:
    """Move parameters and state one step on; a step that is not finite keeps all.

    Returns:
        Of leaves of matrices, for each tensor the buffers that its owners keep; None if
        they were written where they lie.
    """
    runner.start(groups, grads, decision)
    owned: dict[Place, list[Tensors | None]] = {}
    for places in runner.portions(groups):
        matrices = runner.update(places)
        if places and groups[places[0][0]].algorithm.matrix_only:
            work = partial(_precondition, groups, decision, collectives, runner)
            results = runner.run_collective("matrices", work, places, matrices)
            del matrices
            directions = [
                groups[number].leaves[i].joined([output.matrix for output in outputs])
                for (number, i), outputs in zip(places, results, strict=True)
            ]
            runner.apply(places, directions)
            owned |= {
                place: [output.owned for output in outputs]  # type: ignore[misc]
                for place, outputs in zip(places, results, strict=True)
            }
            del results, directions
    runner.finish()
    return owned


def _precondition(
    groups: Sequence[Group],
    decision: Decision,
    collectives: Collectives,
    runner: Runner,
    places: Sequence[Place],
    matrices: Sequence[Tensor],
) -> list[list[MatrixOutput]]:
    """Bring matrices to their owners and back: one call of the verb for each kind of
    cost, in the order of all leaves, as the owners of buffers were planned. Return the
    outputs of each tensor of each leaf.
    """
    by_place = dict(zip(places, matrices, strict=True))
    kinds: dict[MatrixCost, list[Place]] = {}
    for place in sorted(places):
        algorithm = groups[place[0]].algorithm
        kinds.setdefault(algorithm.matrix_preconditioner.cost, []).append(place)
    results: dict[Place, list[MatrixOutput]] = {}
    for alike in kinds.values():
        requests = []
        for place in alike:
            requests += _requests(groups, place, by_place[place], decision, runner)
        back = iter(collectives.on_owners(requests))
        for number, i in alike:
            leaf = groups[number].leaves[i]
            results[number, i] = [next(back) for _ in leaf.params]
    return [results[place] for place in places]


def _requests(
    groups: Sequence[Group],
    place: Place,
    matrix: Tensor,
    decision: Decision,
    runner: Runner,
) -> list[Request]:
    """Return the request of each tensor of a leaf to the owners of its matrices."""
    number, i = place
    group = groups[number]
    leaf, algorithm, first = group.leaves[i], group.algorithm, group.firsts[i]
    before = sum(g.firsts[-1] for g in groups[:number])
    preconditioner = algorithm.matrix_preconditioner
    requests = []
    for n, piece in enumerate(leaf.unbind(matrix), first):
        t = decision.t[number][n] if preconditioner.counts_at_owner else None
        owned = leaf.owned[n - first] if leaf.owned else ()
        request = Request(
            MatrixInput(piece, owned=owned, t=t, own=leaf.preconditioner),
            leaf.params[n - first],
            algorithm.matrices,
            preconditioner,
            preconditioner.stage(group.num_steps, before + n),
        )
        if owned:
            keep = partial(runner.store, decision.ok[number][n])
            request = request._replace(keep=keep)
        requests.append(request)
    return requests


# ---- without writing -----------------------------------------------------------------


class Pure:
    """A runner of one step: every result is a new tensor, and nothing that is passed in
    changes. ``moved`` has the new leaves.
    """

    def __init__(self) -> None:
        self.moved: dict[Place, Leaf] = {}

    def measure(self, groups: Sequence[Group], grads: Gradients) -> list[Tensor]:
        sums = []
        for group, of_group in zip(groups, grads, strict=True):
            of_leaves = []
            for leaf, g in zip(group.leaves, of_group, strict=True):
                assert g is not None
                view = partial(_view, leaf.parts)
                h = None
                if group.algorithm.h_from is not None:
                    h = view(leaf.buffers["h"])
                parts = view(g)
                of_leaves.append(products(parts, h, parts.shape[1] >= ROW))
            sums.append(torch.cat(of_leaves))
        return sums

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        return function(*args)

    def run_collective(
        self, label: str, function: Callable[..., Result], *args: Any
    ) -> Result:
        return function(*args)

    def start(
        self, groups: Sequence[Group], grads: Gradients, decision: Decision
    ) -> None:
        self._groups, self._grads, self._decision = groups, grads, decision
        self.moved = {
            (number, i): leaf
            for number, group in enumerate(groups)
            for i, leaf in enumerate(group.leaves)
        }

    def portions(self, groups: Sequence[Group]) -> Sequence[Sequence[Place]]:
        are_matrices = [group.algorithm.matrix_only for group in groups]
        return [
            [place for place in self.moved if are_matrices[place[0]] == wanted]
            for wanted in (False, True)
        ]

    def update(self, places: Sequence[Place]) -> list[Tensor]:
        matrices = []
        for number, i in places:
            group, leaf = self._groups[number], self.moved[number, i]
            view = partial(_view, leaf.parts)
            x, g, s = view(leaf.x), self._grads[number][i], self._scalars(number, i)
            assert g is not None
            buffers = {symbol: view(b) for symbol, b in leaf.buffers.items()}
            index = None
            if leaf.positions is not None:
                index = numbers_of_elements(leaf.positions, x.shape)
            out, new = updated(group.algorithm, s, x, view(g), buffers, index)
            buffers = {**leaf.buffers, **{k: v.view_as(leaf.x) for k, v in new.items()}}
            leaf = leaf._replace(buffers=buffers)
            assert out is not None
            if group.algorithm.matrix_only:
                matrices.append(out.view_as(leaf.x))
            else:
                leaf = leaf._replace(x=out.view_as(leaf.x))
            self.moved[number, i] = leaf
        return matrices

    def apply(self, places: Sequence[Place], directions: Sequence[Tensor]) -> None:
        for (number, i), o in zip(places, directions, strict=True):
            leaf, s = self.moved[number, i], self._scalars(number, i)
            view = partial(_view, leaf.parts)
            algorithm = self._groups[number].algorithm
            x = applied(algorithm, s, view(leaf.x), view(o))
            self.moved[number, i] = leaf._replace(x=x.view_as(leaf.x))

    def finish(self) -> None:
        pass

    def store(
        self, ok: Tensor, old: Tensors, new: tuple[Tensor | None, ...]
    ) -> Tensors | None:
        pairs = zip(old, new, strict=True)
        return tuple(
            o if n is None else torch.where(ok, n.to(o.dtype), o) for o, n in pairs
        )

    def _scalars(self, number: int, i: int) -> StepScalars:
        group, decision = self._groups[number], self._decision
        rows = group.rows[i]
        ok = decision.ok_parts[number][rows, None]
        columns = decision.tables[number][rows, :, None].unbind(1)
        return StepScalars.read(group.algorithm, ok, columns)


def _view(parts: Parts, x: Tensor) -> Tensor:
    """Return a tensor as its parts (P, n)."""
    return x.reshape(parts.num, parts.sizes[0])
