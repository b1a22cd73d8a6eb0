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

from marsopt.functional.trees import plain_names
from marsopt.optim.loading import (
    SOURCE,
    as_tensor,
    check_is_of_optimizer,
    check_kind,
    check_shapes,
)
from marsopt.rules.component import Algorithm, H
from marsopt.rules.formats import (
    CODED,
    LOW_BITS,
    NEAREST,
    SCALE,
    SPAN,
    decode,
    encode,
    scales_shape,
)
from marsopt.rules.registry import STATE_KEYS
from marsopt.step.owners import Collectives

log = logging.getLogger(__name__)

# The steps that a parameter has seen, if its preconditioner has stages: a count on the
# CPU, saved with the state, so that a resumed run keeps its rhythm.
STAGE_COUNT = "stage_count"
State = MutableMapping[Tensor, dict[str, Any]]  # ``optimizer.state``


def entry_of_mars(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of MARS in ``optimizer.state[p]``. Other entries are a
    caller's (timm's Lookahead keeps its slow weights there): they are carried, never
    looked at.
    """
    return {key: value for key, value in entry.items() if _is_of_mars(key)}


def _is_of_mars(key: str) -> bool:
    return key in ("step", STAGE_COUNT) or key in STATE_KEYS


def in_form_of(
    algorithm: Algorithm, entry: Mapping[str, Any], collectives: Collectives
) -> dict[str, Any]:
    """Return a parameter's state with averages as ``algorithm`` stores them: floating
    point becomes codes, rounded to nearest, and codes become float32.
    """
    form = dict(entry)
    for buffer in algorithm.buffers.values():
        value, scales = entry.get(buffer.key), entry.get(buffer.key + SCALE)
        if not isinstance(value, Tensor) or isinstance(buffer.dtype, torch.dtype):
            continue
        local, are_squares = collectives.local(value), buffer.codes == "squares"
        flat = local.reshape(1, -1)
        if algorithm.stores_codes(buffer) and value.is_floating_point():
            if not local.ndim or local.shape[-1] % SPAN:
                continue  # of another shape than the parameter's, which is refused
            noise = torch.full_like(flat, NEAREST, dtype=torch.int32)
            codes, small = encode(flat, noise, are_squares)
            small = small.view(scales_shape(local.shape))
            form[buffer.key] = collectives.wrap(codes.view(local.shape), value)
            form[buffer.key + SCALE] = collectives.wrap(small, value)
        elif value.dtype == CODED and not algorithm.stores_codes(buffer):
            small = collectives.local(as_tensor(scales)).reshape(1, -1)
            wide = decode(flat, small, are_squares).view(local.shape)
            form[buffer.key] = collectives.wrap(wide, value)
            del form[buffer.key + SCALE]
    return form


def check_ids(
    labelled: Sequence[tuple[Tensor, str]], saved: Mapping[str, Any]
) -> list[Any]:
    """Return the ids of the parameters in ``saved``, in their order.

    Raises:
        ValueError: no optimizer's state dict, or another number of parameters.
    """
    check_is_of_optimizer(saved)
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    if len(ids) != len(labelled):
        raise ValueError(
            f"got a state dict of {len(ids)} parameters, expected {len(labelled)}: "
            "build MARS over the same parameters"
        )
    return ids


def check_entries(
    labelled: Sequence[tuple[Tensor, str]], saved: Mapping[str, Any]
) -> None:
    """Check that ``saved`` has all parameters, with numbers for MARS's keys.

    Raises:
        ValueError: as ``check_ids`` and ``check_kind``, by name.
    """
    for i, (_, label) in zip(check_ids(labelled, saved), labelled, strict=True):
        entry = entry_of_mars(saved["state"].get(i, {}))
        for key, value in entry.items():
            check_kind(value, key, label, has_codes=_has_scales(entry, key))


def _has_scales(entry: Mapping[str, Any], key: str) -> bool:
    """Return whether an entry holds scales that fit the codes of this key."""
    codes, scales = entry[key], entry.get(key + SCALE)
    if not (isinstance(codes, Tensor) and isinstance(scales, Tensor) and codes.ndim):
        return False
    return scales.shape == scales_shape(codes.shape)


def in_order_of_names(
    groups: Sequence[Mapping[str, Any]], saved: dict[str, Any]
) -> dict[str, Any]:
    """Return ``saved`` with its parameters in the order of ``groups``, if both name the
    same parameters, with wrappers or without; else ``saved``, which goes by position,
    as it does if a parameter was appended to a group later, without a name.
    """
    saved_groups = saved["param_groups"]
    if not all(
        "param_names" in group and len(group["param_names"]) == len(group["params"])
        for group in (*groups, *saved_groups)
    ):
        return saved
    names, saved_names = (
        plain_names(name for group in each for name in group["param_names"])
        for each in (groups, saved_groups)
    )
    numbers = [i for group in saved_groups for i in group["params"]]
    ids = dict(zip(saved_names, numbers, strict=True))
    if len(groups) != len(saved_groups) or sorted(names) != sorted(ids):
        return saved
    rest = iter(names)
    ordered = [
        {**saved_group, "param_names": group["param_names"]}
        | {"params": [ids[next(rest)] for _ in group["param_names"]]}
        for group, saved_group in zip(groups, saved_groups, strict=True)
    ]
    return {**saved, "param_groups": ordered}


def under_loaded(
    present: State, loaded: Mapping[Any, Any]
) -> defaultdict[Tensor, dict[str, Any]]:
    """Return a state of our tensors that are ``present`` already, for the parameters
    that ``loaded`` has, and of a caller's entries in ``loaded``.
    """
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for key, entry in loaded.items():
        if isinstance(key, Tensor):
            ours = entry_of_mars(present.get(key, {}))
            foreign = {k: v for k, v in entry.items() if not _is_of_mars(k)}
            state[key] = {"step": torch.zeros((), device="cpu"), **ours, **foreign}
        else:
            state[key] = entry
    return state


def to_restore(
    state: State,
    labelled: Sequence[tuple[Tensor, str]],
    saved: Mapping[str, Any],
    collectives: Collectives,
) -> list[tuple[Tensor, Any]]:
    """Return the tensors of ``state`` with their values in ``saved``, to be copied in
    their own dtype: torch.optim's own loading casts to the parameter's, which would
    round float32 state of bf16 parameters. A value that is the tensor is left out.

    A parameter without an entry in ``saved`` restarts as a whole: it has had no step.
    One line in the log (INFO) says how many tensors restart.

    Raises:
        ValueError: a tensor is missing, or has another shape; or bits of a weight would
            be dropped.
    """
    pairs, num_restored, num_fresh = list[tuple[Tensor, Any]](), 0, 0
    source = saved.get(SOURCE)
    # another library keeps no gradient of MARS's, and may count no steps; a run without
    # master weights has them in its parameters
    free = frozenset({*LOW_BITS, "step", H.key} if source else LOW_BITS)
    for i, (p, label) in zip(check_ids(labelled, saved), labelled, strict=True):
        entry, present = saved["state"].get(i, {}), entry_of_mars(state.get(p, {}))
        if present and not entry:
            num_fresh += len(present)
            continue  # ``under_loaded`` has restarted it
        lost = [key for key in LOW_BITS if key in entry.keys() - present.keys()]
        if present and lost:
            raise ValueError(
                f"got {' and '.join(lost)} of {label}, bits of its weight, expected an "
                "optimizer with the master_weight_bits of the saved one: pass it, or "
                "load master_weights() into the model and delete these bits"
            )
        fresh = _restarted(entry, present, label, free)
        num_fresh += len(fresh)
        restored = {key: t for key, t in present.items() if key not in fresh}
        num_restored += len(restored)
        check_shapes(entry, restored, label, collectives)
        pairs += [(t, entry.get(key, 0.0)) for key, t in present.items()]
    log.info(
        "marsopt: load_state_dict restored %d tensors, and restarted %d%s",
        num_restored,
        num_fresh,
        "" if source is None else f"; {source}",
    )
    return [(t, value) for t, value in pairs if value is not t]


def _restarted(
    saved: Mapping[str, Any],
    present: Mapping[str, Tensor],
    label: str,
    free: frozenset[str],
) -> set[str]:
    """Return the keys of one parameter's state that start as before its first step,
    ``free`` keys among them.

    Raises:
        ValueError: ``saved`` lacks a tensor that cannot.
    """
    absent = set(present) - set(saved)
    if missing := sorted(absent - free):
        raise ValueError(
            f"got a state dict without {missing} of {label}, expected "
            f"{sorted(present)}: it was saved by another optimizer or mars_type; load "
            "it into one like that"
        )
    return absent & free
