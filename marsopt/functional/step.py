"""The one step, over stacks of tensors: gradient statistics, decision, update,
orthogonalization, application. ``Rule.step`` and ``MARS.step`` both run ``step``; the
class hands in kernels that write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from marsopt.functional.collectives import Collectives
from marsopt.functional.rows import Rows, row_weights
from marsopt.functional.stacks import repeated, stacked, where_or_unread
from marsopt.functional.step_types import (
    Decision,
    Hyperparameters,
    RuleGroup,
    Scales,
    Stack,
    factor,
    scalar_dtype,
)
from marsopt.rules.algorithm import working, working_dtype
from marsopt.rules.checks import Number
from marsopt.rules.newton_schulz import NewtonSchulz


def global_clip(grad_norm: Tensor, max_norm: Number) -> Tensor:
    """Return torch.nn.utils.clip_grad_norm_'s factor on every gradient, its 1e-6
    included.
    """
    return (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)


def products(stacks: Sequence[Stack]) -> list[Tensor]:
    """Return the inner products of what is clipped in every stack, partial over
    shards.
    """
    return [
        s.algorithm.inner_products(s.g, s.h, s.rows if s.num_clipped > 1 else None)
        for s in stacks
    ]


def statistics(products: Sequence[Tensor], live: Tensor | None) -> Tensor:
    """Return (N, 4): <g,g>, <g,h>, <h,h> of the parts that have a gradient here, else
    zeros, and how many ranks have one.
    """
    sums = torch.cat([_row_of(found) for found in products])
    # not a product: 0 times infinity is no zero
    return sums if live is None else torch.where(live[:, None], sums, 0.0)


def _row_of(products: Tensor) -> Tensor:
    """Return (N, 4) of one or three columns: with zeros for those that lack, and one
    rank.
    """
    return F.pad(F.pad(products, (0, 3 - products.shape[1])), (0, 1), value=1.0)


def decide(
    hypers: Sequence[Hyperparameters], sums: Tensor, max_norm: Number | None
) -> Decision:
    """Decide about a step from the complete sums (N, 4): the clips, whether everything
    is finite, and each algorithm's scalars, for all its tensors at once.

    A tensor that has a gradient on no rank stays as it is; where some ranks have none,
    theirs counts as zero, so that all ranks go on alike.
    """
    sums = sums.to(scalar_dtype(sums.device))
    grad_norm = sums[:, 0].sum().sqrt()
    finite = torch.isfinite(sums).all()
    a = torch.ones_like(grad_norm)
    if max_norm is not None:
        a = global_clip(grad_norm, max_norm)
    parts = sums.split([hyper.num_parts for hyper in hypers])
    found = [
        _scales(hyper, part, a, finite)
        for hyper, part in zip(hypers, parts, strict=True)
    ]
    t = [h.t + s.ok.to(h.t.dtype) for h, s in zip(hypers, found, strict=True)]
    cast = [
        {
            dtype: s.map(lambda v, d=dtype: v if v.dtype == torch.bool else v.to(d))
            for dtype in hyper.dtypes
        }
        for hyper, s in zip(hypers, found, strict=True)
    ]
    return Decision(grad_norm, finite, t, cast)


def _scales(hyper: Hyperparameters, sums: Tensor, a: Tensor, finite: Tensor) -> Scales:
    w_g, w_h = hyper.algorithm.weights(hyper.gamma, a, sums[:, :3])
    t = hyper.t.to(sums.dtype) + 1
    one, live = torch.ones_like(a), hyper.per_tensor(sums[:, 3] > 0)
    k = hyper.algorithm.lookahead(hyper.gamma) if hyper.algorithm.transports else None
    return Scales(
        ok=live & finite,
        a=a,
        g=w_g,
        h=w_h,
        k=None if k is None else k * one,
        own=tuple(v * one for v in hyper.algorithm.scalars(t, hyper.lr, hyper.gamma)),
    )


def per_stack(groups: Sequence[RuleGroup], decision: Decision) -> list[Scales]:
    """Cut the groups' vectors into stacks, in the order of ``groups``."""
    found = []
    for group, cast in zip(groups, decision.scales, strict=True):
        cut = {dtype: s.per_stack(group.stacks) for dtype, s in cast.items()}
        for i, stack in enumerate(group.stacks):
            found.append(cut[working_dtype(stack.x)][i])
    return found


def assess(
    groups: Sequence[RuleGroup],
    live: Tensor | None,
    max_norm: Number | None,
    total: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Decision]:
    """Measure all gradients and decide about the step.

    Args:
        groups: everything that moves, N parts in all.
        live: (N,) bool, False for parts without a gradient here; None = all have one.
        max_norm: threshold of the global norm; None = off.
        total: completes sums (N, 4) over shards.
    """
    stacks = [stack for group in groups for stack in group.stacks]
    sums = total(statistics(products(stacks), live))
    return sums, decide([group.hyper for group in groups], sums, max_norm)


def update(stack: Stack, scales: Scales) -> tuple[Stack, Tensor | None]:
    """Move buffers and, for an elementwise algorithm, x one step on.

    For a matrix algorithm x stays, and the second result is the stack of matrices to
    orthogonalize; None stands for m, so that no second full-size tensor is made, and
    for an elementwise algorithm.
    """
    algorithm, s = stack.algorithm, scales.over(stack.x)
    g = working(stack.g)
    c = s.g * g
    if stack.h is not None:
        c = c + s.h * working(stack.h)
    moments = {
        symbol: working(stack.buffers[symbol])
        for symbol, dims in algorithm.preconditioner.buffers.items()
        if dims is None
    }
    out, new = algorithm.preconditioner.update(working(start(stack)), c, moments, s.own)
    if algorithm.keeps_h:
        new["h"] = s.a * g
    buffers = dict(stack.buffers)
    for symbol, value in new.items():
        old = buffers[symbol]
        buffers[symbol] = torch.where(s.ok, value.to(old.dtype), old)
    stack = stack._replace(buffers=buffers)
    if algorithm.matrix_only:
        return stack, out
    return moved(stack, out, s), None


def start(stack: Stack) -> Tensor:
    """Return the parameters that a step starts from: with transport those in the state,
    while ``stack.x`` is the point ahead.
    """
    return stack.buffers["x"] if stack.algorithm.transports else stack.x


def moved(stack: Stack, new: Tensor, s: Scales) -> Stack:
    """Return ``stack`` with the parameters ``new``; with transport those go to the
    state, and y = x + k (x - x_prev) takes their place.
    """
    old, dtype = start(stack), stack.x.dtype
    x = torch.where(s.ok, new.to(dtype), old)
    if not stack.algorithm.transports:
        return stack._replace(x=x)
    y = new + s.k * (new - working(old))
    y = where_or_unread(s.ok, y.to(dtype), stack.x)
    return stack._replace(x=y, buffers={**stack.buffers, "x": x})


def apply(stack: Stack, factors: Tensor, rows: Rows | None, scales: Scales) -> Stack:
    """Move x of a matrix algorithm one step on, given the orthogonal factors of what
    ``update`` returned; where rows are scaled, their moment too.
    """
    s, page = scales.over(stack.x), stack.algorithm.preconditioner
    o, buffers = working(factors), stack.buffers
    if rows is not None:
        o, old = factor(rows.weights, o) * o, buffers["r"]
        r = torch.where(factor(scales.ok, old), rows.r.to(old.dtype), old)
        buffers = {**buffers, "r": r}
    new = page.apply(working(start(stack)), o, s.own, stack.matrix_shape)
    return moved(stack._replace(buffers=buffers), new, s)


def orthogonalize(
    stacks: Sequence[Stack],
    matrices: Sequence[Tensor | None],
    leaves: Sequence[Sequence[Tensor]],
    collectives: Collectives,
) -> list[Tensor | None]:
    """Return the factors of what ``update`` returned, stack by stack (None for an
    elementwise algorithm): one call of the verb per way of orthogonalizing.
    """
    factors: list[Tensor | None] = [None] * len(stacks)
    # a dict keeps the stacks' order, which is the same on every rank
    ways: dict[NewtonSchulz, list[int]] = {}
    for i, stack in enumerate(stacks):
        if stack.algorithm.matrix_only:
            ways.setdefault(stack.algorithm.preconditioner.ns, []).append(i)
    for ns, mine in ways.items():
        pieces = [
            stacks[i].buffers["m"] if matrices[i] is None else matrices[i] for i in mine
        ]
        found = iter(
            collectives.orthogonalize(
                [u for piece in pieces for u in piece.unbind()],
                ns,
                [p for i in mine for p in leaves[i]],
                [stacks[i].algorithm.matrices for i in mine for _ in leaves[i]],
            )
        )
        for i in mine:
            factors[i] = stacked([next(found) for _ in range(stacks[i].num_tensors)])
    return factors


class PureKernels:
    """The parts of a step, out of place: nothing that is passed in changes. The class's
    ``InPlaceKernels`` has the same methods, compiled, and writes into its inputs.
    """

    assess = staticmethod(assess)

    def update(self, stacks, scales):
        moved = [update(stack, s) for stack, s in zip(stacks, scales, strict=True)]
        return [stack for stack, _ in moved], [u for _, u in moved]

    orthogonalize = staticmethod(orthogonalize)

    def apply(self, stacks, factors, rows, scales):
        return [
            stack if o is None else apply(stack, o, row, s)
            for stack, o, row, s in zip(stacks, factors, rows, scales, strict=True)
        ]


PURE = PureKernels()


class Done(NamedTuple):
    """What a step returns: the stacks in the order of its groups, and what it found."""

    stacks: list[Stack]
    decision: Decision
    sums: Tensor  # (N, 4), of N parts


def step(
    groups: Sequence[RuleGroup],
    leaves: Sequence[Sequence[Tensor]],
    *,
    max_norm: Number | None,
    collectives: Collectives,
    live: Tensor | None = None,
    alike: str | None = None,
    kernels: PureKernels = PURE,
) -> Done:
    """Take the whole step.

    Args:
        groups: everything that moves.
        leaves: stack by stack, the parameters as their owner holds them (DTensors too).
        max_norm: threshold of the global gradient norm; None = off.
        collectives: who sums over shards and orthogonalizes.
        live: as in ``assess``.
        alike: what has to be the same on all ranks; else the step is void.
        kernels: who computes.
    """
    stacks = [stack for group in groups for stack in group.stacks]
    every = []
    for stack, part in zip(stacks, leaves, strict=True):
        every += repeated(part, stack.num_clipped)
    sums, decision = kernels.assess(
        groups, live, max_norm, lambda partial: collectives.sum(partial, every, alike)
    )
    scales = per_stack(groups, decision)
    moved, matrices = kernels.update(stacks, scales)
    if any(stack.algorithm.matrix_only for stack in stacks):
        factors = kernels.orthogonalize(moved, matrices, leaves, collectives)
        rows = row_weights(moved, factors, leaves, collectives)
        moved = kernels.apply(moved, factors, rows, scales)
    return Done(moved, decision, sums)
