"""Exact MARS in the class: the next batch's gradient, on its way to becoming h."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt.lanes import STATE_KEYS, Lane
from marsopt.stacks import own_rows
from marsopt.step import working


class Ahead(NamedTuple):
    """What becomes h of one lane."""

    lane: Lane
    stack: Tensor  # as lane.state["h"]
    rows: list[Tensor]  # its rows, as the parameters' owner holds them


class NextReference:
    """A second h for every corrected lane, written before a step and read after it."""

    def __init__(self, fresh: bool = False) -> None:
        self._ahead: list[Ahead] = []
        self._full = False
        self.fresh = fresh  # whether h is of the batch that the next step takes

    def keep(self, lanes: Sequence[Lane], factor: Tensor | float | None) -> None:
        """Copy the gradients (never alias them), times ``factor``; zeros where there
        is none.
        """
        corrected = [lane for lane in lanes if "h" in lane.state]
        if not self._is_of(corrected):
            self._ahead = [_beside(lane) for lane in corrected]
        for lane, stack, _ in self._ahead:
            for p, kept in zip(lane.params, stack.unbind(), strict=True):
                if p.grad is None:
                    kept.zero_()
                else:
                    _put(kept, lane.collectives.local(p.grad), factor)
        self._full = True

    def _is_of(self, lanes: Sequence[Lane]) -> bool:
        return [id(a.lane) for a in self._ahead] == [id(lane) for lane in lanes]

    def use(self) -> None:
        """A step takes h.

        Raises:
            RuntimeError: the protocol was left out, so that h is stale or zero.
        """
        if not (self._full or self.fresh):
            raise RuntimeError(
                "got step() without a reference gradient, expected the protocol of "
                "exact MARS: update_previous_grad() before step(), update_last_grad() "
                "after it; or pass is_approx=True"
            )
        self.fresh = False

    def hand_over(
        self, lanes: Sequence[Lane], state: MutableMapping[Tensor, dict]
    ) -> None:
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
        corrected = [lane for lane in lanes if "h" in lane.state]
        if self._is_of(corrected):
            self._ahead = [_exchange(ahead, state) for ahead in self._ahead]
        else:
            self._copy(corrected)
        self._full, self.fresh = False, True

    def _copy(self, lanes: Sequence[Lane]) -> None:
        """``hand_over`` to other lanes than ``keep`` saw."""
        kept = {
            p: row
            for lane, stack, _ in self._ahead
            for p, row in zip(lane.params, stack.unbind(), strict=True)
        }
        for lane in lanes:
            for p, h in zip(lane.params, lane.state["h"].unbind(), strict=True):
                h.copy_(kept[p]) if p in kept else h.zero_()


def _put(kept: Tensor, g: Tensor, factor: Tensor | float | None) -> None:
    """``g`` times ``factor`` into ``kept``, in one pass where they are alike."""
    if factor is None:
        kept.copy_(g)
    elif (g.dtype, g.shape) == (kept.dtype, kept.shape):
        torch.mul(g, factor, out=kept)
    else:  # not rounded before it is scaled, and no other shape
        kept.copy_(working(g) * factor)


def _beside(lane: Lane) -> Ahead:
    """A second h."""
    stack = torch.empty_like(lane.state["h"])
    rows = [
        lane.collectives.wrap(row, p)
        for row, p in zip(own_rows(stack), lane.params, strict=True)
    ]
    return Ahead(lane, stack, rows)


def _exchange(ahead: Ahead, state: MutableMapping[Tensor, dict]) -> Ahead:
    """h and what becomes h in each other's place.

    On a GPU by a copy: a captured CUDA graph finds h where it was.
    """
    lane, stack, rows = ahead
    h, key = lane.state["h"], STATE_KEYS["h"]
    if h.device.type != "cpu":
        h.copy_(stack)
        return ahead
    before = [state[p][key] for p in lane.params]
    lane.state["h"] = stack
    for p, row in zip(lane.params, rows, strict=True):
        state[p][key] = row
    return Ahead(lane, h, before)
