"""Param groups: the values of the constructor, defaults, validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from marsopt.functional.binding import check_parameter
from marsopt.functional.routing import (
    all_hyperparameters,
    check_suits,
    hyperparameters_of,
    route,
    shared_hyperparameters,
)
from marsopt.functional.rule import Rule
from marsopt.functional.stacks import check_overlap
from marsopt.optim.state_dict import TRAIN_MODE, State
from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction
from marsopt.rules.hyperparameters import Table, check_values, static
from marsopt.rules.registry import FOLLOWED, correction_named, named, resolve

# Every group has the authors' structure as keys, at its defaults too. Other structure
# is a key only where it differs from its default; these numbers are keys only where
# the caller passes them.
AUTHORS_STRUCTURE = frozenset({"mars_type", "optimize_1d", "amsgrad", "epsilon_hat"})
RARE_NUMBERS = frozenset({"base_lr", "gamma_1d", "nesterov_1d"})


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
    """Return whether a parameter takes part in steps: a frozen one, whatever it is,
    asks for no rule and no state before its first gradient.
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
    """Return what all ranks share, by its name in errors: forms of parameters, and
    values of groups and options; of tensors none, which would sync.
    """
    apart = ("params", "param_names", TRAIN_MODE, "collectives")
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
        ValueError: one is, and by which name; or the group has no "params".
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
    # labels only where one is needed: a model may have thousands of groups
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
        TypeError: it is one.
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
    explicit: dict[str, Any]  # all other arguments that are not None
    inherited: dict[str, Any]  # of every group whose rule has them
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
    check_values(hyperparameters_of(row.preconditioner, correction), explicit)
    whole = {n: value for n, value in arguments.items() if known[n].is_whole}
    explicit = {n: value for n, value in explicit.items() if n not in whole}
    of_rule, shared = row.hyperparameters, shared_hyperparameters(correction)
    inherited = {n: v for n, v in explicit.items() if n in of_rule or n not in shared}
    inherited["mars_type"] = row.name
    values = {n: line.default for n, line in shared.items() if line.is_number}
    values |= {**arguments, **of_rule, **inherited}
    present = _present(shared, arguments, correction)
    defaults = {n: value for n, value in values.items() if n in present}
    defaults |= {TRAIN_MODE: True} if correction.is_ahead else {}
    whole["correction"] = name
    return ConstructorValues(whole, explicit, inherited, defaults)


def _present(
    shared: Table, arguments: Mapping[str, Any], correction: type[Correction]
) -> set[str]:
    """Return which values every group has, and with it a checkpoint: numbers, and
    structure where it is not the default.
    """
    absent = {n for n in RARE_NUMBERS if arguments.get(n) is None}
    absent -= {"gamma_1d"} if correction.is_ahead else set()
    for name, line in shared.items():
        usual = not line.is_number and arguments.get(name, line.default) == line.default
        if line.is_whole or (usual and name not in AUTHORS_STRUCTURE):
            absent.add(name)
    return shared.keys() - absent


def fill_defaults(
    group: dict[str, Any], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> set[str]:
    """Fill in the hyperparameters that a new param group lacks: the constructor's
    value, else the rule's default. The group's lr, betas or weight_decay holds for
    everything in it, unless it gives the value that ends in ``_1d`` too.

    Args:
        group: as its user wrote it.
        options: of the whole optimizer; what groups inherit from the constructor is
            among them, with its "mars_type".
        defaults: the optimizer's, of that type: the rule's own but for arguments.

    Returns:
        The names of the values that are the rule's own defaults.

    Raises:
        ValueError: an unknown ``mars_type``.
    """
    for name, line in all_hyperparameters().items():
        if name in group:
            group[name] = line.plain(group[name])
    inherited = options["inherited"]
    row = named(group.get("mars_type", inherited["mars_type"]))
    group["mars_type"] = row.name
    known = group_table(group, options)
    following = {name: None for name, of in FOLLOWED.items() if of in group}
    missing = {**row.hyperparameters, **inherited, **following}
    if row.name == inherited["mars_type"]:
        missing |= {n: defaults[n] for n in missing if n in defaults} | following
    # in one order everywhere
    filled = [name for name in missing if name in known and name not in group]
    group.update({name: missing[name] for name in filled})
    return {name for name in filled if name not in inherited and name not in following}


def structure(group: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the static configuration of a group, on which formulas depend: every
    hyperparameter that is no number, and which numbers there are.

    Raises:
        ValueError: a hyperparameter that is no number is a tensor.
    """
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


def check_group(group: Mapping[str, Any], options: Mapping[str, Any]) -> Rule:
    """Check a group's hyperparameters; return the algorithms that they name.

    Raises:
        ValueError: one is out of its range.
    """
    check_direction(group)
    return route({**options, **group})


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
    """Check the hyperparameters of a new group and note its ``base_lr``.

    Args:
        group: the new one.
        options: the constructor's options.

    Raises:
        TypeError, ValueError: hyperparameters out of their range, or other options of
            the whole optimizer in a group.
    """
    _check_options(group, options)
    checks.at_least_zero("lr", group["lr"])
    if "base_lr" not in group:
        lr = group["lr"]
        group["base_lr"] = float(
            lr.detach() if isinstance(lr, Tensor) else lr
        )  # of a tensor: waits for its device
    check_group(group, options)
    if group.get("lr_1d") is not None and group["base_lr"] > 0:
        rate_1d(group["lr"], group["lr_1d"], group["base_lr"])
    # later changes of a tensor would not be seen without a sync
    unseen = group["base_lr"] == 0 and isinstance(group["lr"], Tensor)
    if unseen and has_two_rates(group, options):
        raise ValueError(
            f"got lr=0 as a tensor for a group with lr_1d={group['lr_1d']}, expected a "
            "base learning rate, which lr_1d is measured against: add the group with "
            "its peak lr, or give it base_lr"
        )


def rate_1d(lr: Number, lr_1d: Number, base_lr: Number) -> Number:
    """Return the learning rate of tensors that are not matrices, which follows the
    schedule of ``lr``.

    Raises:
        ValueError: the three give no finite number.
    """
    rate = lr * (lr_1d / base_lr)
    checks.at_least_zero("lr * lr_1d / base_lr", rate)
    return rate


def has_two_rates(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return whether tensors of a group have the rate lr_1d, and it is not lr."""
    rule = route({**options, **group})
    return (
        rule.rest_ratio is not None
        and group["base_lr"] != group["lr_1d"]
        and has_rest(group, rule)
    )


def has_rest(group: Mapping[str, Any], rule: Rule) -> bool:
    return any(side.is_rest for side in rule.sides(group["params"]))


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
        matrices = None
        if group.get("splits") is not None:
            matrices = route({**options, **group}).matrix.matrices
        for i, p in enumerate(group["params"]):
            if moves(p, state):
                what = label(groups, number, i)
                if matrices is not None:
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
        or isinstance(group[key], Tensor)  # whose comparison is a tensor
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
