"""One optimizer step over routes of leaves: measure, scale, move, orthogonalize,
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

if TYPE_CHECKING:
    from marsopt.rule import LeafRule, Number


class Route(NamedTuple):
    """N leaves that take one rule in one step. All tensors are local pieces."""

    rule: LeafRule
    lr: Number
    gamma: Number
    # (N,) steps that each leaf has taken
    t: Tensor
    x: list[Tensor]
    g: list[Tensor]
    # empty where the rule corrects nothing
    h: list[Tensor]
    # where g is kept as the next h (approximate MARS: h itself); else empty
    kept: list[Tensor]
    # per leaf, in the order of rule.buffers
    buffers: list[tuple[Tensor, ...]]
    # of the whole leaves, of which x, g, h and buffers may be shards
    shapes: list[torch.Size]


class Scales(NamedTuple):
    """What is one number for a whole leaf, as vectors over the N leaves of a route."""

    # bool: the step is finite and the leaf has a gradient
    ok: Tensor
    # a: what the gradient is multiplied with before it is kept as h
    keep: Tensor
    # c = scales.g g + scales.h h
    g: Tensor
    h: Tensor
    # the rule's own: rates and bias corrections
    rule: tuple[Tensor, ...]

    def of_leaves(self) -> list[tuple[Tensor, ...]]:
        """The rule's own, leaf by leaf, as 0-D tensors."""
        return list(zip(*(v.unbind() for v in self.rule), strict=True))


class Verdict(NamedTuple):
    """What a step found out, as 0-D tensors."""

    grad_norm: Tensor  # global norm of the gradient before any clip
    finite: Tensor  # bool: False means that nothing was changed


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Scalars are float64, since 1 - beta^t cancels; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def working(tensor: Tensor) -> Tensor:
    """Half precision is computed in float32; anything wider in itself."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def measure(routes: Sequence[Route], live: Tensor | None = None) -> Tensor:
    """<g,g>, <g,h>, <h,h> of every leaf from one read of (g, h), and whether it lives.

    Written as sums of products, not as norms: inductor then keeps them in one graph
    with what divides by them.

    Args:
        routes: N leaves in all.
        live: (N,) bool, False for leaves without a gradient here; None = all have one.

    Returns:
        (N, 4), partial over shards. Zeros for a leaf without a gradient; the last
        column counts the ranks that have one.
    """
    rows = []
    for route in routes:
        for i, g in enumerate(route.g):
            g = working(g)
            if route.h:
                h = working(route.h[i])
                rows += [(g * g).sum(), (g * h).sum(), (h * h).sum()]
            else:
                gg = (g * g).sum()
                rows += [gg, torch.zeros_like(gg), torch.zeros_like(gg)]
    sums = torch.stack(rows).view(-1, 3)
    if live is None:
        return torch.cat([sums, torch.ones_like(sums[:, :1])], 1)
    live = live[:, None]
    return torch.cat([torch.where(live, sums, 0.0), live.to(sums.dtype)], 1)


def global_clip(grad_norm: Tensor, max_norm: Number) -> Tensor:
    """torch.nn.utils.clip_grad_norm_'s factor on every gradient, its 1e-6 included."""
    return (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)


def scale(
    routes: Sequence[Route], sums: Tensor, max_norm: Number | None
) -> tuple[list[Scales], Verdict]:
    """From the complete sums (N, 4): global clip, clip per leaf, and rules' scalars.

    A leaf that has a gradient on no rank stays as it is; where some ranks have none,
    theirs counts as zero, so that all ranks go on alike.
    """
    sums = sums.to(scalar_dtype(sums.device))
    gg, gh, hh, living = sums.unbind(1)
    grad_norm = gg.sum().sqrt()
    finite = torch.isfinite(sums).all()
    a = torch.ones_like(grad_norm)
    if max_norm is not None:
        a = global_clip(grad_norm, max_norm)
    ok = (living > 0) & finite

    scales, start = [], 0
    for route in routes:
        here = slice(start, start := start + len(route.g))
        scales.append(_scale_route(route, gg[here], gh[here], hh[here], a, ok[here]))
    return scales, Verdict(grad_norm, finite)


def _scale_route(
    route: Route, gg: Tensor, gh: Tensor, hh: Tensor, a: Tensor, ok: Tensor
) -> Scales:
    rule, ones = route.rule, torch.ones_like(gg)
    c_g, c_h = a * ones, 0 * ones
    if rule.corrected:
        beta1 = rule.beta1
        k = route.gamma * beta1 / (1 - beta1)
        s = ones
        if rule.clip is not None:
            # ||(1+k) a g - k h||^2 expanded, so that neither c nor a second pass is
            # needed for its norm
            cc = (1 + k) ** 2 * a * a * gg - 2 * k * (1 + k) * a * gh + k * k * hh
            s = rule.clip / cc.clamp(min=0).sqrt().clamp(min=rule.clip)
        c_g, c_h = s * (1 + k) * a, -s * k
    t = route.t.to(gg.dtype) + 1
    own = tuple(v * ones for v in rule.scalars(t, route.lr, route.gamma))
    return Scales(ok, a * ones, c_g, c_h, own)


def move(route: Route, scales: Scales) -> tuple[Route, list[Tensor | None]]:
    """Moments, h and, for an elementwise rule, x one step on.

    For a matrix rule x stays, and the second result holds the matrices to
    orthogonalize; None stands for the leaf's own first buffer, so that no second
    full-size tensor is made. It is empty for an elementwise rule.
    """
    rule = route.rule
    ok, keep, c_g, c_h = (v.unbind() for v in scales[:4])
    own = scales.of_leaves()
    xs, kept, buffers, matrices = [], [], [], []
    for i, g in enumerate(route.g):
        x, g, old = route.x[i], working(g), route.buffers[i]
        c = c_g[i] * g
        if rule.corrected:
            c = c + c_h[i] * working(route.h[i])
        out, new = rule.update(working(x), c, tuple(working(b) for b in old), own[i])
        new = tuple(
            torch.where(ok[i], n.to(b.dtype), b) for n, b in zip(new, old, strict=True)
        )
        if rule.matrix_only:
            matrices.append(out)
        else:
            xs.append(torch.where(ok[i], out.to(x.dtype), x))
        buffers.append(new)
        if route.kept:
            h = route.kept[i]
            kept.append(torch.where(ok[i], (keep[i] * g).to(h.dtype), h))
    return route._replace(
        x=xs or route.x,
        kept=kept,
        buffers=buffers,
        t=route.t + scales.ok.to(route.t.dtype),
    ), matrices


def settle(route: Route, scales: Scales, factors: Sequence[Tensor]) -> Route:
    """x of a matrix rule one step on, given the orthogonal factors of what ``move``
    returned.
    """
    ok, own = scales.ok.unbind(), scales.of_leaves()
    xs = []
    for i, (x, o) in enumerate(zip(route.x, factors, strict=True)):
        new = route.rule.apply(working(x), working(o), own[i], route.shapes[i])
        xs.append(torch.where(ok[i], new.to(x.dtype), x))
    return route._replace(x=xs)


def orthogonalize(
    routes: Sequence[Route],
    matrices: Sequence[list[Tensor | None]],
    leaves: Sequence[Sequence[Tensor]],
    collectives: Collectives,
) -> list[list[Tensor]]:
    """The factors of what ``move`` returned, route by route: one call of the verb per
    way of orthogonalizing.
    """
    matrices = [
        [
            own[0] if u is None else u
            for u, own in zip(part, route.buffers, strict=False)
        ]
        for route, part in zip(routes, matrices, strict=True)
    ]
    factors: list[list[Tensor]] = [[] for _ in routes]
    # a dict keeps the routes' order, which is the same on every rank
    ways = dict.fromkeys(
        route.rule.ns for route, part in zip(routes, matrices, strict=True) if part
    )
    for ns in ways:
        mine = [
            i for i, route in enumerate(routes) if matrices[i] and route.rule.ns == ns
        ]
        found = iter(
            collectives.orthogonalize(
                [u for i in mine for u in matrices[i]],
                ns,
                [p for i in mine for p in leaves[i]],
            )
        )
        for i in mine:
            factors[i] = [next(found) for _ in matrices[i]]
    return factors


def advance(
    routes: Sequence[Route],
    leaves: Sequence[Sequence[Tensor]],
    max_norm: Number | None,
    collectives: Collectives,
) -> tuple[list[Route], Verdict]:
    """The whole step. ``leaves`` are, route by route, the parameters as their owner
    holds them (DTensors too).
    """
    sums = collectives.sum(measure(routes), [p for part in leaves for p in part])
    scales, verdict = scale(routes, sums, max_norm)
    moved, matrices = zip(
        *(move(r, s) for r, s in zip(routes, scales, strict=True)), strict=True
    )
    factors = orthogonalize(moved, matrices, leaves, collectives)
    done = [
        settle(r, s, o) if o else r
        for r, s, o in zip(moved, scales, factors, strict=True)
    ]
    return done, verdict
