"""Exact MARS in the class: the next batch's gradient, on its way to becoming h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marsopt.lanes import Lane


class NextReference:
    """One buffer per corrected parameter, written before a step and read after it."""

    def __init__(self, fresh: bool = False) -> None:
        self._buffers: dict[Tensor, Tensor] = {}
        self._full = False
        self._fresh = fresh  # whether h is of the batch that the next step takes

    def keep(self, lanes: Sequence[Lane], factor: Tensor | float | None) -> None:
        """Copy the gradients (never alias them), times ``factor``; zeros where there
        is none.
        """
        for lane in (lane for lane in lanes if "h" in lane.state):
            for p, x in zip(lane.params, lane.pieces(), strict=True):
                if p not in self._buffers:
                    self._buffers[p] = torch.empty_like(x)
                kept = self._buffers[p]
                if p.grad is None:
                    kept.zero_()
                    continue
                kept.copy_(lane.collectives.local(p.grad))
                if factor is not None:
                    kept.mul_(factor)
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
        for lane in (lane for lane in lanes if "h" in lane.state):
            for p, h in zip(lane.params, lane.state["h"].unbind(), strict=True):
                h.copy_(self._buffers[p]) if p in self._buffers else h.zero_()
        self._full, self._fresh = False, True
