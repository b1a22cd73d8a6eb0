"""Lanes: the leaves of one group that take one rule and have one shape, with their
state, made ready for the pure step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marsopt import routing
from marsopt.collectives import Collectives
from marsopt.homes import may_move, move_in
from marsopt.numbers import Numbers
from marsopt.rule import LeafRule
from marsopt.stacks import (
    adjacent,
    are_rows,
    empty_stacks,
    group_by,
    known_stack,
    own_rows,
)
from marsopt.step import Stack

# Symbols of the rules, and what torch.optim (and, for h, the authors) call them in a
# state dict.
STATE_KEYS = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "v_max": "max_exp_avg_sq",
    "b": "momentum_buffer",
    "h": "last_grad",
    "e": "grad_avg",
}
# All else in ``optimizer.state[p]`` is somebody else's (timm's Lookahead keeps its slow
# weights there): it is carried, and never looked at.
OWN_KEYS = frozenset({"step", *STATE_KEYS.values()})


def own(entry: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    """What ``optimizer.state[p]`` holds of ours, in the order of ``OWN_KEYS``."""
    return tuple(map(entry.get, OWN_KEYS))


def forget_strangers(
    state: MutableMapping[Tensor, dict], groups: Sequence[dict[str, Any]]
) -> None:
    """Drop our state of parameters that are in no group any more: somebody exchanged
    them (for float32 masters, say), and torch's state_dict knows no name for them.
    """
    present = {p for group in groups for p in group["params"]}
    gone = [p for p in state if isinstance(p, Tensor) and p not in present]
    for p in gone:
        for key in OWN_KEYS & set(state[p]):
            del state[p][key]
        if not state[p]:
            del state[p]


@dataclass
class Lane:
    """L parameters as their owner holds them, and their state as stacks (L, *shape) of
    local pieces.
    """

    rule: LeafRule
    lr: Tensor
    gamma: Tensor
    params: list[Tensor]
    labels: list[str]
    collectives: Collectives
    t: Tensor  # (L,); state[p]["step"] are views of it
    state: dict[str, Tensor]  # by symbol; state[p][...] are rows of them
    home: Tensor | None = None  # whose rows the parameters are, once they moved in
    # where h is the gradient that was taken: what it is to be multiplied with, 0-D
    h_scale: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Of one whole leaf."""
        return self.params[0].shape

    def pieces(self) -> list[Tensor]:
        """The parameters' local pieces."""
        return [self.collectives.local(p) for p in self.params]

    def settle_in(self, pieces: Sequence[Tensor]) -> Tensor | None:
        """x as a stack that needs no copy, or None.

        Whoever gives a parameter other storage (``p.data = ...``, ``model.to``) finds
        it moved in again at the next step.
        """
        if len(pieces) == 1:
            return pieces[0].unsqueeze(0)
        if self.home is not None and are_rows(pieces, self.home):
            return self.home
        self.home = adjacent(pieces)  # laid out so by their owner
        if self.home is not None:
            return self.home
        both = zip(pieces, self.params, strict=True)
        self.home = (
            move_in(self.params) if all(may_move(x, p) for x, p in both) else None
        )
        return self.home

    def stack(self, x: Tensor, g: Tensor) -> Stack:
        """This lane as an argument of the pure step."""
        h = self.state.get("h")
        return Stack(
            rule=self.rule,
            lr=self.lr,
            gamma=self.gamma,
            t=self.t,
            x=x,
            g=g,
            h=h,
            kept=h if self.rule.keeps_h and self.h_scale is None else None,
            buffers=tuple(self.state[symbol] for symbol in self.rule.buffers),
            shape=self.shape,
            h_scale=self.h_scale,
        )


def build(
    group: dict[str, Any],
    numbers: Numbers,
    state: MutableMapping[Tensor, dict],
    options: dict[str, Any],
    stacked: Callable[[Tensor], bool],
    known: Mapping[int, Tensor],
) -> list[Lane]:
    """The group's lanes, over existing state and fresh zeros where there is none.

    ``known`` are the stacks of lanes before these, by address: rows of them stay there.

    A frozen parameter gets no state before its first gradient. A leaf that is not to be
    ``stacked`` gets a lane of its own.
    """
    chosen = numbers.pair
    moving = [
        i
        for i, p in enumerate(group["params"])
        if p.requires_grad or p.grad is not None or "step" in state.get(p, ())
    ]
    if chosen.matrix is chosen.rest:
        sides = [(chosen.matrix, numbers.lr, moving)]
    else:
        shapes = {i: group["params"][i].shape for i in moving}
        matrix = [i for i in moving if routing.is_matrix(shapes[i])]
        rest = [i for i in moving if i not in set(matrix)]
        rest_rate = numbers.lr_1d if chosen.own_rate else numbers.lr
        sides = [(chosen.matrix, numbers.lr, matrix), (chosen.rest, rest_rate, rest)]
    names = group.get("param_names", [f"{i}" for i in range(len(group["params"]))])
    lanes = []
    for rule, rate, part in sides:
        params = [group["params"][i] for i in part]
        for members in group_by(_keys(params, options["collectives"], stacked)):
            mine = [params[n] for n in members]
            lanes.append(
                Lane(
                    rule=rule,
                    lr=rate,
                    gamma=numbers.gamma,
                    params=mine,
                    labels=[names[part[n]] for n in members],
                    collectives=options["collectives"],
                    t=_steps(mine, state),
                    state={},
                )
            )
    for lane in lanes:
        if len(lane.params) > 1:
            lane.home = known_stack(lane.pieces(), known)
    _attach(lanes, state, options["take_grads"], known)
    return lanes


def _keys(
    params: Sequence[Tensor],
    collectives: Collectives,
    stacked: Callable[[Tensor], bool],
) -> list:
    """What leaves of one stack share. Nothing here may differ from rank to rank: all
    ranks have to list their leaves in one order.
    """
    return [
        (p.shape, p.stride(), p.dtype, collectives.placement(p))
        if stacked(p) and p.is_contiguous()
        else i
        for i, p in enumerate(params)
    ]


def _steps(params: Sequence[Tensor], state: MutableMapping[Tensor, dict]) -> Tensor:
    before = [float(state.get(p, {}).get("step", 0.0)) for p in params]
    t = torch.tensor(before, dtype=torch.float32, device=params[0].device)
    for p, step in zip(params, own_rows(t), strict=True):
        state[p]["step"] = step
    return t


def _attach(
    lanes: Sequence[Lane],
    state: MutableMapping[Tensor, dict],
    take_grads: bool,
    known: Mapping[int, Tensor],
) -> None:
    """Give every lane its stacks: what is there already, or one fresh buffer per role
    and dtype; and ``state`` the rows of them.

    Where gradients replace h, each lane's has a buffer of its own: one that they all
    share would live as long as the last of them.
    """
    missing: dict[str, list[Lane]] = {}
    for lane in lanes:
        symbols = (*lane.rule.buffers, *(("h",) if lane.rule.corrected else ()))
        unwanted = OWN_KEYS - {"step", *(STATE_KEYS[symbol] for symbol in symbols)}
        for p in lane.params:
            for key in unwanted & set(state[p]):
                del state[p][key]  # of another rule: stale when that one returns
        for symbol in symbols:
            found = _existing(lane, symbol, state, known)
            if found is None:
                missing.setdefault(symbol, []).append(lane)
            else:
                lane.state[symbol] = found
    for symbol, poor in missing.items():
        fresh = _zeros(poor, symbol, shared=symbol != "h" or not take_grads)
        for lane, stack in zip(poor, fresh, strict=True):
            _move_state(lane, STATE_KEYS[symbol], stack, state)
            lane.state[symbol] = stack


def _existing(
    lane: Lane,
    symbol: str,
    state: MutableMapping[Tensor, dict],
    known: Mapping[int, Tensor],
) -> Tensor | None:
    key = STATE_KEYS[symbol]
    if not all(key in state[p] for p in lane.params):
        return None
    dtype = lane.rule.dtype_of(symbol, lane.params[0])
    if any(state[p][key].dtype != dtype for p in lane.params):
        return None  # of a parameter in another dtype, whose state was handed over
    rows = [lane.collectives.local(state[p][key]) for p in lane.params]
    found = known_stack(rows, known)
    return adjacent(rows) if found is None else found


def _zeros(lanes: Sequence[Lane], symbol: str, shared: bool) -> list[Tensor]:
    """Zeros for each lane; where ``shared``, those of contiguous leaves have one buffer
    per dtype.
    """
    firsts = [lane.pieces()[0] for lane in lanes]
    dtypes = [
        lane.rule.dtype_of(symbol, x) for lane, x in zip(lanes, firsts, strict=True)
    ]
    dense = [i for i, x in enumerate(firsts) if shared and x.is_contiguous()]
    stacks = empty_stacks(
        [(len(lanes[i].params), *firsts[i].shape) for i in dense],
        [dtypes[i] for i in dense],
        firsts[0].device,
    )
    found = {i: stack.zero_() for i, stack in zip(dense, stacks, strict=True)}
    for i, x in enumerate(firsts):
        if i not in found:
            num, dtype = len(lanes[i].params), dtypes[i]
            if num > 1:
                found[i] = x.new_zeros(num, *x.shape, dtype=dtype)
            else:  # a leaf that is alone in its lane: its state has its strides
                found[i] = torch.zeros_like(x, dtype=dtype).unsqueeze(0)
    return [found[i] for i in range(len(lanes))]


def _move_state(
    lane: Lane, key: str, stack: Tensor, state: MutableMapping[Tensor, dict]
) -> None:
    for p, row in zip(lane.params, own_rows(stack), strict=True):
        if key in state[p]:
            row.copy_(lane.collectives.local(state[p][key]))
        state[p][key] = lane.collectives.wrap(row, p)
