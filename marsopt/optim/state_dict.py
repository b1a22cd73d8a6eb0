"""``optimizer.state``: its keys, and state dicts into it, complete or refused, bit for
bit.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from marsopt.rules.algorithm import Algorithm

log = logging.getLogger(__name__)

# Symbols of the algorithms, and what torch.optim (and, for h, the authors) call them.
STATE_KEYS = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "v_max": "max_exp_avg_sq",
    "r": "row_exp_avg_sq",
    "h": "last_grad",
    "x": "iterate",
}

LAST_GRAD, ITERATE = STATE_KEYS["h"], STATE_KEYS["x"]
MOMENTUM, GRADIENTS = "momentum_buffer", "grad_avg"
TRAIN_MODE = "train_mode"  # of a param group, as schedule-free optimizers call it
# All else in ``optimizer.state[p]`` is somebody else's (timm's Lookahead keeps its slow
# weights there): it is carried, and never looked at.
OWN_KEYS = frozenset({"step", *STATE_KEYS.values(), MOMENTUM, GRADIENTS})


def state_key(algorithm: Algorithm, symbol: str) -> str:
    """Return what ``optimizer.state[p]`` calls a buffer.

    An average has three names, so that one is never taken for the other: of corrected
    gradients; "momentum_buffer" in a plain matrix rule, as torch.optim.Muon has it; and
    "grad_avg" where approximate MARS averages plain gradients instead.
    """
    if symbol == "m" and algorithm.is_quasi_hyperbolic:
        return GRADIENTS
    if symbol == "m" and algorithm.matrix_only and algorithm.correction is None:
        return MOMENTUM
    return STATE_KEYS[symbol]


def kept_buffers(algorithm: Algorithm) -> list[str]:
    """Return the symbols of what the class keeps: also h that exact MARS is given."""
    given = ["h"] if algorithm.reads_h and not algorithm.keeps_h else []
    return [*algorithm.buffers, *given]


State = MutableMapping[Tensor, dict[str, Any]]  # ``optimizer.state``


def own(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what ``optimizer.state[p]`` holds of ours."""
    return {key: value for key, value in entry.items() if key in OWN_KEYS}


def forget_strangers(state: State, groups: Sequence[Mapping[str, Any]]) -> None:
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


def check_ids(labelled: Sequence[tuple[Tensor, str]], saved: Mapping[str, Any]) -> list:
    """Return the ids under which ``saved`` knows the parameters, in their order.

    Raises:
        ValueError: another number of parameters.
    """
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    if len(ids) != len(labelled):
        raise ValueError(
            f"got a state dict of {len(ids)} parameters, expected {len(labelled)}: "
            "build MARS over the same parameters"
        )
    return ids


def under_loaded(present: State, loaded: Mapping[Any, Any]) -> State:
    """Return a state of our tensors that are ``present`` already, for the parameters
    that ``loaded`` has, and of what others keep in ``loaded``.
    """
    state: State = defaultdict(dict)
    for key, entry in loaded.items():
        if isinstance(key, Tensor):
            mine = own(present.get(key, {}))
            foreign = {k: v for k, v in entry.items() if k not in OWN_KEYS}
            state[key] = {"step": torch.zeros(()), **mine, **foreign}
        else:
            state[key] = entry
    return state


def _under_our_names(
    mine: Mapping[str, Any], found: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return ``found`` with its average under the name of ours, where transport alone
    makes the difference: all three are averages of what the rule was given.
    """
    names = {STATE_KEYS["m"], MOMENTUM, GRADIENTS}
    want, have = names & set(mine), names & set(found)
    if (ITERATE in mine) == (ITERATE in found) or want & have or len(have) != 1:
        return found
    return {**found, **dict.fromkeys(want, found[have.pop()])}


def check_not_ours(state: State, saved: Mapping[str, Any]) -> None:
    """Check that ``saved`` is more than another view of ``state``, half written.

    Raises:
        RuntimeError: it holds tensors of ``state``.
    """
    ours = {id(value) for entry in state.values() for value in own(entry).values()}
    for entry in saved["state"].values():
        if any(id(value) in ours for value in entry.values()):
            raise RuntimeError(
                "got a state dict of this optimizer's own tensors after an exception "
                "in the midst of a step, expected a copy from before: load a "
                "checkpoint, or build model and optimizer anew"
            )


def to_restore(
    state: State, labelled: Sequence[tuple[Tensor, str]], saved: Mapping[str, Any]
) -> list[tuple[Tensor, Any]]:
    """Return the tensors of ``state`` with what ``saved`` has for them, to be copied in
    their own dtype: torch.optim's own loading casts to the parameter's, which would
    round float32 state of bf16 parameters. What is there already is left out.

    Between transport and the other corrections moments go on. What only one of them
    keeps starts anew: h at zero, x as ``Lookahead.loaded`` has it.

    Raises:
        ValueError: something is missing, or has another shape.
    """
    pairs, restarts = [], set()
    for i, (p, label) in zip(check_ids(labelled, saved), labelled, strict=True):
        found, mine = saved["state"].get(i, {}), own(state.get(p, {}))
        found = _under_our_names(mine, found)
        absent = set(mine) - set(found)
        anew = absent & ({ITERATE, LAST_GRAD} if ITERATE in found else {ITERATE})
        missing = sorted(absent - anew)
        if missing:
            raise ValueError(
                f"got a state dict without {missing} of {label}, expected "
                f"{sorted(mine)}: it was saved by another optimizer or mars_type; load "
                "it into one like that"
            )
        restarts |= anew
        if LAST_GRAD in anew:
            pairs.append((mine[LAST_GRAD], 0.0))
        for key, tensor in mine.items():
            if key in anew:
                continue
            shape = torch.as_tensor(found[key]).shape
            if shape != tensor.shape:
                raise ValueError(
                    f"got {key} of shape {tuple(shape)} for {label}, expected "
                    f"{tuple(tensor.shape)}: build MARS over the same parameters in "
                    "the same order"
                )
            if found[key] is not tensor:
                pairs.append((tensor, found[key]))
    if restarts:
        log.warning(
            "marsopt: the state was saved with another correction: moments go on, %s "
            "starts anew",
            " and ".join(sorted(restarts)),
        )
    return pairs
