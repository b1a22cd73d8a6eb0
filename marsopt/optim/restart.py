"""State that begins again, in the tensors that hold it: graphs find it there."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from marsopt.functional.buffers import start_at_owner
from marsopt.optim.binding import Member
from marsopt.optim.state_dict import STAGE_COUNT, State


def restart(
    members: Sequence[Member],
    state: State,
    groups: Sequence[MutableMapping[str, Any]],
) -> dict[str, list[str]]:
    """Set the state of all parameters to its start, as before a first step.

    Args:
        members: all parameters that move.
        state: the optimizer's.
        groups: the optimizer's param groups.

    Returns:
        The keys that were set, by their new value.
    """
    keys: dict[str, set[str]] = {}
    for member in members:
        p, algorithm = member.p, member.algorithm
        buffers = algorithm.buffers
        for held in member.state.values():
            held.zero_()
        for symbol, owned in zip(algorithm.owned, member.owned, strict=False):
            assert member.owns is not None
            owned.copy_(start_at_owner(algorithm, buffers[symbol], p, member.owns))
        for symbol in [*member.state, *algorithm.owned]:
            keys.setdefault(buffers[symbol].start, set()).add(buffers[symbol].key)
        state[p]["step"].zero_()
        keys.setdefault("zeros", set()).add("step")
    for group in groups:
        if STAGE_COUNT in group:
            group[STAGE_COUNT] = 0
    return {start: sorted(names) for start, names in keys.items()}
