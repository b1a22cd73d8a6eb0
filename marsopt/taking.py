"""Gradients that become h as they are: no copy, and their owner gives them up."""

from __future__ import annotations

import sys
from collections.abc import Iterable, MutableMapping
from functools import cache

import torch
from torch import Tensor

from marsopt.homes import may_move
from marsopt.lanes import STATE_KEYS, Lane


def prepare(lanes: Iterable[Lane]) -> list[Lane]:
    """The lanes that can, made ready: one plain leaf each, h of its dtype. Gradients of
    others are packed into stacks, or views into FSDP's buffers.
    """
    found = []
    for lane in lanes:
        first = lane.params[0]
        if (
            lane.rule.keeps_h
            and len(lane.params) == 1
            and lane.pieces()[0] is first
            and lane.state["h"].dtype == first.dtype
        ):
            lane.h_scale = torch.ones_like(lane.lr)
            found.append(lane)
    return found


def take(lanes: Iterable[Lane], state: MutableMapping[Tensor, dict], a: Tensor) -> None:
    """The gradients of a step that was taken become h, still to be scaled by ``a``.

    One that somebody else holds or looks into, or of other strides, is copied.
    """
    key = STATE_KEYS["h"]
    for lane in lanes:
        (p,) = lane.params
        if p.grad is None:
            continue
        old = state[p][key]
        alike = (p.grad.dtype, p.grad.stride()) == (old.dtype, old.stride())
        free = may_move(p.grad, p.grad) and _holders(p) == _no_others()
        g = p.grad.detach()
        if free and alike:
            state[p][key] = g
            lane.state["h"] = g.unsqueeze(0)
        else:
            old.copy_(g)
        lane.h_scale.copy_(a)  # a cell of its own: graphs know which inputs are one


def _holders(p: Tensor) -> tuple[int, int]:
    """How many hold p's gradient, in Python and in C++."""
    g = p.grad
    return sys.getrefcount(g), g._use_count()


@cache
def _no_others() -> tuple[int, int]:
    """``_holders`` of a gradient that its parameter alone holds."""
    p = torch.zeros(1, requires_grad=True)
    p.grad = torch.zeros(1)
    return _holders(p)


def settle(lanes: Iterable[Lane]) -> None:
    """Scale h by what it is still to be scaled by."""
    for lane in lanes:
        lane.state["h"].mul_(lane.h_scale)
        lane.h_scale.fill_(1.0)
