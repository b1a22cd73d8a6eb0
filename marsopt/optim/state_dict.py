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
from marsopt.rules.adamw import AdamW
from marsopt.rules.algorithm import GRADIENTS, MOMENTUM
from marsopt.rules.buffers import LOOKAHEAD
from marsopt.rules.registry import CORRECTIONS, STATE_KEYS

# The names of an average, whatever it averages.
AVERAGES = frozenset({AdamW.keeps["m"].key, MOMENTUM, GRADIENTS})


def _correction_keys(*starts: str) -> frozenset[str]:
    """Return the keys of what corrections keep that starts so; of all without one."""
    buffers = [b for kind in CORRECTIONS.values() for b in kind.keeps.values()]
    keys = {b.key for b in buffers if not starts or b.start in starts}
    return frozenset(keys | _point_keys())


def _point_keys() -> set[str]:
    """Return the keys by which it is known how far parameters are ahead of x."""
    kept = {kind.keeps["x"].key for kind in CORRECTIONS.values() if kind.is_ahead}
    return {LOOKAHEAD, *kept}


TRAIN_MODE = "train_mode"  # of a param group, as schedule-free optimizers call it
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
        count, mode = group.get(STAGE_COUNT, 0), group.get(TRAIN_MODE, True)
        if type(count) is not int or count < 0 or type(mode) is not bool:
            raise ValueError(
                f"got {STAGE_COUNT}={count!r} and {TRAIN_MODE}={mode!r} in a param "
                "group of a state dict, expected a number of steps and True or False: "
                "load the result of an optimizer's state_dict()"
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


def _renamed_average(
    present: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, str]:
    """Return {name in ``saved``: name of ours} of the average, where a buffer that
    restarts from the parameter makes the difference (transport): all averages
    are of the rule's input.
    """
    want, have = AVERAGES & set(present), AVERAGES & set(saved)
    restarting = _correction_keys("parameter")
    same = restarting & set(present) == restarting & set(saved)
    if same or want & have or len(have) != 1:
        return {}
    return {old: new for old in have for new in want}


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


def _check_form_of_x(saved: set[str], present: set[str], label: str) -> None:
    """Check that transport's x is ``saved`` in the form in which it is ``present``.

    Raises:
        ValueError: one side has x, the other one numbers from which it follows.
    """
    if saved and present and (LOOKAHEAD in saved) != (LOOKAHEAD in present):
        raise ValueError(
            f"got a state dict with {sorted(saved)} of {label}, expected "
            f"{sorted(present)}: store_iterate, cautious_weight_decay and the dtypes "
            "of parameters and state decide whether transport keeps x; build MARS with "
            + ("those" if LOOKAHEAD in saved else "store_iterate=True, or with those")
            + " of the run that saved it"
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

    From one correction to another moments go on. A buffer that only one of the two
    keeps restarts: a gradient at zero, a copy of the parameter as its protocol's
    ``load`` has it. A parameter without an entry in ``saved`` restarts as a whole: it
    has not moved yet.

    Raises:
        ValueError: a tensor is missing, has another shape, or a value that no step
            leaves there; x is kept on one side, and follows from numbers on the other.
    """
    pairs, items, report = list[tuple[Tensor, Any]](), list[Item](), LoadReport()
    restarting = _correction_keys("parameter")
    report.source = saved.get(SOURCE)
    # another library keeps no gradient of MARS's, and may count no steps
    free = frozenset({"step", *_correction_keys()} if report.source else ())
    for i, (p, label) in zip(check_ids(labelled, saved), labelled, strict=True):
        entry, present = saved["state"].get(i, {}), entry_of_mars(state.get(p, {}))
        if present and not entry:
            report.without.append(label)
            continue  # ``under_loaded`` has restarted it
        renamed = _renamed_average(present, entry)
        report.renamed |= renamed
        entry = {**entry, **{new: entry[old] for old, new in renamed.items()}}
        anew = _restarted(entry, present, label, free)
        for key in sorted(anew):
            report.restart(key, label)
            if key == LOOKAHEAD or key not in restarting:
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
        ValueError: ``saved`` lacks a tensor that cannot; another form of x.
    """
    points = _point_keys()
    _check_form_of_x(points & set(saved), points & set(present), label)
    absent = set(present) - set(saved)
    correction_keys = _correction_keys()
    is_of_another = (correction_keys & set(saved)) - set(present)  # correction
    fresh = correction_keys if is_of_another else _correction_keys("parameter")
    fresh |= free
    # torch's loader of flattened state dicts has {} for a missing tensor
    empty = {key for key in present if isinstance(saved.get(key), Mapping)}
    if missing := sorted(absent - fresh | empty):
        raise ValueError(
            f"got a state dict without {missing} of {label}, expected "
            f"{sorted(present)}: it was saved by another optimizer, mars_type or "
            "form of x (store_iterate); load it into one like that"
        )
    return absent & fresh


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
