"""Exact MARS in the class: the next batch's gradient, on its way to becoming h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from marsopt.lanes import Lane


class NextReference:
    """One buffer per corrected parameter, written before a step and read after it."""

    def __init__(self, fresh: bool = False) -> None:
        self._buffers: dict[Tensor, Tensor] = {}
        self._full = False
        self._fresh = fresh  # whether h is of the batch that the next step takes

    def keep(
        self, lanes: Sequence[Lane], grads: Mapping[Tensor, Tensor], a: Tensor | None
    ) -> None:
        """Copy the gradients (never alias them), times the factor ``a``."""
        for p in (p for lane in lanes if lane.h for p in lane.params):
            if p not in self._buffers:
                self._buffers[p] = torch.empty_like(grads[p])
            self._buffers[p].copy_(grads[p] if a is None else a * grads[p])
        self._full = True

    def use(self) -> None:
        """A step takes h.

        Raises:
            RuntimeError: the protocol was left out, so that h is stale or zero.
        """
        if not (self._full or self._fresh):
            raise RuntimeError(
                "got step() without a reference gradient, expected the protocol of "
                "exact MARS: update_previous_grad() before step(), update_last_grad() "
                "after it; or pass is_approx=True"
            )
        self._fresh = False

    def hand_over(self, lanes: Sequence[Lane]) -> None:
        """Make what was kept the reference h; zeros for what has come since.

        Raises:
            RuntimeError: nothing was kept since the last time.
        """
        if not self._full:
            raise RuntimeError(
                "got update_last_grad() with nothing kept, expected "
                "update_previous_grad() before the step: compute the next batch's "
                "gradient at the current parameters and call it"
            )
        for lane in lanes:
            for p, h in zip(lane.params, lane.h, strict=bool(lane.h)):
                h.copy_(self._buffers[p]) if p in self._buffers else h.zero_()
        self._full, self._fresh = False, True
