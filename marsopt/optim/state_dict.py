"""``optimizer.state``: its keys, and state dicts into it, complete or refused, bit for
bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from marsopt.functional.collectives import Collectives
from marsopt.optim.loading import (
    SOURCE,
    Item,
    LoadReport,
    check_form,
    check_groups,
    check_is_mapping,
    check_values,
)
from marsopt.rules.correction import H
from marsopt.rules.registry import STATE_KEYS

# How many steps a group has taken whose preconditioner has stages: the host's count,
# saved with the group, so that a run that goes on keeps its rhythm.
STAGE_COUNT = "stage_count"
State = MutableMapping[Tensor, dict[str, Any]]  # ``optimizer.state``


def entry_of_mars(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of MARS in ``optimizer.state[p]``. Other entries are a
    caller's (timm's Lookahead keeps its slow weights there): they are carried, never
    looked at.
    """
    return {key: value for key, value in entry.items() if _is_of_mars(key)}


def _is_of_mars(key: str) -> bool:
    return key == "step" or key in STATE_KEYS


def check_ids(
    labelled: Sequence[tuple[Tensor, str]], saved: Mapping[str, Any]
) -> list[Any]:
    """Return the ids under which ``saved`` knows the parameters, in their order.

    Raises:
        ValueError: no optimizer's state dict, or another number of parameters.
    """
    check_is_mapping(saved)
    groups, state = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, Sequence) or not isinstance(state, Mapping):
        raise ValueError(
            f"got a state dict of {sorted(map(str, saved))[:3]}, expected one of an "
            "optimizer, which has 'param_groups' and 'state': load the model's into "
            "the model"
        )
    ids = check_groups(groups)
    if len(ids) != len(labelled):
        raise ValueError(
            f"got a state dict of {len(ids)} parameters, expected {len(labelled)}: "
            "build MARS over the same parameters"
        )
    return ids


def check_entries(
    labelled: Sequence[tuple[Tensor, str]], saved: Mapping[str, Any]
) -> None:
    """Check that ``saved`` has tensors, of all parameters, where MARS keeps tensors.

    Raises:
        ValueError: as ``check_ids`` and ``check_form``, by name.
    """
    for i, (_, label) in zip(check_ids(labelled, saved), labelled, strict=True):
        entry = saved["state"].get(i, {})
        if not isinstance(entry, Mapping):
            raise ValueError(
                f"got a {type(entry).__name__} as the state of {label}, expected a "
                "dict of tensors: load the result of an optimizer's state_dict()"
            )
        for key, value in entry_of_mars(entry).items():
            check_form(value, key, label)
    for group in saved["param_groups"]:
        count = group.get(STAGE_COUNT, 0)
        if type(count) is not int or count < 0:
            raise ValueError(
                f"got {STAGE_COUNT}={count!r} in a param group of a state dict, "
                "expected a number of steps: load the result of an optimizer's "
                "state_dict()"
            )


def in_order_of_names(
    groups: Sequence[Mapping[str, Any]], saved: dict[str, Any]
) -> dict[str, Any]:
    """Return ``saved`` with its parameters in the order of ``groups``, where both name
    the same ones; else ``saved``, which goes by position.
    """
    if not all("param_names" in group for group in (*groups, *saved["param_groups"])):
        return saved
    names = [name for group in groups for name in group["param_names"]]
    ids = {
        name: i
        for group in saved["param_groups"]
        for name, i in zip(group["param_names"], group["params"], strict=True)
    }
    if len(groups) != len(saved["param_groups"]) or sorted(names) != sorted(ids):
        return saved
    ordered = [
        {**saved_group, "param_names": group["param_names"]}
        | {"params": [ids[name] for name in group["param_names"]]}
        for group, saved_group in zip(groups, saved["param_groups"], strict=True)
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
            kept = entry_of_mars(present.get(key, {}))
            foreign = {k: v for k, v in entry.items() if not _is_of_mars(k)}
            state[key] = {"step": torch.zeros(()), **kept, **foreign}
        else:
            state[key] = entry
    return state


def check_is_apart(state: State, saved: Mapping[str, Any]) -> None:
    """Check that ``saved`` is more than another view of ``state``, half written.

    Raises:
        RuntimeError: it holds tensors of ``state``.
    """
    live = {id(v) for entry in state.values() for v in entry_of_mars(entry).values()}
    for entry in saved["state"].values():
        if any(id(value) in live for value in entry.values()):
            raise RuntimeError(
                "got a state dict of this optimizer's own tensors after an exception "
                "in the midst of a step, expected a copy from before: load a "
                "checkpoint, or build model and optimizer again"
            )


def to_restore(
    state: State,
    labelled: Sequence[tuple[Tensor, str]],
    saved: Mapping[str, Any],
    leaves: Sequence[Tensor],
    collectives: Collectives,
) -> tuple[list[tuple[Tensor, Any]], LoadReport]:
    """Return the tensors of ``state`` with their values in ``saved``, to be copied in
    their own dtype: torch.optim's own loading casts to the parameter's, which would
    round float32 state of bf16 parameters. A value that is the tensor is left out.

    A parameter without an entry in ``saved`` restarts as a whole: it has not moved yet.

    Raises:
        ValueError: a tensor is missing, has another shape, or a value that no step
            leaves there.
    """
    pairs, items, report = list[tuple[Tensor, Any]](), list[Item](), LoadReport()
    report.source = saved.get(SOURCE)
    # another library keeps no gradient of MARS's, and may count no steps
    free = frozenset({"step", H.key} if report.source else ())
    for i, (p, label) in zip(check_ids(labelled, saved), labelled, strict=True):
        entry, present = saved["state"].get(i, {}), entry_of_mars(state.get(p, {}))
        if present and not entry:
            report.without.append(label)
            continue  # ``under_loaded`` has restarted it
        anew = _restarted(entry, present, label, free)
        for key in sorted(anew):
            report.restart(key, label)
            pairs.append((present[key], 0.0))
        kept = {key: t for key, t in present.items() if key not in anew}
        items += [Item(p, key, t, entry[key]) for key, t in kept.items()]
        _check_shapes(entry, kept, label)
        report.num_tensors += len(kept)
        report.num_params += bool(kept)
    check_values(items, labelled, leaves, collectives)
    pairs += [(item.tensor, item.value) for item in items]
    return [(t, value) for t, value in pairs if value is not t], report


def _restarted(
    saved: Mapping[str, Any],
    present: Mapping[str, Tensor],
    label: str,
    free: frozenset[str],
) -> set[str]:
    """Return the keys of one parameter's state that start as before its first step,
    ``free`` ones among them.

    Raises:
        ValueError: ``saved`` lacks a tensor that cannot.
    """
    absent = set(present) - set(saved)
    # torch's loader of flattened state dicts has {} for a missing tensor
    empty = {key for key in present if isinstance(saved.get(key), Mapping)}
    if missing := sorted(absent - free | empty):
        raise ValueError(
            f"got a state dict without {missing} of {label}, expected "
            f"{sorted(present)}: it was saved by another optimizer or mars_type; load "
            "it into one like that"
        )
    return absent & free


def _check_shapes(
    saved: Mapping[str, Any], present: Mapping[str, Tensor], label: str
) -> None:
    for key, tensor in present.items():
        shape = torch.as_tensor(saved[key]).shape
        if shape != tensor.shape:
            raise ValueError(
                f"got {key} of shape {tuple(shape)} for {label}, expected "
                f"{tuple(tensor.shape)}: build MARS over the same parameters in "
                "the same order"
            )
