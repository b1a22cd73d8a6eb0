"""Transport: exact MARS to first order, from one gradient a step (this project's;
implicit gradient transport, arXiv 1906.03532, seen through MARS).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.rules.buffers import Buffer
from marsopt.rules.correction import Correction, scale
from marsopt.rules.life import Held, Life

log = logging.getLogger(__name__)

TOO_OFTEN = 3


class Versions(NamedTuple):
    """Autograd's counters of writes, and where p lies."""

    p: int
    piece: int  # of p on this rank: DCP writes there
    storage: int  # of that: p.data = ... gives it another
    x: int


def _versions(one: Held) -> Versions:
    p, piece = one.p, one.piece
    storage = piece.untyped_storage()._cdata
    return Versions(p._version, piece._version, storage, one["x"]._version)


class Extrapolation(Life):
    """Parameters hold y, the point ahead, and the state keeps x. Exchanges the two, and
    finds out where somebody else has written a parameter: x restarts from there, so
    that nothing which is loaded, averaged or clamped between two steps is lost.

    Writing is found by autograd's version counters (of the parameter, and of its x for
    checkpoints that load into the tensors of a state dict) and by the storage, which
    ``p.data = ...`` exchanges. What is written in place through ``p.data`` counts
    elsewhere, and is not found.
    """

    exchanges = True

    def __init__(self) -> None:
        # versions after our last write; None: p and x are to be trusted
        self._seen: dict[Tensor, Versions | None] = {}
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
        if found and found[0]["x"].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "got a step to capture whose parameters are new to it, expected one "
                "after an ordinary step: replays would start from y every time; take a "
                "step before the capture, and write parameters between eval() and "
                "train()"
            )
        for one in found:
            self._take_over(one)

    def _take_over(self, one: Held) -> None:
        """Let x be what is in the parameter."""
        one["x"].copy_(one.piece)
        if one.p in self._seen:  # once, also where this step fails and is tried again
            self._seen[one.p] = _versions(one)

    def after_step(self, held: Sequence[Held]) -> None:
        """Note what parameters and x are after our own writes."""
        self._seen = {one.p: _versions(one) for one in _ahead(held)}

    def settle(self, held: Sequence[Held]) -> None:
        """Before x is handed out, or parameters move: let x be p wherever somebody else
        has written p since our last write.
        """
        for one in _ahead(held):
            if one.p in self._seen and self._changed(one):
                self._take_over(one)

    def exchange(self, held: Sequence[Held]) -> None:
        """Exchange the contents of parameters and state. Where somebody else has
        written a parameter since our last write, both are that.
        """
        for one in _ahead(held):
            x, piece = one["x"], one.piece
            before = piece.clone()
            if not self._changed(one):
                piece.copy_(x)
            x.copy_(before)
        self.after_step(held)

    @property
    def is_away(self) -> bool:
        """Return whether a step was taken that parameters may be ahead of."""
        return bool(self._seen)

    def iterate(self, held: Held) -> Tensor | None:
        """Return x, which belongs to p from the first step on, or a load."""
        belongs = held.p in self._seen and "x" in held
        return held.kept("x") if belongs else None

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
        self, held: Sequence[Held], entries: Mapping[Tensor, Mapping[str, Any]]
    ) -> None:
        """Trust p and x, whoever of the two came first.

        An entry without x lets x restart from p, as the next step finds it. Where x is
        the tensor in the state, unwritten since our last write, a partial load has
        passed it by: nothing is new.
        """
        for one in _ahead(held):
            found = one.found("x", entries.get(one.p, {}))
            if found is None or not one.has_stepped:  # no step yet: x is p
                self._seen.pop(one.p, None)
                continue
            seen = self._seen.get(one.p)
            ours = found is one.kept("x") and seen is not None
            if not (ours and _versions(one).x == seen.x):
                self._seen[one.p] = None

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
    return [one for one in held if "x" in one]


@dataclass(frozen=True, kw_only=True, eq=False)
class Transport(Correction):
    """With x_prev the parameters one step before:

        k = gamma beta1 / (1 - beta1)
        c = g(y)  at  y = x + k (x - x_prev)

    On the current batch that is the exact c to first order in x - x_prev, and c itself
    where the loss is quadratic. Parameters hold y while gradients are taken, and the
    state keeps x; there is no reference gradient. The lookahead that a step leaves has
    the gamma of that step.
    """

    name = "transport"
    keeps = {"x": Buffer("iterate", start="parameter", dtype="parameter")}
    is_ahead = True
    suits_baselines = True
    life = Extrapolation

    def coefficients(self, beta1, gamma):
        return (1.0,)

    def extrapolation(self, beta1, gamma):
        return scale(beta1, gamma)
