"""The one step, over stacks of tensors. ``assess`` measures all gradients and decides;
``advance`` moves parameters and state. ``Rule.step`` and ``MARS.step`` both run these
two; the class hands in a ``Run`` that compiles their parts and writes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from marsopt.functional.collectives import (
    LOCAL,
    Collectives,
    Request,
    Tensors,
    flat_indices,
)
from marsopt.functional.stacks import repeated, stacked
from marsopt.functional.step_types import (
    Decision,
    Hyperparameters,
    Members,
    RuleGroup,
    Stack,
    StackScalars,
    StepScalars,
    scalar_dtype,
)
from marsopt.rules import rounding
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.checks import Number
from marsopt.rules.decay import at
from marsopt.rules.dtypes import root, working, working_dtype
from marsopt.rules.preconditioner import MatrixCost, MatrixInput

if TYPE_CHECKING:  # shapes, which tests/library/test_shapes.py checks
    from jaxtyping import Bool, Float

ROW = 256  # elements; of shorter rows, as of a convolution, several are one


Result = TypeVar("Result")
Each = Callable[[Sequence[Stack], Sequence[Tensor]], list[Tensor]]  # ``products``
Move = Callable[..., tuple[Stack, Tensor | None]]  # of a stack and its own columns


# ---- how parts of a step are run -----------------------------------------------------


class Run(Protocol):
    """A runner of the parts of a step."""

    @property
    def is_fused(self) -> bool:
        """Whether ``assess_alone`` is to be one call: one process has everything."""

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Return ``function(*args)``, which writes nothing."""

    def run_collective(
        self, what: str, function: Callable[..., Result], *args: Any
    ) -> Result:
        """Run ``function``, which contains a collective, eagerly; ``what`` names it in
        a trace.
        """

    def each(
        self, function: Each, stacks: Sequence[Stack], grads: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return ``function(stacks, grads)``, a list with one tensor per stack; it may
        be called with some of them at a time.
        """

    def move(
        self, function: Move, stacks: Sequence[Stack], *columns: Sequence[Any]
    ) -> tuple[list[Stack], list[Tensor | None]]:
        """Return the new stacks and the second results of ``function``, for each stack
        with its own of ``columns``. Stacks whose first of them is None are skipped.
        """

    def per_stack(
        self, groups: Sequence[RuleGroup], decision: Decision
    ) -> list[StackScalars]:
        """Return ``step.per_stack`` of these; a later step may write into it."""

    def portions(self, stacks: Sequence[Stack]) -> Sequence[Sequence[int]]:
        """Return which stacks, by position, go through ``move`` and
        ``precondition_stacks`` together: the temporaries of one portion are freed
        before the next.
        """

    def matrix_outputs(
        self, stacks: Sequence[Stack], part: Sequence[int]
    ) -> list[Tensor | None]:
        """Return, for every stack, where ``update`` writes the matrices that go to
        their owners, in one portion: rows of one batch; None: in a tensor of its own.
        """

    def store(
        self, ok: Tensor, old: tuple[Tensor, ...], new: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...] | None:
        """Return ``new``, where it is not None, if ``ok`` (0-D bool), else ``old``;
        None where the result was written into ``old``.
        """


class Pure:
    """Every result is a new tensor: nothing that is passed in changes."""

    is_fused = False

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        return function(*args)

    def run_collective(
        self, what: str, function: Callable[..., Result], *args: Any
    ) -> Result:
        return function(*args)

    def each(
        self, function: Each, stacks: Sequence[Stack], grads: Sequence[Tensor]
    ) -> list[Tensor]:
        return function(stacks, grads)

    def move(
        self, function: Move, stacks: Sequence[Stack], *columns: Sequence[Any]
    ) -> tuple[list[Stack], list[Tensor | None]]:
        moved = list(stacks)
        more: list[Tensor | None] = [None] * len(stacks)
        for i, (stack, *entries) in enumerate(zip(stacks, *columns, strict=True)):
            if entries[0] is not None:
                moved[i], more[i] = function(stack, *entries)
        return moved, more

    def per_stack(
        self, groups: Sequence[RuleGroup], decision: Decision
    ) -> list[StackScalars]:
        return per_stack(groups, decision)

    def portions(self, stacks: Sequence[Stack]) -> Sequence[Sequence[int]]:
        return [range(len(stacks))]

    def matrix_outputs(
        self, stacks: Sequence[Stack], part: Sequence[int]
    ) -> list[Tensor | None]:
        return [None] * len(stacks)

    def store(
        self, ok: Tensor, old: tuple[Tensor, ...], new: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...] | None:
        pairs = zip(old, new, strict=True)
        return tuple(
            o if n is None else torch.where(ok, n.to(o.dtype), o) for o, n in pairs
        )


PURE = Pure()


# ---- measuring and deciding ----------------------------------------------------------


def assess(
    groups: Sequence[RuleGroup],
    grads: Sequence[Tensor],
    members: Sequence[Members],
    *,
    max_norm: Number | None,
    collectives: Collectives,
    live: Tensor | None = None,
    run: Run = PURE,
) -> tuple[Tensor, Decision]:
    """Measure all gradients and decide about the step.

    Args:
        groups: everything that moves, N parts in all.
        grads: of every stack, in the order of ``groups``; of one tensor with L or
            without it.
        members: of every stack.
        max_norm: threshold of the global gradient norm; None = off.
        collectives: they sum over shards.
        live: (N,) bool, False for parts without a gradient here; None = all have one.
        run: the runner of the parts.

    Returns:
        Complete sums, and the decision from them: see ``statistics`` and ``decide``.
    """
    stacks, hypers = stacks_of(groups), [group.hyper for group in groups]
    if run.is_fused:
        return run.call(assess_alone, hypers, stacks, list(grads), live, max_norm)
    inner_products = run.each(products, stacks, grads)
    if collectives is LOCAL:
        return run.call(decide_alone, hypers, inner_products, live, max_norm)
    leaves: list[Tensor] = []
    for stack, stack_members in zip(stacks, members, strict=True):
        leaves += repeated(stack_members.leaves, stack.num_clipped)
    partial = statistics(inner_products, live)
    sums = run.run_collective("exchange", collectives.sum, partial, leaves)
    return sums, run.call(decide, hypers, sums, max_norm)


def assess_alone(
    hypers: Sequence[Hyperparameters],
    stacks: Sequence[Stack],
    grads: Sequence[Tensor],
    live: Tensor | None,
    max_norm: Number | None,
) -> tuple[Tensor, Decision]:
    """``assess`` where one process has everything: one graph."""
    return decide_alone(hypers, products(stacks, grads), live, max_norm)


def decide_alone(
    hypers: Sequence[Hyperparameters],
    inner_products: Sequence[Tensor],
    live: Tensor | None,
    max_norm: Number | None,
) -> tuple[Tensor, Decision]:
    """``decide`` from inner products that are complete: one process has everything."""
    sums = statistics(inner_products, live)
    return sums, decide(hypers, sums, max_norm)


def stacks_of(groups: Sequence[RuleGroup]) -> list[Stack]:
    """Return the stacks of all groups, in order."""
    return [stack for group in groups for stack in group.stacks]


def products(stacks: Sequence[Stack], grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the inner products of the clipped parts of every stack, partial over
    shards, from one read of g and h: (parts, 1), of (g, g); with h (parts, 3), of
    (g, g), (g, h) and (h, h).

    Written as sums of products, not as norms: inductor then keeps them in one graph
    with divisions by them. Rows are summed first, then all products of them at once:
    a GPU then reads whole rows in its widest loads, where inductor's own split of a
    long sum need not divide it.
    """
    return [_products(stack, g) for stack, g in zip(stacks, grads, strict=True)]


def _products(stack: Stack, g: Tensor) -> Tensor:
    g, rows = working(g.expand_as(stack.x)), stack.clipped_rows
    first = 1 if rows is None else stack.num_row_dims  # a norm has the remaining dims
    dims = row_dims(g.shape, first)
    terms = product_terms(g, None if stack.h is None else working(stack.h))
    # (L, pairs, *the dims that are left)
    sums = torch.stack([t.sum(dims) if dims else t for t in terms], 1)
    if rows is None:
        return sums.flatten(2).sum(2) if sums.ndim > 2 else sums
    if sums.ndim > 1 + first:
        sums = sums.flatten(1 + first).sum(-1)
    matrix_sums: Tensor = rows.sum(sums.flatten(0, 1)).view(*sums.shape[:2], -1)
    return matrix_sums.mT.flatten(0, 1)


def product_terms(g: Tensor, h: Tensor | None) -> list[Tensor]:
    """Return the products that sum up to <g, g> and, with h, to <g, h> and <h, h>."""
    return [g * g] if h is None else [g * g, g * h, h * h]


def row_dims(shape: Sequence[int], first: int) -> tuple[int, ...]:
    """Return the last dims of ``shape``, none before ``first``, that make a row long
    enough to be read at once.
    """
    start, size = len(shape), 1
    while start > first and size < ROW:
        start -= 1
        size *= shape[start]
    return tuple(range(start, len(shape)))


def statistics(
    products: Sequence[Float[Tensor, "_ _"]], live: Bool[Tensor, " n"] | None
) -> Float[Tensor, "n width"]:
    """Return (N, pairs + 1): the inner products, and in the last column how many ranks
    have a gradient. A part without a gradient here has zeros in the place of g, but its
    h counts: another rank may have a gradient of the same tensor.
    """
    width = max(p.shape[1] for p in products)
    alike = [
        p if p.shape[1] == width else F.pad(p, (0, width - p.shape[1]))
        for p in products
    ]
    if torch.compiler.is_compiling():  # one kernel, where eagerly this is many calls
        sums = torch.cat([F.pad(p, (0, 1), value=1.0) for p in alike])
    else:
        sums = F.pad(torch.cat(alike), (0, 1), value=1.0)
    if live is not None:
        sums[:, -1] = live
    return sums


def global_clip(grad_norm: Float[Tensor, ""], max_norm: Number) -> Float[Tensor, ""]:
    """Return torch.nn.utils.clip_grad_norm_'s factor on every gradient, its 1e-6
    included.
    """
    return (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)


def decide(
    hypers: Sequence[Hyperparameters], sums: Tensor, max_norm: Number | None
) -> Decision:
    """Decide about a step from the complete sums: the clips, whether everything is
    finite (learning rates that the host has not read, too), and each algorithm's
    table of scalars, for all its tensors at once.

    Finite are the sums, and the squared norm of every c in its working dtype and in
    bfloat16: no second moment is larger than the largest c^2, which is no larger.

    A tensor that has a gradient on no rank stays as it is; where some ranks have none,
    theirs counts as zero, so that all ranks go on with equal values.
    """
    clips = _clips(hypers, sums, max_norm)
    grad_norm, a = clips.square.sqrt(), clips.global_factor
    finite = torch.isfinite(clips.sums).all()
    for hyper in hypers:
        if hyper.unread_lr is not None:  # of the whole group, or of each tensor
            finite = finite & torch.isfinite(hyper.unread_lr).all()
    for hyper, squares in zip(hypers, clips.squares, strict=True):
        finite = finite & (squares <= _largest(hyper)).all()
    t, oks, tables = [], [], []
    for hyper, part, group_weights in zip(
        hypers, clips.parts, clips.weights, strict=True
    ):
        scalars = _scalars(hyper, part, a, finite, group_weights)
        table = scalars.table(hyper)
        t.append(hyper.t + scalars.ok.to(hyper.t.dtype))
        oks.append(scalars.ok)
        tables.append({dtype: table.to(dtype) for dtype in hyper.dtypes})
    return Decision(grad_norm, finite, t, oks, tables)


class Clips(NamedTuple):
    """The clips of a step, and the sums that they are made of."""

    sums: Tensor  # (N, pairs + 1) in the dtype of scalars
    square: Tensor  # () of the norm of all gradients
    global_factor: Tensor  # () of every gradient
    parts: Sequence[Tensor]  # of every algorithm, its rows of ``sums``
    weights: list[tuple[Tensor, ...]]  # of every algorithm, as ``_weights``
    squares: list[Tensor]  # of every algorithm, of the norms of c


def _clips(
    hypers: Sequence[Hyperparameters], sums: Tensor, max_norm: Number | None
) -> Clips:
    """Return the clips by complete sums; a tensor that has a gradient on no rank has
    sums of zero.
    """
    # not a product: 0 times infinity is no zero
    sums = torch.where(sums[:, -1:] == 0, 0.0, sums)
    sums = sums.to(scalar_dtype(sums.device))
    square = sums[:, 0].sum()
    a = torch.ones_like(square)
    if max_norm is not None:
        a = global_clip(root(square), max_norm)
    parts = sums.split([hyper.num_parts for hyper in hypers])
    weighed = [
        _weights(hyper, part, a) for hyper, part in zip(hypers, parts, strict=True)
    ]
    weights = [group_weights for group_weights, _ in weighed]
    return Clips(sums, square, a, parts, weights, [squares for _, squares in weighed])


def clip_factors(
    hypers: Sequence[Hyperparameters], sums: Tensor, max_norm: Number | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the factors of all clips that ``decide`` makes of the same arguments: the
    sums of gradients (N, pairs + 1), the factor of the global clip, 0-D, and for every
    algorithm the factor of each part's own clip (P,).
    """
    clips = _clips(hypers, sums, max_norm)
    factors = []
    for hyper, part, (of_g, *_) in zip(hypers, clips.parts, clips.weights, strict=True):
        correction, unclipped = hyper.algorithm.active_correction, clips.global_factor
        if correction is not None:
            beta1 = _beta1(hyper, part.dtype)
            unclipped = unclipped * correction.coefficients(beta1, hyper.gamma)[0]
        factor = of_g / unclipped  # 0 / 0 where an infinite norm makes a 0
        factors.append(torch.where(of_g == 0, 1.0, factor))
    return clips.sums, clips.global_factor, factors


def _largest(hyper: Hyperparameters) -> float:
    """Return the largest number that the state may hold."""
    algorithm = hyper.algorithm
    correction = algorithm.active_correction
    h_dtype = None if correction is None else correction.h_dtype
    narrow = {torch.bfloat16 if d == torch.float32 else d for d in hyper.dtypes}
    narrow |= {torch.bfloat16} & {algorithm.state_dtype, h_dtype}
    return min(torch.finfo(dtype).max for dtype in narrow)


def _weights(
    hyper: Hyperparameters, sums: Tensor, a: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the weights of g and h in c, and the squared norms of c, or of g where c
    is that, before the global clip.
    """
    correction = hyper.algorithm.active_correction
    if correction is None:
        return (a * torch.ones_like(sums[:, 0]),), sums[:, 0]
    beta1 = _beta1(hyper, sums.dtype)
    return correction.weights(beta1, hyper.gamma, a, sums[:, :-1])


def _beta1(hyper: Hyperparameters, dtype: torch.dtype) -> Number:
    """Return the decay of the first moment in this step, a number or (P,)."""
    preconditioner = hyper.algorithm.preconditioner
    t = hyper.t.to(dtype) + 1
    beta1: Number = at(preconditioner.beta1, t, preconditioner.log_time)
    if isinstance(beta1, Tensor) and beta1.ndim:
        return hyper.per_part(beta1)
    return beta1


def _scalars(
    hyper: Hyperparameters,
    sums: Tensor,
    a: Tensor,
    finite: Tensor,
    weights: tuple[Tensor, ...],
) -> StepScalars:
    """Return the scalars of a step."""
    algorithm, t = hyper.algorithm, hyper.t.to(sums.dtype) + 1
    unit, live = torch.ones_like(a), hyper.per_tensor(sums[:, -1] > 0)
    rule = tuple(v * unit for v in algorithm.scalars(t, hyper.lr, hyper.gamma))
    grad_clip = a if algorithm.h_from == "step" else None
    key = rounding.step_key(t) if algorithm.stochastic_rounding else None
    return StepScalars(live & finite, grad_clip, weights, key, rule)


# ---- moving --------------------------------------------------------------------------


class StackContext(NamedTuple):
    """Per-stack inputs of the owner step."""

    num_steps: int  # that were taken before
    first: int  # number of the first of them, among all tensors
    ok: Tensor  # (L,) bool: which of them move
    t: Tensor  # (L,) their steps, this one too


class OwnerResult(NamedTuple):
    """What owners have made of the matrices of a stack."""

    matrix: Tensor  # (L, *piece)
    owned: list[Tensors | None]  # of each tensor; None: written where they lie


class Moved(NamedTuple):
    """The results of a step, stack by stack in the order of its groups."""

    stacks: list[Stack]
    owned: list[list[Tensors | None]]  # as in ``OwnerResult``


def advance(
    groups: Sequence[RuleGroup],
    grads: Sequence[Tensor],
    members: Sequence[Members],
    decision: Decision,
    *,
    collectives: Collectives,
    run: Run = PURE,
) -> Moved:
    """Move parameters and state one step on; a step that is not finite keeps all."""
    stacks, scalars = stacks_of(groups), run.per_stack(groups, decision)
    owned: list[list[Tensors | None]] = [[] for _ in stacks]
    if any(stack.algorithm.matrix_only for stack in stacks):
        contexts, first = [], 0
        for group, *of_tensors in zip(groups, decision.ok, decision.t, strict=True):
            sizes = [stack.num_tensors for stack in group.stacks]
            for ok, t in zip(*(v.split(sizes) for v in of_tensors), strict=True):
                contexts.append(StackContext(group.num_steps, first, ok, t))
                first += len(ok)
        for part in run.portions(stacks):
            columns = grads, members, scalars, contexts
            stacks, part_owned = _advance(part, stacks, columns, collectives, run)
            for i, buffers in part_owned.items():
                owned[i] = buffers
    else:
        stacks, _ = run.move(update, stacks, scalars, grads)
    return Moved(stacks, owned)


def _advance(
    part: Sequence[int],
    stacks: Sequence[Stack],
    columns: tuple[
        Sequence[Tensor],
        Sequence[Members],
        Sequence[StackScalars],
        Sequence[StackContext],
    ],
    collectives: Collectives,
    run: Run,
) -> tuple[list[Stack], dict[int, list[Tensors | None]]]:
    """Move the stacks of one portion; return all stacks, and by position the owners'
    buffers of matrix stacks.
    """
    grads, members, scalars, contexts = columns
    positions, selected = range(len(stacks)), set(part)
    rows_of_batch = run.matrix_outputs(stacks, part)
    stacks, outputs = run.move(
        update,
        stacks,
        [scalars[i] if i in selected else None for i in positions],
        grads,
        rows_of_batch,
    )
    outputs = [
        out if row is None else row
        for out, row in zip(outputs, rows_of_batch, strict=True)
    ]
    del rows_of_batch
    # in the order of all stacks, in which the owners of buffers were planned
    whole = [i for i in sorted(part) if stacks[i].algorithm.matrix_only]
    if not whole:
        return stacks, {}
    inputs = [
        [column[i] for i in whole] for column in (stacks, outputs, members, contexts)
    ]
    del outputs
    results = run.run_collective(
        "matrices", precondition_stacks, *inputs, collectives, run
    )
    del inputs
    by_position = dict(zip(whole, results, strict=True))
    matrices = [by_position[i].matrix if i in by_position else None for i in positions]
    stacks, _ = run.move(apply, stacks, matrices, scalars)
    return stacks, {i: r.owned for i, r in by_position.items()}


def per_stack(groups: Sequence[RuleGroup], decision: Decision) -> list[StackScalars]:
    """Return the scalars of each stack, in the order of ``groups``."""
    scalars = []
    for group, ok, tables in zip(groups, decision.ok, decision.tables, strict=True):
        sizes = group.hyper.sizes or [stack.num_tensors for stack in group.stacks]
        oks = group.hyper.per_part(ok).split(sizes)
        cuts = {dtype: table.split(sizes) for dtype, table in tables.items()}
        for i, stack in enumerate(group.stacks):
            scalars.append(StackScalars(oks[i], cuts[working_dtype(stack.x)][i]))
    return scalars


def update(
    stack: Stack, scalars: StackScalars, g: Tensor, matrix: Tensor | None = None
) -> tuple[Stack, Tensor | None]:
    """Move buffers and, for an elementwise algorithm, x one step on.

    For a matrix algorithm x stays, and the second result is the stack of matrices that
    go to their owners; None stands for m, so that no second full-size tensor is made,
    and for an elementwise algorithm. Where ``matrix`` is given, they are written there.
    """
    algorithm, s = stack.algorithm, StepScalars.of(scalars, stack, stack.x)
    index = element_numbers(stack)
    out, new = new_values(
        algorithm, s, stack.x, g.expand_as(stack.x), stack.buffers, stack.h, index
    )
    buffers = dict(stack.buffers)
    for symbol, value in new.items():
        buffers[symbol] = torch.where(s.ok, value, buffers[symbol])
    stack = stack._replace(buffers=buffers)
    if algorithm.matrix_only and matrix is not None:
        matrix.copy_(stack.buffers["m"] if out is None else out)
        return stack, None
    if algorithm.matrix_only:
        return stack, out
    assert out is not None
    return write_params(stack, out, s), None


def new_values(
    algorithm: Algorithm,
    s: StepScalars,
    x: Tensor,
    g: Tensor,
    buffers: Mapping[str, Tensor],
    h: Tensor | None,
    index: Tensor | None,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return two results: the new x of an elementwise algorithm, or the matrix for the
    owners of a matrix algorithm (None stands for m); and the new buffers by symbol, in
    their own dtypes.

    Args:
        algorithm: what moves x.
        s: scalars of the step, as factors of x.
        x, g: a tensor, and its gradient of the same shape.
        buffers: at home in shards, by symbol, of the same shape.
        h: the reference gradient, if there is one.
        index: numbers of the elements in the whole tensor, for stochastic rounding.
    """
    g = working(g)
    c = s.weights[0] * g
    if h is not None:
        c = c + s.weights[1] * working(h)
    moments = {symbol: working(buffers[symbol]) for symbol in algorithm.moments}
    out, new = algorithm.preconditioner.update(working(x), c, moments, s.rule)
    correction = algorithm.active_correction
    if correction is not None and s.grad_clip is not None:
        new["h"] = correction.next_h(s.grad_clip * g, working(buffers["h"]))
    return out, {
        symbol: rounded(algorithm, symbol, value, buffers[symbol].dtype, s.key, index)
        for symbol, value in new.items()
    }


def element_numbers(stack: Stack) -> Tensor | None:
    """Return the numbers of a piece's elements in the whole tensor; None if nothing is
    rounded stochastically.
    """
    if not stack.algorithm.stochastic_rounding:
        return None
    shape = stack.shape
    dtype = torch.int32 if shape.numel() < 2**31 else torch.int64
    return flat_indices(shape, stack.cuts, stack.x.device, dtype)


def rounded(
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
        index: as ``element_numbers`` returns it.
    """
    buffers = algorithm.buffers
    if key is None or index is None or not algorithm.rounds(buffers[symbol], dtype):
        return value.to(dtype)
    noise = rounding.noise(index, key, list(buffers).index(symbol))
    return rounding.stochastic(value, noise)


def write_params(stack: Stack, new: Tensor, s: StepScalars) -> Stack:
    """Return ``stack`` with the parameters ``new``."""
    x = torch.where(s.ok, new.to(stack.x.dtype), stack.x)
    return stack._replace(x=x)


def apply(stack: Stack, matrix: Tensor, scalars: StackScalars) -> tuple[Stack, None]:
    """Move x of a matrix algorithm one step on, given its owners' results."""
    s = StepScalars.of(scalars, stack, stack.x)
    preconditioner = stack.algorithm.matrix_preconditioner
    x = working(stack.x)
    new = preconditioner.apply(x, working(matrix), s.rule, stack.scale_of(x))
    return write_params(stack, new, s), None


def precondition_stacks(
    stacks: Sequence[Stack],
    outputs: Sequence[Tensor | None],
    members: Sequence[Members],
    contexts: Sequence[StackContext],
    collectives: Collectives,
    run: Run,
) -> list[OwnerResult]:
    """Bring what ``update`` returned to the owners of whole matrices and back, stack by
    stack of matrix algorithms: one call of the verb for each way in which that costs
    something. Owners' buffers are lists, one item for each tensor.
    """
    results: dict[int, OwnerResult] = {}
    # a dict keeps the stacks' order, which is the same on every rank
    ways: dict[MatrixCost, list[int]] = {}
    for i, stack in enumerate(stacks):
        ways.setdefault(stack.algorithm.matrix_preconditioner.cost, []).append(i)
    for positions in ways.values():
        requests = []
        for i in positions:
            requests += _requests(stacks[i], outputs[i], members[i], contexts[i], run)
        back = iter(collectives.on_owners(requests))
        for i in positions:
            parts = [next(back) for _ in range(stacks[i].num_tensors)]
            results[i] = OwnerResult(
                stacked([part.matrix for part in parts]),
                [cast("Tensors | None", part.owned) for part in parts],
            )
    return [results[i] for i in range(len(stacks))]


def _requests(
    stack: Stack,
    output: Tensor | None,
    members: Members,
    context: StackContext,
    run: Run,
) -> list[Request]:
    """Return the request of each tensor of a stack to the owners of its matrices."""
    algorithm = stack.algorithm
    ok = context.ok.unbind() if members.owned else [context.ok] * stack.num_tensors
    matrices = (stack.buffers["m"] if output is None else output).unbind()
    steps: Sequence[Tensor | None] = [None] * stack.num_tensors
    if algorithm.matrix_preconditioner.counts_at_owner:
        steps = context.t.unbind()
    return [
        Request(
            MatrixInput(
                matrix,
                members.owned[n] if members.owned else (),
                steps[n],
                members.own[n] if members.own else None,
            ),
            leaf,
            algorithm.matrices,
            algorithm.matrix_preconditioner,
            algorithm.matrix_preconditioner.stage(context.num_steps, context.first + n),
            partial(run.store, ok[n]),
        )
        for n, (matrix, leaf) in enumerate(zip(matrices, members.leaves, strict=True))
    ]
