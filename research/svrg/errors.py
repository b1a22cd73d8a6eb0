"""How far corrected gradients are from the gradient of the whole training set, compared
with plain gradients at the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call

from marsopt import SVRG, Approximate, Exact
from research.svrg.loop import EVERYTHING, Run

Parameters = dict[str, Tensor]
ALPHAS = (0.25, 0.5, 1.0)


def gradient(run: Run, x: Parameters, rows: Tensor | slice = EVERYTHING) -> Tensor:
    """Return the gradient of some training sequences at parameters x, flattened."""
    loss = run.loss(lambda ids: functional_call(run.model, x, ids), rows)
    found = torch.autograd.grad(loss, list(x.values()))
    return torch.cat([g.flatten() for g in found])


def errors(
    run: Run, beta1: float, gamma: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Train; at some steps of the second, middle and last epoch yield, for every
    correction, the mean of ||c - full||^2 over that of ||g - full||^2, both over the
    batches of an epoch. ``gamma`` is that of MARS; no c is clipped.

    The snapshot is taken when an epoch begins. The last entries are the alpha that
    would have made SVRG's error least, and that error.
    """
    size = run.size
    epochs = 1, size.epochs // 2, size.epochs - 1
    places = 1, size.num_batches // 4, size.num_batches // 2, size.num_batches - 1
    previous, last_rows, snapshot = {}, EVERYTHING, {}
    for epoch, i, rows in run.steps():
        named = run.model.named_parameters()
        x = {name: p.detach().clone().requires_grad_() for name, p in named}
        snapshot = snapshot if i else x
        if epoch in epochs and i in places:
            last = gradient(run, previous, last_rows)
            found = _ratios(run, x, previous, snapshot, last, beta1, gamma)
            yield f"epoch {epoch + 1}, step {i + 1}", found
        previous, last_rows = x, rows


def _ratios(
    run: Run,
    x: Parameters,
    previous: Parameters,
    snapshot: Parameters,
    last: Tensor,
    beta1: float,
    gamma: float,
) -> dict[str, float]:
    """``last`` is the gradient that the step before this one took."""
    full, mu = gradient(run, x), gradient(run, snapshot)
    plain = cross = own = 0.0
    sums: dict[str, float] = {}
    for rows in run.batches(torch.Generator().manual_seed(0)):
        g, h = gradient(run, x, rows), gradient(run, snapshot, rows)
        corrected = {
            "approximate": (Approximate(), gamma, (g, last)),
            "exact": (Exact(), gamma, (g, gradient(run, previous, rows))),
        } | {f"SVRG, alpha {a:g}": (SVRG(), a, (g, h, mu)) for a in ALPHAS}
        for title, (correction, scale, operands) in corrected.items():
            weights = correction.coefficients(beta1, scale)
            c = sum(w * v for w, v in zip(weights, operands, strict=True))
            sums[title] = sums.get(title, 0.0) + (c - full).square().sum().item()
        plain += (g - full).square().sum().item()
        cross += torch.dot(g - full, h - mu).item()
        own += (h - mu).square().sum().item()
    ratios = {title: total / plain for title, total in sums.items()}
    least = 1 - cross**2 / (own * plain)
    return ratios | {"best alpha": cross / own, "SVRG at it": least}
