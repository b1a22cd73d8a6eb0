"""Gradients that become h as they are: no copy, and their owner gives them up."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import torch
from torch import Tensor

from marsopt.homes import may_move
from marsopt.lanes import STATE_KEYS, Lane


def prepare(lanes: Iterable[Lane]) -> None:
    """Note which lanes can: one leaf each, h of its dtype, on a CPU.

    Elsewhere gradients are packed into stacks, and only the host, which would have to
    wait for the device, could leave out those that are not finite.
    """
    for lane in lanes:
        first = lane.params[0]
        if (
            lane.rule.keeps_h
            and len(lane.params) == 1
            and lane.pieces()[0] is first
            and first.device.type == "cpu"
            and lane.state["h"].dtype == first.dtype
        ):
            lane.h_scale = torch.ones_like(lane.lr)


def take(lanes: Iterable[Lane], state: MutableMapping[Tensor, dict], a: Tensor) -> None:
    """The gradients of a step that was taken become h, still to be scaled by ``a``.

    One that others look into, or of other strides, is copied.
    """
    key = STATE_KEYS["h"]
    for lane in lanes:
        (p,) = lane.params
        if p.grad is None:
            continue
        old, free = state[p][key], may_move(p.grad, p.grad)
        g = p.grad.detach()
        if free and (g.dtype, g.stride()) == (old.dtype, old.stride()):
            state[p][key] = g
            lane.state["h"] = g.unsqueeze(0)
        else:
            old.copy_(g)
        lane.h_scale.copy_(a)  # a cell of its own: graphs know which inputs are one


def settle(lanes: Iterable[Lane]) -> None:
    """Scale h by what it is still to be scaled by."""
    for lane in lanes:
        if lane.h_scale is not None:
            lane.state["h"].mul_(lane.h_scale)
            lane.h_scale.fill_(1.0)
