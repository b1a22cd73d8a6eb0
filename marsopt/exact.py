"""Exact MARS in the class: the next batch's gradient, on its way to becoming h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from marsopt.lanes import Lane


class NextReference:
    """One buffer per corrected parameter, written before a step and read after it."""

    def __init__(self) -> None:
        self._buffers: dict[Tensor, Tensor] = {}
        self._full = False

    def keep(
        self, lanes: Sequence[Lane], grads: Mapping[Tensor, Tensor], a: Tensor | None
    ) -> None:
        """Copy the gradients (never alias them), times the global clip factor ``a``."""
        for p in (p for lane in lanes if lane.h for p in lane.params):
            if p not in self._buffers:
                self._buffers[p] = torch.empty_like(grads[p])
            self._buffers[p].copy_(grads[p] if a is None else a * grads[p])
        self._full = True

    def hand_over(self, lanes: Sequence[Lane]) -> None:
        """Make what was kept the reference h.

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
                h.copy_(self._buffers[p])
        self._full = False
