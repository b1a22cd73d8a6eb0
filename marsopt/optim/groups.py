"""Param groups: the values of the constructor, defaults, validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from marsopt.functional.buffers import check_overlap, check_parameter
from marsopt.functional.routing import (
    Rest,
    algorithm_of,
    all_hyperparameters,
    check_suits,
    hyperparameters_of,
    of_matrices,
    of_rest,
    ratio_of,
    shared_hyperparameters,
)
from marsopt.optim.state_dict import State
from marsopt.rules import checks
from marsopt.rules.matrices import Matrices
from marsopt.rules.options import (
    Option,
    Table,
    arguments,
    check_values,
    options_of,
)
from marsopt.rules.registry import FOLLOWED, correction_named, named, resolve

# Every group has the authors' structure as keys, at its defaults too. Other structure
# is a key only if it differs from its default.
AUTHORS_STRUCTURE = frozenset({"mars_type", "amsgrad", "epsilon_hat"})
# The keys of a group for tensors that are not matrices.
OF_REST = frozenset(options_of(Rest))
OF_TENSORS = ("params", "param_names")
WHOLE = {n for n, line in all_hyperparameters().items() if line.is_whole}
WHOLE |= {"collectives", "compile", "nonfinite"}


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


def moves(p: Tensor, state: State) -> bool:
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
    return next((p.device for p in params if moves(p, state)), None)


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


def group_table(group: Mapping[str, Any], options: Mapping[str, Any]) -> Table:
    """Return the hyperparameters that a group has, of the whole optimizer's too.

    Args:
        group: says its ``mars_type``.
        options: the constructor's options, the correction by name.

    Raises:
        ValueError: it does not say it.
    """
    if "mars_type" not in group:
        raise ValueError(
            f"got a param group of {sorted(map(str, group))}, expected 'mars_type' and "
            "all hyperparameters: add_param_group completes a new group"
        )
    preconditioner = named(group["mars_type"]).preconditioner
    correction = correction_named(options["correction"])
    return {**hyperparameters_of(preconditioner, correction), **options_of(Rest)}


def checked_table(group: Mapping[str, Any], options: Mapping[str, Any]) -> Table:
    """Return ``group_table``, after a check of the values that a complete group has.

    Raises:
        ValueError: one is out of its range, or there is no lr or ``mars_type``.
    """
    known = group_table(group, options)
    check_values(known, {"lr": None, **group})
    return known


class ConstructorValues(NamedTuple):
    """The constructor's arguments, sorted by scope."""

    whole: dict[str, Any]  # of the whole optimizer
    inherited: dict[str, Any]  # of every group with a rule that has them
    defaults: dict[str, Any]  # torch.optim's: of every group, for the rule's own type


def constructor_values(arguments: Mapping[str, Any]) -> ConstructorValues:
    """Sort the constructor's arguments by scope; None means the rule's default.

    Args:
        arguments: all hyperparameters among them, the defaults of the signature too.

    Raises:
        ValueError: an unknown rule or correction, or a hyperparameter that neither has.
    """
    known = all_hyperparameters()
    arguments = {n: checks.plain(value) for n, value in arguments.items()}
    row = named(arguments["mars_type"])
    name = resolve(arguments["is_approx"], arguments["correction"])
    correction = correction_named(name)
    explicit = {n: value for n, value in arguments.items() if value is not None}
    check_suits(row, correction, explicit)
    lines = {**hyperparameters_of(row.preconditioner, correction), **options_of(Rest)}
    check_values(lines, explicit)
    whole = {n: value for n, value in arguments.items() if known[n].is_whole}
    explicit = {n: value for n, value in explicit.items() if n not in whole}
    # structure that is as usual is a key of no group
    usual = {n for n, v in explicit.items() if _is_usual(known[n], v)}
    inherited = {n: v for n, v in explicit.items() if n not in usual}
    inherited["mars_type"] = row.name
    shared = shared_hyperparameters(correction)
    defaults = {n: line.default for n, line in shared.items() if _is_key(line)}
    defaults |= {n: v for n, v in arguments.items() if n in defaults}
    own = row.hyperparameters | row.log_time_defaults(arguments.get("log_time"))
    defaults |= {n: v for n, v in {**own, **inherited}.items() if n in defaults}
    whole["correction"] = name
    return ConstructorValues(whole, inherited, defaults)


def _is_usual(line: Option, value: Any) -> bool:
    return not line.is_number and not _is_key(line) and value == line.default


def _is_key(line: Option) -> bool:
    """Return whether every group has a hyperparameter that rules share, and with it a
    checkpoint.
    """
    return not line.is_whole and (line.is_number or line.name in AUTHORS_STRUCTURE)


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
    for name in all_hyperparameters().keys() & group.keys():
        group[name] = checks.plain(group[name])
    inherited = options["inherited"]
    row = named(group.get("mars_type", inherited["mars_type"]))
    group["mars_type"] = row.name
    known = group_table(group, options)
    following = {name: None for name, of in FOLLOWED.items() if of in group}
    if "lr_1d_ratio" in group:
        following["lr_1d"] = None
    missing = {**row.hyperparameters, **inherited}
    if row.name == inherited["mars_type"]:
        missing |= {n: defaults[n] for n in missing if n in defaults}
    grown = row.log_time_defaults(group.get("log_time", inherited.get("log_time")))
    missing |= {n: v for n, v in grown.items() if n not in inherited} | following
    # in one order everywhere
    filled = [name for name in missing if name in known and name not in group]
    group.update({name: missing[name] for name in filled})


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
    checked_table(group, options)
    lr_1d, base_lr = group.pop("lr_1d", None), group.pop("base_lr", None)
    takes = Matrices(**arguments(Matrices, group)).takes
    params = group["params"]
    entries = [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in params]
    has_rest = not all(isinstance(p, Tensor) and takes(p.shape) for p in entries)
    if lr_1d is not None and has_rest:
        group["lr_1d_ratio"] = ratio_of(lr_1d, base_lr, group)
    values_of(group, is_matrix=False)  # refuses options that do not go together
    unused: Set[str] = OF_REST
    if has_rest and group.get("optimize_1d"):
        unused = OF_REST - {"optimize_1d"}
    elif has_rest:
        unused = {n for n in OF_REST if group.get(n) is None or group[n] is False}
    for name in unused & group.keys():
        del group[name]


def values_of(group: Mapping[str, Any], is_matrix: bool) -> dict[str, Any]:
    """Return the hyperparameters of a group's matrices or of its other tensors, by the
    names of a group with one kind of tensors.
    """
    values = _without_tensors(group)
    rest = None if is_matrix else of_rest(values)
    return of_matrices(values) if rest is None else rest


def _without_tensors(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group, without its tensors."""
    return {key: value for key, value in group.items() if key not in OF_TENSORS}


def kinds_of(group: Mapping[str, Any]) -> list[bool]:
    """Return of each tensor of a group whether it takes the numbers of matrices: it is
    a matrix, or the rule of the group takes every tensor.
    """
    values = _without_tensors(group)
    takes = Matrices(**arguments(Matrices, values)).takes
    kinds = [takes(p.shape) for p in group["params"]]
    if not all(kinds) and of_rest(values) is None:
        kinds = [True] * len(kinds)
    return kinds


def check_structure(group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check a group, before its formulas are chosen.

    Raises:
        ValueError: a value out of its range; a hyperparameter that is no number is a
            tensor; an option that a group has only until it is added, or that is the
            whole optimizer's.
    """
    if not WHOLE.isdisjoint(group):
        _check_options(group, options)
    check_direction(group)
    if given := sorted({"lr_1d", "base_lr"} & group.keys()):
        raise ValueError(
            f"got {given} in a param group, expected them where a group is added: "
            "write lr_1d_ratio, a share of the group's lr"
        )
    for name, line in group_table(group, options).items():
        if not line.is_number and isinstance(group.get(name), Tensor):
            raise ValueError(
                f"got {name} of a param group as a tensor, expected a value of Python: "
                "formulas depend on it, pass no tensor"
            )
    checked_table(group, options)


def check_group(group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check a group's hyperparameters.

    Raises:
        ValueError: one is out of its range.
    """
    check_direction(group)
    checked_table(group, options)
    rates = [checks.plain(group[n]) for n in ("lr", "lr_ratio") if n in group]
    checks.at_least_zero("lr * lr_ratio", prod(rates))
    for is_matrix in (True, False):
        algorithm_of({**options, **values_of(group, is_matrix)})


def check_direction(group: Mapping[str, Any]) -> None:
    """Check that a group is minimized.

    Raises:
        ValueError: torch.optim's "maximize" asks for the opposite.
    """
    if group.get("maximize"):
        raise ValueError(
            "got maximize=True in a param group, expected False: negate the loss"
        )


def validate_group(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Check the hyperparameters of a new group.

    Args:
        group: the new group.
        options: the constructor's options.

    Raises:
        TypeError, ValueError: hyperparameters out of their range, or other options of
            the whole optimizer in a group.
    """
    _check_options(group, options)
    check_group(group, options)


def check_parameters(
    groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any], state: State
) -> torch.device | None:
    """Check the parameters that take part in steps. Other parameters may be anything:
    quantized, on another device, without memory.

    Returns:
        The device of those.

    Raises:
        ValueError: a tensor that no rule can move, the rows of a matrix do not divide,
            or two share memory.
    """
    device, pieces = device_of(groups, state), {}  # by parameter: a group may repeat
    for number, group in enumerate(groups):
        matrices = Matrices(**arguments(Matrices, group))
        for i, p in enumerate(group["params"]):
            if moves(p, state):
                what = label(groups, number, i)
                matrices.check(p.shape, what)
                pieces[p] = _movable(p, what, device, options), what
    check_overlap(list(pieces.values()))
    return device


def _check_options(group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    known = all_hyperparameters()
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
    """Return this process's piece of a parameter that a rule can move.

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
