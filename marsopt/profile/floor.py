"""The floor: bytes that a step must read and write once, from the buffers of its rules
and not from a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt.lanes import Lane
from marsopt.stacks import adjacent


class Floor(NamedTuple):
    """Bytes of one step."""

    norms: int  # g, and h where the gradient is corrected, read for their norms
    update: int  # everything, read once and written once
    packed: int  # gradients copied into stacks before: read and written

    @property
    def num_bytes(self) -> int:
        """Of the compiled graphs, which do not pack."""
        return self.norms + self.update


def floor(lanes: Sequence[Lane]) -> Floor:
    """Of one step on the gradients that are there."""
    parts = [_lane_floor(lane) for lane in lanes]
    return Floor(*(sum(column) for column in zip(*parts, strict=True)))


def _lane_floor(lane: Lane) -> Floor:
    rule, grads = lane.rule, [p.grad for p in lane.params]
    g = sum(grad.nbytes for grad in grads)
    x = sum(p.nbytes for p in lane.params)
    h = lane.state["h"].nbytes if rule.corrected else 0
    buffers = sum(lane.state[symbol].nbytes for symbol in rule.buffers)
    update = g + h + 2 * buffers + (h if rule.keeps_h else 0)
    if rule.matrix_only:
        # the update leaves x; settling reads x and the factors, and writes x
        update += 3 * x + (x if makes_matrix(lane) else 0)
    else:
        update += 2 * x
    return Floor(g + h, update, 0 if adjacent(grads) is not None else 2 * g)


def makes_matrix(lane: Lane) -> bool:
    """Whether what is orthogonalized is a tensor of its own, and not a buffer."""
    one = torch.ones(1, 1, 1, dtype=lane.t.dtype, device=lane.t.device)

    def shaped(value: Tensor | float) -> Tensor:
        return value * one

    scalars = lane.rule.scalars(torch.ones_like(lane.t[:1]), lane.lr, lane.gamma)
    buffers = tuple(one for _ in lane.rule.buffers)
    matrix, _ = lane.rule.update(one, one, buffers, tuple(map(shaped, scalars)))
    return matrix is not None
