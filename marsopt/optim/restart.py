"""State that begins again, in the tensors that hold it: graphs find it there."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from marsopt.optim.buckets import ParameterBucket
from marsopt.optim.state_dict import STAGE_COUNT, State
from marsopt.rules.buffers import LOOKAHEAD
from marsopt.rules.decay import LogTime


def restart(
    buckets: Sequence[ParameterBucket],
    state: State,
    groups: Sequence[MutableMapping[str, Any]],
) -> dict[str, list[str]]:
    """Set the state of all parameters to its start, as before a first step.

    Args:
        buckets: of all parameters that move; parameters hold the trained weights.
        state: the optimizer's.
        groups: the optimizer's param groups.

    Returns:
        The keys that were set, by their new value.
    """
    keys: dict[str, list[str]] = {}
    for bucket in buckets:
        buffers = bucket.algorithm.buffers
        tensors = {symbol: [*held] for symbol, held in bucket.state.items()}
        for n, symbol in enumerate(bucket.algorithm.owned):
            tensors[symbol] = [owned[n] for owned in bucket.owned]
        for symbol, held in tensors.items():
            start, key = buffers[symbol].start, buffers[symbol].key
            for tensor, piece in zip(held, bucket.pieces, strict=True):
                _begin(tensor, piece, start)
            keys.setdefault(start, []).append(key)
        for p in bucket.params:
            for key in ("step", LOOKAHEAD):
                if key in state[p]:
                    state[p][key].zero_()
                    keys.setdefault("zeros", []).append(key)
    for group in groups:
        if STAGE_COUNT in group:
            group[STAGE_COUNT] = 0
    return {start: sorted(set(names)) for start, names in keys.items()}


def _begin(tensor: Tensor, piece: Tensor, start: str) -> None:
    if start == "parameter":
        tensor.copy_(piece)
        return
    tensor.zero_()
    if start == "identity":
        tensor.diagonal(dim1=-2, dim2=-1).fill_(1.0)


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
