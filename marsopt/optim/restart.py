"""State that begins again, in the tensors that hold it: graphs find it there."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from marsopt.functional.binding import start_at_owner
from marsopt.optim.buckets import ParameterBucket
from marsopt.optim.state_dict import STAGE_COUNT, State
from marsopt.rules.decay import LogTime


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


def count_from(group: MutableMapping[str, Any], state: State) -> None:
    """Let every ``LogTime`` of a group go on from the most steps that one of its
    parameters has taken, where these begin again at 0. Costs a sync.
    """
    entries: list[Mapping[str, Any]] = [state.get(p, {}) for p in group["params"]]
    taken = max((float(e["step"]) for e in entries if "step" in e), default=0.0)
    for key, value in group.items():
        if isinstance(value, tuple):
            group[key] = tuple(_later(item, taken) for item in value)
        elif isinstance(value, LogTime):
            group[key] = _later(value, taken)


def _later(value: Any, taken: float) -> Any:
    if not isinstance(value, LogTime):
        return value
    return replace(value, start=value.start + taken)
