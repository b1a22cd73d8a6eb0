"""Param groups: the values of the constructor, defaults, validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from marsopt.functional.authors import (
    OPTIMIZER,
    REST,
    all_options,
    check_options,
    group_options,
    matrix_values,
    ratio_of,
    rest_values,
)
from marsopt.functional.buffers import check_overlap, check_parameter
from marsopt.optim.state_dict import State
from marsopt.rules import checks
from marsopt.rules.matrices import Matrices
from marsopt.rules.options import OptionTable, arguments, check_values, options_of
from marsopt.rules.registry import (
    FALLBACK_TABLE,
    FOLLOWED,
    correction_named,
    named,
    resolve,
)

# Every group has the authors' structure as keys, at its defaults too. Other structure
# is a key only if it differs from its default.
AUTHORS_STRUCTURE = frozenset({"mars_type", "amsgrad", "epsilon_hat"})
OF_TENSORS = ("params", "param_names")


def label(groups: Sequence[Mapping[str, Any]], number: int, index: int) -> str:
    """Return a parameter's name in messages."""
    names = groups[number].get("param_names", ())
    if index < len(names):  # a parameter that was appended later has none
        return f"parameter {names[index]!r}"
    return f"parameter {index} of group {number}"


def labels(groups: Sequence[Mapping[str, Any]]) -> list[tuple[Tensor, str]]:
    """Return all parameters with their names in messages."""
    return [
        (p, label(groups, number, i))
        for number, group in enumerate(groups)
        for i, p in enumerate(group["params"])
    ]


def takes_part(p: Tensor, state: State) -> bool:
    """Return whether a parameter takes part in steps: a frozen parameter, whatever it
    is, asks for no rule and no state before its first gradient.
    """
    return p.requires_grad or p.grad is not None or "step" in state.get(p, ())


def device_of(groups: Sequence[Mapping[str, Any]], state: State) -> torch.device | None:
    """Return the device of the first parameter that takes part in steps, if one does:
    all of them share it.
    """
    for group in groups:
        check_params(group)
    params = (p for group in groups for p in group["params"])
    return next((p.device for p in params if takes_part(p, state)), None)


def configuration(
    groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> dict[str, str]:
    """Return the values that all ranks share, by their names in errors: forms of
    parameters, and values of groups and options; of no tensor, for that would sync.
    """
    apart = ("params", "param_names", "collectives")
    forms = {
        name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
        for p, name in labels(groups)
    }
    named = {
        f"{key} of group {i}": value
        for i, group in enumerate(groups)
        for key, value in group.items()
        if key not in apart
    }
    named |= {key: value for key, value in options.items() if key not in apart}

    def text(value: object) -> str:
        return "tensor" if isinstance(value, Tensor) else checks.shown(value)

    texts = {key: pytree.tree_map(text, value) for key, value in named.items()}
    return forms | {key: str(value).replace("'", "") for key, value in texts.items()}


def check_params(group: Mapping[str, Any]) -> None:
    """Check that a group has a list of parameters.

    Raises:
        ValueError: it has none.
    """
    if "params" not in group:
        raise ValueError(
            f"got a param group of {sorted(map(str, group))}, expected 'params' among "
            "these keys: put the group's tensors there"
        )


def check_once(groups: Sequence[dict[str, Any]], new: dict[str, Any]) -> None:
    """Check that no tensor of the ``new`` group is there already, or twice in it.

    Raises:
        ValueError: one is, with its name; or the group has no "params".
    """
    if isinstance(new, dict):
        check_params(new)
    if not isinstance(new, dict) or isinstance(params := new["params"], set):
        return  # torch.optim refuses them
    check_no_module(params)
    new["params"] = params = [params] if isinstance(params, Tensor) else list(params)
    ids = {id(entry[1] if isinstance(entry, tuple) else entry) for entry in params}
    present = {id(p) for group in groups for p in group["params"]}
    # labels only if one is needed: a model may have thousands of groups
    apart = len(ids) == len(params) and ids.isdisjoint(present)
    first = {} if apart else {id(p): what for p, what in labels(groups)}
    for i, entry in enumerate(params):
        name, p = entry if isinstance(entry, tuple) else (None, entry)
        check_no_module(p)
        what = f"parameter {i} of group {len(groups)}" if name is None else repr(name)
        if id(p) in first:
            before = first[id(p)]
            names = before if before == what else f"{before} and {what}"
            raise ValueError(
                f"got parameter {names.removeprefix('parameter ')} twice, expected "
                "once: list every tensor once, as model.parameters() does for tied "
                "weights too"
            )
        first[id(p)] = what


def check_no_module(value: Any) -> None:
    """Check that ``value`` is no module: its elements, if it has any, are modules, but
    for a ParameterList's, which torch.optim takes too.

    Raises:
        TypeError: it is a module.
    """
    if isinstance(value, nn.Module) and not isinstance(value, nn.ParameterList):
        raise TypeError(
            f"got a module ({type(value).__name__}), expected tensors: pass its "
            ".parameters() or .named_parameters()"
        )


def options_of_group(
    group: Mapping[str, Any], options: Mapping[str, Any]
) -> OptionTable:
    """Return the options that a group with a ``mars_type`` has, and the whole
    optimizer's.
    """
    preconditioner = named(group["mars_type"]).preconditioner
    return group_options(preconditioner, correction_named(options["correction"]))


def check_group(group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check the keys and values of a complete group.

    Args:
        group: the group, with all its hyperparameters.
        options: the constructor's options.

    Raises:
        ValueError: a value that is out of its range, of another rule, or not equal to
            the whole optimizer's; an option that a group has only until it is added; no
            ``mars_type``, no lr, or "maximize".
    """
    _check_whole(group, options)
    if group.get("maximize"):
        raise ValueError(
            "got maximize=True in a param group, expected False: negate the loss"
        )
    if late := sorted({"lr_1d", "base_lr"} & group.keys()):
        raise ValueError(
            f"got {late} in a param group, expected them where a group is added: "
            "write lr_1d_ratio, a share of the group's lr"
        )
    if "mars_type" not in group:
        raise ValueError(
            f"got a param group of {sorted(map(str, group))}, expected 'mars_type' and "
            "all hyperparameters: add_param_group completes a new group"
        )
    row, correction = named(group["mars_type"]), options["correction"]
    check_options(row, correction_named(correction), {"lr": None, **group})
    rates = [checks.plain(group[n]) for n in ("lr", "lr_ratio") if n in group]
    checks.at_least_zero("lr * lr_ratio", prod(rates))


def constructor_values(
    arguments: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort the constructor's arguments by scope; None means the rule's default.

    Args:
        arguments: options by name, the defaults of the signature among them.

    Returns:
        The options of the whole optimizer, with the correction by its name; among them
        "inherited", the options that a group takes if its rule has them. And
        torch.optim's defaults: the values of a group with the constructor's rule.

    Raises:
        ValueError: an unknown rule or correction, or an option that neither has.
    """
    known = all_options()
    arguments = {n: checks.plain(value) for n, value in arguments.items()}
    row = named(arguments["mars_type"])
    correction = resolve(arguments)
    explicit = {n: value for n, value in arguments.items() if value is not None}
    check_options(row, correction, explicit)
    whole = {n: value for n, value in arguments.items() if known[n].is_whole}
    # structure that is as usual is a key of no group
    inherited = {
        n: value
        for n, value in explicit.items()
        if n not in whole
        and (known[n].is_number or n in AUTHORS_STRUCTURE or value != known[n].default)
    }
    inherited["mars_type"] = row.name
    rule_defaults = row.group_defaults(arguments.get("log_time"))
    values = {**arguments, **rule_defaults, **inherited}
    shared = {**OPTIMIZER, **FALLBACK_TABLE, **options_of(correction)}
    defaults = {
        n: values.get(n, line.default)
        for n, line in shared.items()
        if n in AUTHORS_STRUCTURE or (line.is_number and not line.is_whole)
    }
    whole |= {"correction": correction.name, "inherited": inherited}
    return whole, defaults


def fill_defaults(
    group: dict[str, Any], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Fill in the hyperparameters that a new param group lacks: the constructor's
    value, else the rule's default. The group's lr, betas or weight_decay holds for
    everything in it, unless it gives the value that ends in ``_1d`` too.

    Args:
        group: as its user wrote it.
        options: of the whole optimizer, with the values that groups inherit from the
            constructor, its "mars_type" among them.
        defaults: the optimizer's, of that type: the rule's own but for arguments.

    Raises:
        ValueError: an unknown ``mars_type``.
    """
    for name in all_options().keys() & group.keys():
        group[name] = checks.plain(group[name])
    inherited = options["inherited"]
    row = named(group.get("mars_type", inherited["mars_type"]))
    group["mars_type"] = row.name
    known = options_of_group(group, options)
    following = {name: None for name, of in FOLLOWED.items() if of in group}
    if "lr_1d_ratio" in group:
        following["lr_1d"] = None
    missing = {**row.group_defaults(), **inherited}
    if row.name == inherited["mars_type"]:
        missing |= {n: defaults[n] for n in missing if n in defaults}
    grown = row.log_time_defaults(group.get("log_time", inherited.get("log_time")))
    missing |= {n: v for n, v in grown.items() if n not in inherited} | following
    for name, value in missing.items():
        if name in known:
            group.setdefault(name, value)


def complete_group(
    group: dict[str, Any], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Complete a new param group where it is: every hyperparameter of its matrices and,
    if it has other tensors with numbers of their own, these as ``lr_1d_ratio``,
    ``betas_1d``, ``weight_decay_1d`` and ``nesterov_1d``.

    Args:
        group: as its user wrote it.
        options, defaults: as ``fill_defaults`` has them.

    Raises:
        ValueError: as ``fill_defaults``; ``lr_1d`` beside a learning rate of zero.
    """
    fill_defaults(group, options, defaults)
    late = {name: group.pop(name, None) for name in ("lr_1d", "base_lr")}
    check_values(REST, late)
    check_group(group, options)
    takes = Matrices(**arguments(Matrices, group)).takes
    params = group["params"]
    entries = [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in params]
    has_rest = not all(isinstance(p, Tensor) and takes(p.shape) for p in entries)
    if late["lr_1d"] is not None and has_rest:
        group["lr_1d_ratio"] = ratio_of(late["lr_1d"], {**group, **late})
    used: set[str] = set()
    if has_rest:
        used = {n for n in REST if group.get(n) is not None and group[n] is not False}
    if "optimize_1d" in used:
        used = {"optimize_1d"}
    for name in REST.keys() & (group.keys() - used):
        del group[name]


def values_of(group: Mapping[str, Any], is_matrix: bool) -> dict[str, Any]:
    """Return the hyperparameters of a group's matrices or of its other tensors, by the
    names of a group with one kind of tensors.
    """
    values = {key: value for key, value in group.items() if key not in OF_TENSORS}
    rest = None if is_matrix else rest_values(values)
    return matrix_values(values) if rest is None else rest


def kinds_of(group: Mapping[str, Any]) -> list[bool]:
    """Return of each tensor of a group whether it takes the numbers of matrices: it is
    a matrix, or the rule of the group takes every tensor.
    """
    takes = Matrices(**arguments(Matrices, group)).takes
    kinds = [takes(p.shape) for p in group["params"]]
    if not all(kinds) and rest_values(group) is None:
        kinds = [True] * len(kinds)
    return kinds


def check_parameters(
    groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any], state: State
) -> torch.device | None:
    """Check the parameters that take part in steps. Other parameters may be anything:
    quantized, on another device, without memory.

    Returns:
        The device of those.

    Raises:
        ValueError: a tensor that no rule can update, the rows of a matrix do not
            divide, or two share memory.
    """
    device, pieces = device_of(groups, state), {}  # by parameter: a group may repeat
    for number, group in enumerate(groups):
        matrices = Matrices(**arguments(Matrices, group))
        for i, p in enumerate(group["params"]):
            if takes_part(p, state):
                what = label(groups, number, i)
                matrices.check(p.shape, what)
                pieces[p] = _movable(p, what, device, options), what
    check_overlap(list(pieces.values()))
    return device


def _check_whole(group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    known = all_options()
    whole = {name: line.default for name, line in known.items() if line.is_whole}
    whole |= options
    # an equal one changes nothing: SAM and ZeRO pass options here as well; max_norm is
    # refused, since ZeRO's parts would each be clipped by a norm of their own
    foreign = sorted(
        key
        for key in set(group) & set(whole)
        if key == "max_norm"
        or isinstance(group[key], Tensor)  # comparing it makes a tensor
        or group[key] != whole[key]
    )
    if foreign:
        raise ValueError(
            f"got {foreign} in a param group, expected them for the whole optimizer: "
            "pass them to MARS itself"
        )


def _movable(
    p: Tensor, what: str, device: torch.device | None, options: Mapping[str, Any]
) -> Tensor:
    """Return this process's piece of a parameter that a rule can update.

    Raises:
        ValueError: none can.
    """
    try:
        piece: Tensor = options["collectives"].local(p)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    rounds = options.get("stochastic_rounding", False)
    bits = options.get("master_weight_bits")
    check_parameter(p, what, options["state_dtype"], rounds, bits)
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
    return piece
