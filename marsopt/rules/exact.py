"""Exact MARS (arXiv 2411.10438, Algorithm 1): two gradients of every batch."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction, scale
from marsopt.rules.dtypes import working
from marsopt.rules.life import Factor, Held, Life


class NextGradients(Life):
    """The authors' protocol: the *next* batch's gradient at the current parameters is
    kept before a step (``update_previous_grad``), and becomes h, the reference of the
    next step, after it (``update_last_grad``).
    """

    takes_gradients = True

    def __init__(self) -> None:
        self._forget(fresh=False)

    def _forget(self, fresh: bool) -> None:
        """Forget what was kept; ``fresh`` says whether h, as it is now, is of the batch
        that the next step takes.
        """
        self._rows: dict[Tensor, Tensor] = {}  # by parameter, local pieces
        self._full = False
        self._owed = False  # whether a step was taken that ``hand_over`` has to follow
        self._fresh = fresh

    @property
    def num_bytes(self) -> int:
        """Return how many are held beside the optimizer's state."""
        return sum(row.nbytes for row in self._rows.values())

    def check_may_keep(self) -> None:
        """Check, before another gradient is kept, that the last one was handed over.

        Raises:
            RuntimeError: it was not, so that h would stay what it is for ever.
        """
        if self._owed:
            raise RuntimeError(
                "got update_previous_grad() after a step whose reference gradient was "
                "not handed over, expected the protocol of exact MARS: call "
                "optimizer.update_last_grad() after every optimizer.step()"
            )

    def keep(self, held: Sequence[Held], factor: Factor) -> None:
        """Copy the gradients (never alias them), times ``factor``; zeros where there
        is none.
        """
        rows: dict[Tensor, Tensor] = {}
        self._full = False  # not before all are there
        for one in held:
            if "h" not in one:
                continue
            h, row = one["h"], self._rows.get(one.p)
            if row is None or (row.shape, row.dtype) != (h.shape, h.dtype):
                row = torch.empty_like(h)
            rows[one.p] = row
            put(row, one.grad, factor)
        self._rows, self._full = rows, True

    def before_step(self, held: Sequence[Held]) -> None:
        """Check that a step may take h, and the gradients that are there.

        Raises:
            RuntimeError: the protocol was left out, so that h is stale or zero.
        """
        if self._owed or not (self._full or self._fresh):
            raise RuntimeError(
                "got step() without a reference gradient, expected the protocol of "
                "exact MARS: update_previous_grad() before step(), update_last_grad() "
                "after it, and zero_grad() before each of the two backward passes; or "
                "pass is_approx=True"
            )

    def after_step(self, held: Sequence[Held]) -> None:
        """Note that a step was taken: h is of its batch, no longer of the next."""
        self._fresh, self._owed = False, self._full

    def check_may_hand_over(self) -> None:
        """Check that there is something to hand over.

        Raises:
            RuntimeError: nothing was kept since the last time.
        """
        if not self._full:
            raise RuntimeError(
                "got update_last_grad() with nothing kept, expected "
                "update_previous_grad() before the step: compute the next batch's "
                "gradient at the current parameters and call it"
            )

    def hand_over(self, held: Sequence[Held]) -> None:
        """Make what was kept the reference h; zeros for what has come since."""
        for one in held:
            if "h" in one:
                h, row = one["h"], self._rows.get(one.p)
                h.zero_() if row is None else h.copy_(row)
        self._full, self._owed, self._fresh = False, False, True

    def forget(self, state: Container[Tensor]) -> None:
        self._rows = {p: row for p, row in self._rows.items() if p in state}

    def loaded(
        self,
        held: Sequence[Held],
        entries: Mapping[Tensor, Mapping[str, Any]],
        ahead: bool,
    ) -> None:
        self._forget(fresh=True)

    def carried(self) -> bool:
        return self._fresh

    def resumed(self, held: Sequence[Held], carried: Any) -> None:
        self._forget(fresh=carried)


@dataclass(frozen=True, kw_only=True, eq=False)
class Exact(Correction):
    """With h the current batch's gradient at the parameters one step before:

        k = gamma beta1 / (1 - beta1)
        c = g + k (g - h)

    h is given to every step: by the protocol of ``NextGradients``, or as the
    ``reference`` of ``Rule.step``.

    Source: MARS, arXiv 2411.10438, Algorithm 1.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> rule = marsopt.mars_adamw(correction="exact", clip=None)
        >>> x = {"w": torch.ones(2)}
        >>> g, h = {"w": torch.full((2,), 3.0)}, {"w": torch.ones(2)}
        >>> _, state = rule.step(x, g, rule.init(x), lr=0.1, reference=h)
        >>> state.buffers["m"]["w"]     # 0.05 (g + 0.475 (g - h))
        tensor([0.1975, 0.1975])
    """

    name = "exact"
    operands = ("h",)
    given = ("h",)
    reference = "h"
    keeps = {"h": Buffer("last_grad", dtype="gradient")}
    life = NextGradients

    def coefficients(self, beta1: Number, gamma: Number) -> tuple[Number, ...]:
        k = scale(beta1, gamma)
        return 1 + k, -k


def put(row: Tensor, g: Tensor | None, factor: Factor) -> None:
    """Write ``g`` times ``factor`` into ``row``, in one pass where they are alike;
    zeros where there is none.
    """
    if g is None:
        row.zero_()
    elif factor is None:
        row.copy_(g)
    elif (g.dtype, g.shape) == (row.dtype, row.shape):
        torch.mul(g, factor, out=row)
    else:  # not rounded before it is scaled, and no other shape
        row.copy_(working(g) * factor)
