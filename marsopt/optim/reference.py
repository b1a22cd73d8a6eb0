"""Exact MARS in the class: the next batch's gradient, on its way to becoming h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marsopt.optim.buckets import ParameterBucket
from marsopt.rules.algorithm import working


class NextReference:
    """A second h for every parameter whose algorithm reads one, written before a step
    and read after it.
    """

    def __init__(self, fresh: bool = False) -> None:
        self._rows: dict[Tensor, Tensor] = {}  # by parameter, local pieces
        self._full = False
        self.fresh = fresh  # whether h is of the batch that the next step takes

    def keep(
        self, buckets: Sequence[ParameterBucket], factor: Tensor | float | None
    ) -> None:
        """Copy the gradients (never alias them), times ``factor``; zeros where there
        is none.
        """
        rows, self._full = {}, False  # not before all are there
        for bucket in buckets:
            stack = bucket.state.get("h", ())
            for p, h in zip(bucket.params, stack, strict=False):
                row = self._rows.get(p)
                alike = row is not None and (row.shape, row.dtype) == (h.shape, h.dtype)
                rows[p] = row = row if alike else torch.empty_like(h)
                if p.grad is None:
                    row.zero_()
                else:
                    _put(row, bucket.collectives.local(p.grad), factor)
        self._rows, self._full = rows, True

    def check(self) -> None:
        """Check that a step may take h.

        Raises:
            RuntimeError: the protocol was left out, so that h is stale or zero.
        """
        if not (self._full or self.fresh):
            raise RuntimeError(
                "got step() without a reference gradient, expected the protocol of "
                "exact MARS: update_previous_grad() before step(), update_last_grad() "
                "after it; or pass is_approx=True"
            )

    def check_kept(self) -> None:
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

    def hand_over(self, buckets: Sequence[ParameterBucket]) -> None:
        """Make what was kept the reference h; zeros for what has come since."""
        for bucket in buckets:
            for p, h in zip(bucket.params, bucket.state.get("h", ()), strict=False):
                h.copy_(self._rows[p]) if p in self._rows else h.zero_()
        self._full, self.fresh = False, True


def _put(row: Tensor, g: Tensor, factor: Tensor | float | None) -> None:
    """Write ``g`` times ``factor`` into ``row``, in one pass where they are alike."""
    if factor is None:
        row.copy_(g)
    elif (g.dtype, g.shape) == (row.dtype, row.shape):
        torch.mul(g, factor, out=row)
    else:  # not rounded before it is scaled, and no other shape
        row.copy_(working(g) * factor)
