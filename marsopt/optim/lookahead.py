"""Transport in the class: parameters that hold y, the point ahead, and a state that
keeps x.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.optim.buckets import ParameterBucket
from marsopt.optim.state_dict import ITERATE, State

log = logging.getLogger(__name__)

TOO_OFTEN = 3


class Versions(NamedTuple):
    """Autograd's counters of writes, and where p lies."""

    p: int
    piece: int  # of p on this rank: DCP writes there
    storage: int  # of that: p.data = ... gives it another
    x: int


def _versions(p: Tensor, x: Tensor, piece: Tensor) -> Versions:
    storage = piece.untyped_storage()._cdata
    return Versions(p._version, piece._version, storage, x._version)


class Lookahead:
    """Exchanges x and y, and finds out where somebody else has written a parameter: x
    restarts from there, so that nothing which is loaded, averaged or clamped between
    two steps is lost.

    Writing is found by autograd's version counters (of the parameter, and of its x for
    checkpoints that load into the tensors of a state dict) and by the storage, which
    ``p.data = ...`` exchanges. What is written in place through ``p.data`` counts
    elsewhere, and is not found.
    """

    def __init__(self) -> None:
        # versions after our last write; None: p and x are to be believed
        self._seen: dict[Tensor, Versions | None] = {}
        self._told = False
        self._in_a_row = 0  # steps before each of which somebody has written

    def believe(self, params: Sequence[Tensor], state: State) -> None:
        """Take parameters and x as they are: of a copy, or from a pickle."""
        self._seen.update((p, None) for p in params if float(state[p]["step"]))

    def loaded(
        self,
        buckets: Sequence[ParameterBucket],
        state: State,
        entries: Mapping[Tensor, Mapping[str, Any]],
    ) -> None:
        """After a load: p and x belong together, whoever of the two came first.

        Args:
            entries: the state dict's, by parameter. Without x, it restarts from p as
                the next step finds it. Where x is the tensor in ``state``, unwritten
                since our last write, a partial load has passed it by: nothing is new.
        """
        for p, x, piece in _pairs(buckets, state):
            found = entries.get(p, {}).get(ITERATE)
            if found is None or not float(state[p]["step"]):  # no step yet: x is p
                self._seen.pop(p, None)
                continue
            seen = self._seen.get(p)
            ours = found is state[p][ITERATE] and seen is not None
            if not (ours and _versions(p, x, piece).x == seen.x):
                self._seen[p] = None

    def begin(self, buckets: Sequence[ParameterBucket], state: State) -> None:
        """Before a step: x <- p wherever p is not what we wrote.

        Raises:
            RuntimeError: that is so before every step, and would be another algorithm.
        """
        found = [pair for pair in _pairs(buckets, state) if self._changed(*pair)]
        written = any(p in self._seen for p, _, _ in found)
        self._in_a_row = self._in_a_row + 1 if written else 0
        if self._in_a_row >= TOO_OFTEN:
            self._in_a_row = 0
            raise RuntimeError(
                f"got parameters that were written before each of {TOO_OFTEN} steps, "
                'expected nobody to write between steps with correction="transport": '
                "write between optimizer.eval() and optimizer.train(), or choose "
                "another correction (SAM moves parameters before every step)"
            )
        if found and found[0][1].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "got a step to capture whose parameters are new to it, expected one "
                "after an ordinary step: replays would start from y every time; take a "
                "step before the capture, and write parameters between eval() and "
                "train()"
            )
        for p, x, piece in found:
            x.copy_(piece)
            if p in self._seen:  # once, also where this step fails and is tried again
                self._seen[p] = _versions(p, x, piece)

    def settle(self, buckets: Sequence[ParameterBucket], state: State) -> None:
        """Before x is handed out, or parameters move: x <- p wherever somebody else has
        written p since our last write.
        """
        for p, x, piece in _pairs(buckets, state):
            if p in self._seen and self._changed(p, x, piece):
                x.copy_(piece)
                self._seen[p] = _versions(p, x, piece)

    def moving(self) -> list[Tensor]:
        """Before a layout is built anew, which may move parameters: p and x are to be
        believed, in case that ``moved`` never comes. Return whose versions were known.
        """
        known = [p for p, seen in self._seen.items() if seen is not None]
        self._seen.update(dict.fromkeys(known))
        return known

    def moved(
        self, known: list[Tensor], buckets: Sequence[ParameterBucket], state: State
    ) -> None:
        """After that: where parameters ``known`` lie now is our own doing."""
        ours = set(known)
        for p, *xs in _pairs(buckets, state):
            if p in ours:
                self._seen[p] = _versions(p, *xs)

    def note(self, buckets: Sequence[ParameterBucket], state: State) -> None:
        """After our own writes."""
        self._seen = {p: _versions(p, *xs) for p, *xs in _pairs(buckets, state)}

    def exchange(self, buckets: Sequence[ParameterBucket], state: State) -> None:
        """Exchange the contents of parameters and state. Where somebody else has
        written a parameter since our last write, both are that.
        """
        for p, x, piece in _pairs(buckets, state):
            before = piece.clone()
            if not self._changed(p, x, piece):
                piece.copy_(x)
            x.copy_(before)
        self.note(buckets, state)

    def _changed(self, p: Tensor, x: Tensor, piece: Tensor) -> bool:
        if p not in self._seen:
            return True  # before the first step
        seen = self._seen[p]
        changed = seen is not None and seen[:3] != _versions(p, x, piece)[:3]
        if changed and not self._told:
            self._told = True
            log.warning(
                "marsopt: a parameter was written between two steps, by a checkpoint, "
                "an average or by hand: its lookahead restarts from what is there"
            )
        return changed

    def knows(self, p: Tensor) -> bool:
        """Return whether p and its x belong together, which they do from the first
        step on, or a load.
        """
        return p in self._seen

    @property
    def is_ahead(self) -> bool:
        """Return whether a step was taken that parameters may be ahead of."""
        return bool(self._seen)


def _pairs(buckets: Sequence[ParameterBucket], state: State):
    """Yield each parameter that looks ahead, x in the state, and p, local pieces."""
    for bucket in buckets:
        if bucket.algorithm.transports:
            local = bucket.collectives.local
            for p in bucket.params:
                if ITERATE in state.get(p, ()):  # else somebody has taken it away
                    yield p, local(state[p][ITERATE]), local(p)
