"""Transport: exact MARS to first order, from one gradient a step (this project's;
implicit gradient transport, arXiv 1906.03532, seen through MARS).
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.buffers import AHEAD, LOOKAHEAD, Buffer
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction, scale
from marsopt.rules.hyperparameters import structure
from marsopt.rules.life import Held, Life

log = logging.getLogger(__name__)

TOO_OFTEN = 3


class Versions(NamedTuple):
    """Autograd's counters of writes, and where p lies."""

    p: int
    piece: int  # of p on this rank: DCP writes there
    storage: int  # of that: p.data = ... gives it another
    x: int  # of x, or of the numbers from which it follows


def _versions(one: Held) -> Versions:
    p, piece = one.p, one.piece
    storage = piece.untyped_storage()._cdata
    kept = one["x"] if one.numbers is None else one.numbers
    return Versions(p._version, piece._version, storage, kept._version)


class Extrapolation(Life):
    """Parameters hold y, the point ahead; x is in the state, or follows from y, the
    moments and the last step's numbers. Lets parameters be x for evaluation, and finds
    out where somebody else has written a parameter: x restarts from there, so that
    nothing which is loaded, averaged or clamped between two steps is lost.

    Writing is found by autograd's version counters (of the parameter, and of its x or
    numbers for checkpoints that load into the tensors of a state dict) and by the
    storage, which ``p.data = ...`` exchanges. What is written in place through
    ``p.data`` counts elsewhere, and is not found.
    """

    exchanges = True

    def __init__(self) -> None:
        # versions after our last write; None: p and x are to be trusted
        self._seen: dict[Tensor, Versions | None] = {}
        # what a checkpoint of the other form has brought, until parameters are there
        # too: x, or the numbers from which it follows
        self._brought: dict[Tensor, Tensor] = {}
        self._told = False
        self._in_a_row = 0  # steps before each of which somebody has written

    def before_step(self, held: Sequence[Held]) -> None:
        """Let x be p wherever p is not what we wrote.

        Raises:
            RuntimeError: that is so before every step, and would be another algorithm.
        """
        found = [one for one in _ahead(held) if self._changed(one)]
        written = any(one.p in self._seen for one in found)
        self._in_a_row = self._in_a_row + 1 if written else 0
        if self._in_a_row >= TOO_OFTEN:
            self._in_a_row = 0
            raise RuntimeError(
                f"got parameters that were written before each of {TOO_OFTEN} steps, "
                'expected nobody to write between steps with correction="transport": '
                "write between optimizer.eval() and optimizer.train(), or choose "
                "another correction (SAM moves parameters before every step)"
            )
        if found and found[0].p.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "got a step to capture whose parameters are new to it, expected one "
                "after an ordinary step: replays would start from y every time; take a "
                "step before the capture, and write parameters between eval() and "
                "train()"
            )
        for one in found:
            self._take_over(one)
        self.complete(held)

    def _take_over(self, one: Held) -> None:
        """Let x be what is in the parameter."""
        self._brought.pop(one.p, None)
        if one.numbers is None:
            one["x"].copy_(one.piece)
        else:
            one.numbers.zero_()
            _keep_ahead(one, None)
        if one.p in self._seen:  # once, also where this step fails and is tried again
            self._seen[one.p] = _versions(one)

    def complete(self, held: Sequence[Held]) -> None:
        """Go on from what a checkpoint of the other form has brought."""
        if not self._brought:
            return
        ahead = _ahead(held)
        ours = [one for one in ahead if one.p in self._seen and not self._changed(one)]
        for one in ahead:
            brought = self._brought.pop(one.p, None)
            if brought is None:
                continue
            if one.numbers is None:
                one["x"].copy_(one.behind(brought))
            else:  # a gradient that is there already is of the point ahead, as it was
                one.piece.copy_(brought)
        for one in ours:  # after all: pieces of one buffer count together
            self._seen[one.p] = _versions(one)

    def after_step(self, held: Sequence[Held]) -> None:
        """Note what parameters and x are after our own writes."""
        self._seen |= {one.p: _versions(one) for one in _ahead(held)}

    def forget(self, state: Container[Tensor]) -> None:
        self._seen = {p: seen for p, seen in self._seen.items() if p in state}

    def settle(self, held: Sequence[Held]) -> None:
        """Before x is handed out, or parameters move: let x be p wherever somebody else
        has written p since our last write.
        """
        for one in _ahead(held):
            if one.p in self._seen and self._changed(one):
                self._take_over(one)

    def exchange(self, held: Sequence[Held], ahead: bool) -> None:
        """Let parameters be y (``ahead``) or x, and keep the other one. Where somebody
        else has written a parameter since our last write, both are that.
        """
        for one in _ahead(held):
            if self._changed(one):
                self._take_over(one)
        self.complete(held)
        for one in _ahead(held):
            piece, numbers = one.piece, one.numbers
            if numbers is None:
                before = piece.clone()
                piece.copy_(one["x"])
                one["x"].copy_(before)
            elif not ahead:
                _keep_ahead(one, one.p.detach())
                piece.copy_(one.behind(numbers))
            else:  # bit for bit, unless it has not been saved
                kept = _point(one.entry)
                y = one.ahead(numbers) if kept is None else one.local(kept)
                piece.copy_(y)
                _keep_ahead(one, None)  # afterwards: the copy may be broken off
        for one in _ahead(held):  # after all, as in complete
            if one.p in self._seen:  # before its first step p stays the truth
                self._seen[one.p] = _versions(one)

    @property
    def is_away(self) -> bool:
        """Return whether a step was taken that parameters may be ahead of."""
        return bool(self._seen)

    def iterate(self, held: Held) -> Tensor | None:
        """Return x, which belongs to p from the first step on, or a load."""
        if held.p not in self._seen or held not in _ahead([held]):
            return None
        if held.numbers is None:
            return held.kept("x")
        x = torch.empty_like(held.p, requires_grad=False)
        held.local(x).copy_(held.behind(held.numbers))
        return x

    def before_rebuild(self) -> list[Tensor]:
        """Trust p and x, in case that ``after_rebuild`` never comes; return whose
        versions were known.
        """
        known = [p for p, seen in self._seen.items() if seen is not None]
        self._seen.update(dict.fromkeys(known))
        return known

    def after_rebuild(self, held: Sequence[Held], before: list[Tensor]) -> None:
        """Note that where parameters lie now is our own doing."""
        ours = set(before)
        for one in _ahead(held):
            if one.p in ours:
                self._seen[one.p] = _versions(one)

    def loaded(
        self,
        held: Sequence[Held],
        entries: Mapping[Tensor, Mapping[str, Any]],
        ahead: bool,
    ) -> None:
        """Trust p and x, whoever of the two came first.

        An entry without x lets x restart from p, as the next step finds it. Where x is
        the tensor in the state, unwritten since our last write, a partial load has
        passed it by: nothing is new.
        """
        self._brought.clear()
        others = 0
        for one in _ahead(held):
            entry, stores = entries.get(one.p, {}), one.numbers is None
            x, numbers = one.found("x", entry), entry.get(LOOKAHEAD)
            same, other = (x, numbers) if stores else (numbers, x)
            seen, kept = self._seen.pop(one.p, None), _kept(one)
            if same is None and not stores:
                kept.zero_()
            if not one.has_stepped:  # x is p
                continue
            if same is not None:
                is_new = same is not kept or seen is None or _versions(one).x != seen.x
                self._seen[one.p] = None if is_new else seen
            elif other is not None:
                others += 1
                self._bring(one, other, _point(entry), ahead)
            if not stores:
                _keep_ahead(one, _point(entry) if same is not None else None)
        if others:
            log.warning(
                "marsopt: the state was saved with another store_iterate: %s tensors "
                "go on from it, and change its form with the next step",
                others,
            )

    def _bring(
        self, one: Held, brought: Tensor, point: Tensor | None, ahead: bool
    ) -> None:
        """Note what a checkpoint of the other form knows of x.

        Args:
            one: the parameter.
            brought: x, or the numbers from which it follows.
            point: y where a checkpoint of numbers has it.
            ahead: whether parameters are y.
        """
        stores = one.numbers is None
        if stores and not (one.can_lead_back and (ahead or point is not None)):
            return  # x restarts from p
        self._seen[one.p] = None
        if not ahead:
            if stores:  # contents are exchanged, and else parameters are x already
                one.kept("x").copy_(point)
            return
        if stores:
            self._brought[one.p] = brought.to(one.piece.device, copy=True)
        else:
            kept = torch.empty_like(one.p, requires_grad=False)
            self._brought[one.p] = one.local(kept.copy_(brought))

    def resumed(self, held: Sequence[Held], carried: None) -> None:
        """Trust the parameters and x of a copy, or from a pickle."""
        self._seen.update((one.p, None) for one in _ahead(held) if one.has_stepped)

    def _changed(self, one: Held) -> bool:
        if one.p not in self._seen:
            return True  # before the first step
        seen = self._seen[one.p]
        changed = seen is not None and seen[:3] != _versions(one)[:3]
        if changed and not self._told:
            self._told = True
            log.warning(
                "marsopt: a parameter was written between two steps, by a checkpoint, "
                "an average or by hand: its lookahead restarts from what is there"
            )
        return changed


def _ahead(held: Sequence[Held]) -> list[Held]:
    """Return those that look ahead; of others, somebody may have taken x away."""
    return [one for one in held if "x" in one or one.numbers is not None]


def _kept(one: Held) -> Tensor:
    """Return x, or the numbers from which it follows, as the state has it."""
    return one.kept("x") if one.numbers is None else one.numbers


def _point(entry: Mapping[str, Any]) -> Tensor | None:
    """Return the point ahead that an entry of a state has; None where the parameter is
    it: a tensor without elements then stands for it, since torch's loader of flattened
    state dicts takes only keys that are there.
    """
    point = entry.get(AHEAD)
    return None if point is None or point.numel() == 0 else point


def _keep_ahead(one: Held, point: Tensor | None) -> None:
    """Let the state have this as the point ahead, or none."""
    if point is None:
        one.entry[AHEAD] = one.piece.new_empty(0)
    elif point is not one.entry.get(AHEAD):
        kept = torch.empty_like(one.p, requires_grad=False)
        one.entry[AHEAD] = kept.copy_(point)


@dataclass(frozen=True, kw_only=True, eq=False)
class Transport(Correction):
    """With x_prev the parameters one step before:

        k = gamma beta1 / (1 - beta1)
        c = g(y)  at  y = x + k (x - x_prev)

    On the current batch that is the exact c to first order in x - x_prev, and c itself
    where the loss is quadratic. Parameters hold y while gradients are taken; there is
    no reference gradient. The lookahead that a step leaves has the gamma of that step.

    With AdamW x follows from y, the moments and four numbers of the last step, so that
    the state is AdamW's own; other rules, and half precision, keep it in the state.

    Source: this project's; implicit gradient transport (arXiv 1906.03532), seen through
    MARS (arXiv 2411.10438).

    Args:
        store_iterate: keep x in the state with AdamW too: 4 bytes a parameter more of
            state and of traffic, for what is a rounding.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> rule = marsopt.mars_adamw(correction="transport", gamma=0.1)
        >>> params = {"w": torch.ones(2)}
        >>> params, state = rule.step(params, params, rule.init(params), lr=0.1)
        >>> params["w"]                         # y = x + 1.9 (x - x_prev)
        tensor([0.7100, 0.7100])
        >>> rule.iterate(params, state)["w"]    # x
        tensor([0.9000, 0.9000])
    """

    store_iterate: bool = structure(False, checks.true_or_false, whole=True)

    name = "transport"
    keeps = {"x": Buffer("iterate", start="parameter", dtype="parameter")}
    is_ahead = True
    suits_baselines = True
    life = Extrapolation

    def coefficients(self, beta1: Number, gamma: Number) -> tuple[Number, ...]:
        return (1.0,)

    def extrapolation(self, beta1: Number, gamma: Number) -> Number:
        return scale(beta1, gamma)
