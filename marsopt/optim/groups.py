"""What the class takes as a param group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from marsopt.functional.routing import FOLLOWED, MATRICES, route
from marsopt.functional.trees import check_parameter
from marsopt.optim.hyperparameters import check_group
from marsopt.optim.state_dict import TRAIN_MODE
from marsopt.optim.storage import check_apart
from marsopt.rules import checks
from marsopt.rules.newton_schulz import NewtonSchulz
from marsopt.rules.registry import named


def label(groups: Sequence[Mapping[str, Any]], number: int, index: int) -> str:
    """Return what a parameter is called in messages."""
    group = groups[number]
    if "param_names" in group:
        return f"parameter {group['param_names'][index]!r}"
    return f"parameter {index} of group {number}"


def labels(groups: Sequence[Mapping[str, Any]]) -> list[tuple[Tensor, str]]:
    """Return all parameters with what they are called."""
    return [
        (p, label(groups, number, i))
        for number, group in enumerate(groups)
        for i, p in enumerate(group["params"])
    ]


def described(groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """Return what has to be the same on all ranks: not the parameters, lr, mode."""
    told = [
        {k: str(v) for k, v in group.items() if k not in ("params", "lr", TRAIN_MODE)}
        for group in groups
    ]
    return repr((told, {k: v for k, v in options.items() if k != "collectives"}))


def check_once(groups: Sequence[dict[str, Any]], new: dict[str, Any]) -> None:
    """Check that no tensor of the ``new`` group is there already, or twice in it.

    Raises:
        ValueError: one is, and by which name.
    """
    if not isinstance(new, dict) or isinstance(params := new["params"], set):
        return  # torch.optim refuses what it does not take
    check_no_module(params)
    new["params"] = params = [params] if isinstance(params, Tensor) else list(params)
    first = {id(p): what for p, what in labels(groups)}
    for i, given in enumerate(params):
        name, p = given if isinstance(given, tuple) else (None, given)
        check_no_module(p)
        what = f"parameter {i} of group {len(groups)}" if name is None else repr(name)
        if id(p) in first:
            before = first[id(p)]
            both = before if before == what else f"{before} and {what}"
            raise ValueError(
                f"got parameter {both.removeprefix('parameter ')} twice, expected "
                "once: list every tensor once, as model.parameters() does for tied "
                "weights too"
            )
        first[id(p)] = what


def check_no_module(given: Any) -> None:
    """Check that ``given`` is no module: its elements, if it has any, are modules, but
    for those of a ParameterList, which torch.optim takes too.

    Raises:
        TypeError: it is one.
    """
    if isinstance(given, nn.Module) and not isinstance(given, nn.ParameterList):
        raise TypeError(
            f"got a module ({type(given).__name__}), expected tensors: pass its "
            ".parameters() or .named_parameters()"
        )


def misspelt(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    """Yield what to say of keys that are nearly ours. All others belong to other tools,
    which keep numbers of their own in param groups ("initial_lr", "swa_lr").
    """
    ours = {*defaults, *MATRICES, "base_lr", "gamma_1d", "nesterov", "adjust_lr_fn"}
    for key in {key for key in group if isinstance(key, str)} - ours:
        for near in get_close_matches(key, ours, n=1, cutoff=0.85):
            yield (
                f"a param group has the key {key!r}, which is not read; if {near!r} "
                "was meant, spell it so"
            )


def admit(groups: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> None:
    """Check the last of ``groups`` and note its ``base_lr``.

    Args:
        groups: the optimizer's, the new one among them.
        options: what the optimizer was built with.

    Raises:
        TypeError, ValueError: hyperparameters out of their range, other options of the
            whole optimizer in a group, tensors that no rule can move, or that share
            memory.
    """
    group = groups[-1]
    _check_options(group, options)
    checks.at_least_zero("lr", group["lr"])
    if "base_lr" not in group:
        group["base_lr"] = float(group["lr"])  # of a tensor: waits for its device
    check_group(group, options)
    check_matrices(groups, options)
    # later changes of a tensor would not be seen without a sync
    unseen = group["base_lr"] == 0 and isinstance(group["lr"], Tensor)
    if unseen and has_two_rates(group, options):
        raise ValueError(
            f"got lr=0 as a tensor for a group with lr_1d={group['lr_1d']}, expected a "
            "base rate, which lr_1d is measured against: add the group with its peak "
            "lr, or give it base_lr"
        )
    device = next((p.device for g in groups for p in g["params"]), None)
    for i, p in enumerate(group["params"]):
        what = label(groups, len(groups) - 1, i)
        _check(p, what, device, options)
    local = options["collectives"].local
    check_apart([(local(p), what) for p, what in labels(groups)])


def has_two_rates(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return whether tensors of a group have the rate lr_1d, and it is not lr."""
    routing = route({**options, **group})
    return (
        routing.own_rate
        and group["base_lr"] != group["lr_1d"]
        and any(not routing.matrix.matrices.takes(p.shape) for p in group["params"])
    )


def revived(
    before: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield what to say of values for vectors that a checkpoint brings to a rule which
    has none by default: earlier versions saved them for every rule, and did not read
    them.
    """
    for old, new in zip(before, loaded, strict=True):
        own = named(new["mars_type"]).hyperparameters
        found = [
            f"{name}={new[name]}"
            for name in FOLLOWED
            if own[name] is None and old[name] is None and new[name] is not None
        ]
        if found:
            yield (
                f"the state dict brings {', '.join(found)} to {new['mars_type']!r}: "
                "they hold for tensors that are not matrices. Where they were saved by "
                "an earlier version, which ignored them, set them to None in the group"
            )


def check_matrices(
    groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> None:
    """Check that parameters are made of the matrices that their groups name.

    Raises:
        ValueError: the rows of one do not divide.
    """
    for number, group in enumerate(groups):
        if group.get("block_rows") is None:
            continue
        matrices = route({**options, **group}).matrix.matrices
        for i, p in enumerate(group["params"]):
            matrices.check(p.shape, label(groups, number, i))


def _check_options(group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    ns: NewtonSchulz = options["ns"]
    parts = dict(
        ns_steps=ns.steps,
        ns_coefficients=ns.coefficients,
        ns_dtype=ns.dtype,
        ns_gram=ns.gram,
    )
    own = {**options, **parts}
    # an equal one changes nothing: SAM and ZeRO pass options here as well; max_norm is
    # refused, since ZeRO's parts would each be clipped by a norm of their own
    foreign = sorted(
        key
        for key in set(group) & set(own)
        if key == "max_norm" or group[key] != own[key]
    )
    if foreign:
        raise ValueError(
            f"got {foreign} in a param group, expected them for the whole optimizer: "
            "pass them to MARS itself"
        )


def _check(
    p: Tensor, what: str, device: torch.device | None, options: Mapping[str, Any]
) -> None:
    check_parameter(p, what, options["state_dtype"])
    if p.device.type == "meta":
        raise ValueError(
            f"got {what} on the meta device, expected real storage: build MARS after "
            "model.to_empty(...)"
        )
    if p.device != device:
        raise ValueError(
            f"got {what} on {p.device}, expected {device}, where the first parameter "
            "is: use one MARS per device"
        )
    # raises for a sharded parameter without collectives
    options["collectives"].local(p)
