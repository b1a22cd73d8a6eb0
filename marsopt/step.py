"""One optimizer step over stacks of leaves: measure, scale, move, orthogonalize,
settle. Everything here is pure.

Symbols, here and in every rule: x parameter, g gradient, h reference gradient, c
corrected and clipped gradient, m and v moments, o orthogonal factor, t step, k = gamma
beta1 / (1 - beta1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from marsopt.collectives import Collectives
from marsopt.stacks import stacked

if TYPE_CHECKING:
    from marsopt.rule import LeafRule, Number


class Stack(NamedTuple):
    """L leaves of one shape that take one rule in one step, as (L, *shape) tensors of
    local pieces. The graph of a step is as large as the number of stacks, whatever L.
    """

    rule: LeafRule
    lr: Number
    gamma: Number
    # (L,) steps that each leaf has taken
    t: Tensor
    x: Tensor
    g: Tensor
    # None where the rule corrects nothing
    h: Tensor | None
    # where g is kept as the next h (approximate MARS: h itself); else None
    kept: Tensor | None
    # in the order of rule.buffers
    buffers: tuple[Tensor, ...]
    # of one whole leaf, of which x, g, h and buffers may hold shards
    shape: torch.Size
    # what h is still to be multiplied with, 0-D; None = 1
    h_scale: Tensor | None = None

    @property
    def num_leaves(self) -> int:
        return self.x.shape[0]


class Scales(NamedTuple):
    """What is one number for a whole leaf, as vectors (L,) over the leaves of a stack.

    In the dtype that the stack is computed in: a wider one would widen the products.
    """

    # bool: the step is finite and the leaf has a gradient
    ok: Tensor
    # a: what the gradient is multiplied with before it is kept as h
    keep: Tensor
    # c = scales.g g + scales.h h
    g: Tensor
    h: Tensor
    # the rule's own: rates and bias corrections
    rule: tuple[Tensor, ...]

    def over(self, x: Tensor) -> Scales:
        """As factors of a stack ``x``."""
        shape = (-1, *(1 for _ in x.shape[1:]))
        return Scales(
            *(v.view(shape) for v in self[:4]), tuple(v.view(shape) for v in self.rule)
        )


class Verdict(NamedTuple):
    """What a step found out from all norms, as 0-D tensors."""

    grad_norm: Tensor  # global norm of the gradient before any clip
    finite: Tensor  # bool: False means that nothing was changed
    a: Tensor  # factor of the global clip


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Scalars are float64, since 1 - beta^t cancels; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Half precision is computed in float32; anything wider in itself."""
    return torch.promote_types(tensor.dtype, torch.float32)


def working(tensor: Tensor) -> Tensor:
    """``tensor`` in its working dtype."""
    return tensor.to(working_dtype(tensor))


def measure(stacks: Sequence[Stack], live: Sequence[Tensor] | None = None) -> Tensor:
    """<g,g>, <g,h>, <h,h> of every leaf from one read of (g, h), and whether it lives.

    Written as sums of products, not as norms: inductor then keeps them in one graph
    with what divides by them.

    Args:
        stacks: of N leaves in all.
        live: per stack (L,) bool, False for leaves without a gradient here; None = all
            have one.

    Returns:
        (N, 4), partial over shards. Zeros for a leaf without a gradient; the last
        column counts the ranks that have one.
    """
    rows = []
    for i, stack in enumerate(stacks):
        g = working(stack.g)
        dims = tuple(range(1, g.ndim))

        def inner(a: Tensor, b: Tensor, dims: tuple[int, ...] = dims) -> Tensor:
            return (a * b).sum(dims) if dims else a * b

        gg = inner(g, g)
        if stack.h is None:
            columns = [gg, torch.zeros_like(gg), torch.zeros_like(gg)]
        else:
            h = working(stack.h)
            columns = [gg, inner(g, h), inner(h, h)]
        sums = torch.stack([*columns, torch.ones_like(gg)], 1)
        if live is not None:  # not a product: 0 times infinity is no zero
            sums = torch.where(live[i][:, None], sums, 0.0)
        rows.append(sums)
    return torch.cat(rows)


def global_clip(grad_norm: Tensor, max_norm: Number) -> Tensor:
    """torch.nn.utils.clip_grad_norm_'s factor on every gradient, its 1e-6 included."""
    return (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)


def decide(sums: Tensor, max_norm: Number | None) -> Verdict:
    """From the complete sums (N, 4) of all leaves: the global clip, and whether
    everything is finite.
    """
    sums = sums.to(scalar_dtype(sums.device))
    grad_norm = sums[:, 0].sum().sqrt()
    a = torch.ones_like(grad_norm)
    if max_norm is not None:
        a = global_clip(grad_norm, max_norm)
    return Verdict(grad_norm, torch.isfinite(sums).all(), a)


def scale(stacks: Sequence[Stack], sums: Tensor, verdict: Verdict) -> list[Scales]:
    """Clip per leaf, and rules' scalars, from the complete sums of these stacks.

    A leaf that has a gradient on no rank stays as it is; where some ranks have none,
    theirs counts as zero, so that all ranks go on alike.
    """
    sums = sums.to(scalar_dtype(sums.device))
    parts = sums.split([stack.num_leaves for stack in stacks])
    return [_scale(s, part, verdict) for s, part in zip(stacks, parts, strict=True)]


def _scale(stack: Stack, sums: Tensor, verdict: Verdict) -> Scales:
    rule, a, (gg, gh, hh, living) = stack.rule, verdict.a, sums.unbind(1)
    ones = torch.ones_like(gg)
    c_g, c_h = a * ones, 0 * ones
    if rule.corrected:
        beta1 = rule.beta1
        k = stack.gamma * beta1 / (1 - beta1)
        k_g, k_h = (1 + k) * a, k if stack.h_scale is None else k * stack.h_scale
        s = ones
        if rule.clip is not None:
            # ||(1+k) a g - k h||^2 expanded, so that neither c nor a second pass is
            # needed for its norm
            cc = k_g * k_g * gg - 2 * k_g * k_h * gh + k_h * k_h * hh
            s = rule.clip / cc.clamp(min=0).sqrt().clamp(min=rule.clip)
        c_g, c_h = s * k_g, -s * k_h
    t = stack.t.to(gg.dtype) + 1
    own = (v * ones for v in rule.scalars(t, stack.lr, stack.gamma))
    dtype = working_dtype(stack.x)
    return Scales(
        (living > 0) & verdict.finite,
        *(v.to(dtype) for v in (a * ones, c_g, c_h)),
        tuple(v.to(dtype) for v in own),
    )


def move(stack: Stack, scales: Scales) -> tuple[Stack, Tensor | None]:
    """Moments, h and, for an elementwise rule, x one step on; t for all.

    For a matrix rule x stays, and the second result is the stack of matrices to
    orthogonalize; None stands for the first buffer, so that no second full-size tensor
    is made, and for an elementwise rule.
    """
    rule, s = stack.rule, scales.over(stack.x)
    g = working(stack.g)
    c = s.g * g
    if rule.corrected:
        c = c + s.h * working(stack.h)
    out, new = rule.update(
        working(stack.x), c, tuple(working(b) for b in stack.buffers), s.rule
    )
    buffers = tuple(
        torch.where(s.ok, n.to(b.dtype), b)
        for n, b in zip(new, stack.buffers, strict=True)
    )
    kept, x = stack.kept, stack.x
    if kept is not None:
        kept = torch.where(s.ok, (s.keep * g).to(kept.dtype), kept)
    if not rule.matrix_only:
        x = torch.where(s.ok, out.to(x.dtype), x)
    t = stack.t + scales.ok.to(stack.t.dtype)
    moved = stack._replace(x=x, kept=kept, buffers=buffers, t=t)
    return moved, out if rule.matrix_only else None


def settle(stack: Stack, scales: Scales, factors: Tensor) -> Stack:
    """x of a matrix rule one step on, given the orthogonal factors of what ``move``
    returned.
    """
    s, x = scales.over(stack.x), stack.x
    new = stack.rule.apply(working(x), working(factors), s.rule, stack.shape)
    return stack._replace(x=torch.where(s.ok, new.to(x.dtype), x))


def orthogonalize(
    stacks: Sequence[Stack],
    matrices: Sequence[Tensor | None],
    leaves: Sequence[Sequence[Tensor]],
    collectives: Collectives,
) -> list[Tensor | None]:
    """The factors of what ``move`` returned, stack by stack (None for an elementwise
    rule): one call of the verb per way of orthogonalizing.
    """
    factors: list[Tensor | None] = [None] * len(stacks)
    # a dict keeps the stacks' order, which is the same on every rank
    ways = dict.fromkeys(s.rule.ns for s in stacks if s.rule.matrix_only)
    for ns in ways:
        mine = [
            i for i, s in enumerate(stacks) if s.rule.matrix_only and s.rule.ns == ns
        ]
        pieces = [
            stacks[i].buffers[0] if matrices[i] is None else matrices[i] for i in mine
        ]
        found = iter(
            collectives.orthogonalize(
                [u for piece in pieces for u in piece.unbind()],
                ns,
                [p for i in mine for p in leaves[i]],
            )
        )
        for i in mine:
            factors[i] = stacked([next(found) for _ in range(stacks[i].num_leaves)])
    return factors


def advance(
    stacks: Sequence[Stack],
    leaves: Sequence[Sequence[Tensor]],
    max_norm: Number | None,
    collectives: Collectives,
) -> tuple[list[Stack], Verdict]:
    """The whole step. ``leaves`` are, stack by stack, the parameters as their owner
    holds them (DTensors too).
    """
    sums = collectives.sum(measure(stacks), [p for part in leaves for p in part])
    verdict = decide(sums, max_norm)
    scales = scale(stacks, sums, verdict)
    moved, matrices = zip(
        *(move(part, s) for part, s in zip(stacks, scales, strict=True)), strict=True
    )
    factors = orthogonalize(moved, matrices, leaves, collectives)
    done = [
        part if o is None else settle(part, s, o)
        for part, s, o in zip(moved, scales, factors, strict=True)
    ]
    return done, verdict
