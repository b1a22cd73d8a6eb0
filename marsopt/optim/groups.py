"""Param groups: the values of the constructor, defaults, validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    shared_hyperparameters,
)
from marsopt.optim.state_dict import State
from marsopt.rules import checks
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.checks import Number
from marsopt.rules.hyperparameters import (
    Hyperparameter,
    Table,
    arguments,
    check_names,
    check_values,
    resembled,
    static,
    table,
)
from marsopt.rules.matrices import Matrices
from marsopt.rules.registry import FOLLOWED, correction_named, named, resolve

# Every group has the authors' structure as keys, at its defaults too. Other structure
# is a key only if it differs from its default.
AUTHORS_STRUCTURE = frozenset({"mars_type", "amsgrad", "epsilon_hat"})
# The keys that a group may give when it is added, and does not keep (``split_group``).
OF_REST = frozenset(table(Rest))
WHOLE = frozenset(n for n, line in all_hyperparameters().items() if line.is_whole)


def label(groups: Sequence[Mapping[str, Any]], number: int, index: int) -> str:
    """Return a parameter's name in messages."""
    group = groups[number]
    if "param_names" in group:
        return f"parameter {group['param_names'][index]!r}"
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
    params = (p for group in groups for p in group["params"])
    return next((p.device for p in params if moves(p, state)), None)


def configuration(
    groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> dict[str, str]:
    """Return the values that all ranks share, by their names in errors: forms of
    parameters, and values of groups and options; of no tensor, for that would sync.
    """
    apart = ("params", "param_names", "collectives")
    forms = {name: f"{tuple(p.shape)} {p.dtype}" for p, name in labels(groups)}
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


def check_once(groups: Sequence[dict[str, Any]], new: dict[str, Any]) -> None:
    """Check that no tensor of the ``new`` group is there already, or twice in it.

    Raises:
        ValueError: one is, with its name; or the group has no "params".
    """
    if isinstance(new, dict) and "params" not in new:
        raise ValueError(
            f"got a param group of {sorted(map(str, new))}, expected 'params' among "
            "these keys: put the group's tensors there"
        )
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


def check_keys(
    group: Mapping[str, Any], defaults: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Check that a new group has no misspelt hyperparameter. Keys that resemble none
    are other tools', and stay as in torch.optim.

    Raises:
        TypeError: a key resembles a hyperparameter, with its name.
    """
    known = {*defaults, *options, *all_hyperparameters()}
    strange = {
        key: value
        for key, value in group.items()
        if isinstance(key, str) and key not in known and resembled(key, known)
    }
    check_names(strange, known, "marsopt.MARS")


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
    return hyperparameters_of(preconditioner, correction_named(options["correction"]))


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
    arguments = {n: known[n].plain(value) for n, value in arguments.items()}
    row = named(arguments["mars_type"])
    name = resolve(arguments["is_approx"], arguments["correction"])
    correction = correction_named(name)
    explicit = {n: value for n, value in arguments.items() if value is not None}
    check_suits(row, correction, explicit)
    lines = {**hyperparameters_of(row.preconditioner, correction), **table(Rest)}
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


def _is_usual(line: Hyperparameter, value: Any) -> bool:
    return not line.is_number and not _is_key(line) and value == line.default


def _is_key(line: Hyperparameter) -> bool:
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
    for name, line in all_hyperparameters().items():
        if name in group:
            group[name] = line.plain(group[name])
    inherited = options["inherited"]
    row = named(group.get("mars_type", inherited["mars_type"]))
    group["mars_type"] = row.name
    known = group_table(group, options).keys() | OF_REST
    following = {name: None for name, of in FOLLOWED.items() if of in group}
    missing = {**row.hyperparameters, **inherited}
    if row.name == inherited["mars_type"]:
        missing |= {n: defaults[n] for n in missing if n in defaults}
    grown = row.log_time_defaults(group.get("log_time", inherited.get("log_time")))
    missing |= {n: v for n, v in grown.items() if n not in inherited} | following
    # in one order everywhere
    filled = [name for name in missing if name in known and name not in group]
    group.update({name: missing[name] for name in filled})


def split_group(group: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the param groups that a given group becomes, one for each algorithm; and
    of each of its tensors, the position in the list of all their tensors.

    Args:
        group: the given group, with all hyperparameters.

    Raises:
        ValueError: as ``of_matrices`` and ``of_rest``.
    """
    params = group["params"]
    entries = [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in params]
    if isinstance(params, set) or not all(isinstance(p, Tensor) for p in entries):
        return [dict(group)], []  # torch.optim refuses them
    aligned = {key: group[key] for key in ("params", "param_names") if key in group}
    values = {key: value for key, value in group.items() if key not in aligned}
    takes, own = Matrices(**arguments(Matrices, values)).takes, of_matrices(values)
    kinds = [takes(p.shape) for p in entries]
    rest = None if all(kinds) else of_rest(values)
    sides = [(own, [i for i, kind in enumerate(kinds) if kind or rest is None])]
    if rest is not None:
        sides.append((rest, [i for i, kind in enumerate(kinds) if not kind]))
    parts = [part for part in sides if part[1]] or sides
    order = [i for _, members in parts for i in members]
    groups = [
        {key: [column[i] for i in members] for key, column in aligned.items()} | numbers
        for numbers, members in parts
    ]
    return groups, sorted(range(len(order)), key=order.__getitem__)


def structure(group: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the static configuration of a group, which chooses formulas: every
    hyperparameter that is no number, and which numbers there are.

    Raises:
        ValueError: a hyperparameter that is no number is a tensor; an option that a
            group has only until it is added, or that is the whole optimizer's.
    """
    if not WHOLE.isdisjoint(group):
        _check_options(group, options)
    if not OF_REST.isdisjoint(group):
        raise ValueError(
            f"got {sorted(OF_REST & group.keys())} in a param group, expected them "
            "where a group is added, which they divide: the other tensors have a group "
            "of their own, write its lr_ratio, betas, weight_decay and nesterov"
        )
    values = {
        name: static(group.get(name)) if line.is_number else group.get(name)
        for name, line in group_table(group, options).items()
        if not line.is_whole
    }
    for name, value in values.items():
        if isinstance(value, Tensor):  # which equals nothing
            raise ValueError(
                f"got {name} of a param group as a tensor, expected a value of Python: "
                "formulas depend on it, pass no tensor"
            )
    return values


def check_group(group: Mapping[str, Any], options: Mapping[str, Any]) -> Algorithm:
    """Check a group's hyperparameters; return the algorithm that they name.

    Raises:
        ValueError: one is out of its range.
    """
    check_direction(group)
    return algorithm_of({**options, **group})


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
    learning_rate(group["lr"], group["lr_ratio"])


def learning_rate(lr: Number, lr_ratio: Number) -> Number:
    """Return the learning rate of a group's tensors.

    Raises:
        ValueError: it is no finite number >= 0.
    """
    rate = lr * lr_ratio
    checks.at_least_zero("lr * lr_ratio", rate)
    return rate


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
        matrix_only = named(group["mars_type"]).matrix_only
        for i, p in enumerate(group["params"]):
            if moves(p, state):
                what = label(groups, number, i)
                if matrix_only and not matrices.takes(p.shape):
                    raise ValueError(
                        f"got {what} of shape {tuple(p.shape)} in a group of "
                        f"{group['mars_type']!r}, expected {matrices.expected}: put it "
                        "into a group of another mars_type"
                    )
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
    check_parameter(
        p, what, options["state_dtype"], options.get("stochastic_rounding", False)
    )
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
