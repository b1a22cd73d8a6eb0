"""State that begins again, in the tensors that hold it: graphs find it there."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from marsopt.functional.binding import start_at_owner
from marsopt.optim.buckets import ParameterBucket
from marsopt.optim.state_dict import STAGE_COUNT, State


def restart(
    buckets: Sequence[ParameterBucket],
    state: State,
    groups: Sequence[MutableMapping[str, Any]],
) -> dict[str, list[str]]:
    """Set the state of all parameters to its start, as before a first step.

    Args:
        buckets: of all parameters that move.
        state: the optimizer's.
        groups: the optimizer's param groups.

    Returns:
        The keys that were set, by their new value.
    """
    keys: dict[str, list[str]] = {}
    for bucket in buckets:
        buffers = bucket.algorithm.buffers
        for held in bucket.state.values():
            for tensor in held:
                tensor.zero_()
        for n, symbol in enumerate(bucket.algorithm.owned):
            owners = zip(bucket.params, bucket.owned, bucket.owns, strict=True)
            for p, owned, owns in owners:
                start = start_at_owner(bucket.algorithm, buffers[symbol], p, owns)
                owned[n].copy_(start)
        for symbol in [*bucket.state, *bucket.algorithm.owned]:
            buffer = buffers[symbol]
            keys.setdefault(buffer.start, []).append(buffer.key)
        for p in bucket.params:
            state[p]["step"].zero_()
        keys.setdefault("zeros", []).append("step")
    for group in groups:
        if STAGE_COUNT in group:
            group[STAGE_COUNT] = 0
    return {start: sorted(set(names)) for start, names in keys.items()}
