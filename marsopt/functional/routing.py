"""The authors' routing of whole models: matrices by a named rule, the rest by AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.checks import Number, Weight
from marsopt.rules.component import (
    Algorithm,
    Correction,
    MasterBits,
    Preconditioner,
)
from marsopt.rules.mars import Approximate
from marsopt.rules.matrices import Matrices
from marsopt.rules.options import (
    Option,
    Table,
    arguments,
    check_fields,
    check_values,
    number,
    options_of,
    structure,
)
from marsopt.rules.registry import (
    BESIDE,
    CORRECTIONS,
    FALLBACK_TABLE,
    REGISTRY,
    NamedRule,
    correction_named,
    named,
    resolve,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """Which rule moves tensors, and the options that no single rule has.

    Args:
        mars_type: a name in ``marsopt.REGISTRY``: the rule of matrices. The elementwise
            baselines "adamw", "nadamw" and "lion" move every tensor.
        lr: learning rate; ``marsopt.mars`` has none, as each step is given its own.
        lr_ratio: of a param group: the learning rate of its tensors over ``lr``, which
            schedules may write into every group.
        is_approx: False = exact MARS; True = as ``correction`` says.
        correction: "approximate" or "exact", in place of ``is_approx``. None = as
            ``is_approx`` says. Baselines take none.
        max_norm: threshold of the global gradient norm, as in ``Rule``.
        state_dtype: dtype of the state, as in ``Algorithm``.
        stochastic_rounding: round state of bfloat16 at random, as in ``Algorithm``.
        master_weight_bits: 32 or 24: bits of the weights of bfloat16 parameters, as in
            ``Algorithm``.
    """

    mars_type: str = "mars-adamw"
    lr: Number = number(3e-3, checks.at_least_zero)
    lr_ratio: Number = number(1.0, checks.at_least_zero)
    is_approx: bool = structure(True, whole=True)
    correction: str | None = structure(None, whole=True)
    max_norm: Number | None = structure(None, checks.positive_or_none, whole=True)
    state_dtype: torch.dtype | None = structure(
        None, checks.state_dtype_or_none, whole=True
    )
    stochastic_rounding: bool = structure(False, whole=True)
    master_weight_bits: MasterBits = structure(
        None, checks.master_bits_or_none, whole=True
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rest:
    """The options of tensors that are not matrices.

    Args:
        optimize_1d: give tensors that are not matrices to the MARS rule too (with
            matrix rules: to MARS-AdamW), with its hyperparameters.
        base_lr: the peak learning rate that ``lr_1d`` is measured against. None = the
            group's lr, 3e-3 in ``marsopt.mars``.
        lr_1d: learning rate of these tensors at the peak; it follows the schedule of
            lr. None = the rule's own: lr itself, or the authors' 3e-3.
        lr_1d_ratio: the same of a param group, as a share of its lr.
        betas_1d: their betas. None = the rule's own: betas themselves, or the authors'
            (0.9, 0.95), or 0.999 with ``log_time``.
        weight_decay_1d: their weight decay. None = the rule's own: weight_decay itself,
            or the authors' 0.1.
        nesterov_1d: their ``nesterov``. None = off in AdamW beside a matrix rule, or
            0.2 with ``log_time``, else nesterov itself.
    """

    optimize_1d: bool = False
    base_lr: Number | None = number(None, checks.none_or(checks.positive))
    lr_1d: Number | None = number(None, checks.none_or(checks.at_least_zero))
    lr_1d_ratio: Number | None = number(None, checks.none_or(checks.at_least_zero))
    betas_1d: tuple[Number, Number] | None = number(None, checks.none_or(checks.betas))
    weight_decay_1d: Number | None = number(None, checks.none_or(checks.at_least_zero))
    nesterov_1d: Weight | None = number(None, checks.none_or(checks.gradient_weight))

    def __post_init__(self) -> None:
        check_fields(self)


@cache
def shared_hyperparameters(correction: type[Correction]) -> Table:
    """Return the hyperparameters that every param group has with this correction."""
    return {
        **options_of(Choice),
        **options_of(Matrices),
        **options_of(correction),
        **FALLBACK_TABLE,
    }


@cache
def hyperparameters_of(
    preconditioner: type[Preconditioner], correction: type[Correction]
) -> Table:
    """Return the hyperparameters of a rule's param groups: one momentum is a part of
    ``betas`` there.
    """
    lines = {
        n: line for n, line in options_of(preconditioner).items() if line.beta is None
    }
    return {**shared_hyperparameters(correction), **lines}


def all_hyperparameters() -> Table:
    """Return the options of ``mars`` and ``MARS``: the hyperparameters of all rules and
    corrections. A default that rules do not share is None: each rule's own.
    """
    preconditioners = dict.fromkeys(row.preconditioner for row in REGISTRY.values())
    return _all_hyperparameters(tuple(preconditioners), tuple(CORRECTIONS.values()))


@cache
def _all_hyperparameters(
    preconditioners: tuple[type[Preconditioner], ...],
    corrections: tuple[type[Correction], ...],
) -> Table:
    lines: dict[str, Option] = {}
    for correction in (*corrections, Correction):
        lines |= shared_hyperparameters(correction)
    lines |= options_of(Rest)
    shared = lines.keys() - {"betas", "weight_decay"}  # rules share their defaults
    for preconditioner in preconditioners:
        for name, line in options_of(preconditioner).items():
            if line.beta is not None or name in shared:
                continue
            without_default = line._replace(default=None, hint=line.hint | None)
            lines[name] = line if line.is_whole else without_default
    return lines


def check_suits(
    row: NamedRule, correction: type[Correction], values: Mapping[str, Any]
) -> None:
    """Check that a rule and a correction have the hyperparameters in ``values``.

    Raises:
        ValueError: another rule or correction has one of them.
    """
    suitable = {
        **hyperparameters_of(row.preconditioner, correction),
        **options_of(Rest),
    }
    known = all_hyperparameters()
    for name, value in values.items():
        if name in suitable or name not in known or known[name].is_whole:
            continue
        raise ValueError(
            f"got {name}={value!r} with mars_type={row.name!r}, expected None: it is "
            f"of {', '.join(rules_with(name))}; leave it out, or choose one of these"
        )


def check_taken(mars_types: Iterable[str], correction: str | None) -> None:
    """Check that one of the rules of a model takes the correction that was asked for. A
    baseline beside a MARS rule stays plain; and "approximate", the default, asks for
    nothing.

    Raises:
        ValueError: none does.
    """
    if correction in (None, Approximate.name):
        return
    kind, rows = correction_named(correction), [named(name) for name in mars_types]
    if any(row.is_mars for row in rows) or not rows:
        return
    raise ValueError(
        f"got correction={kind.name!r} with mars_type={rows[0].name!r}, expected None: "
        "a baseline corrects nothing, choose a MARS type "
        f"({', '.join(name for name, row in REGISTRY.items() if row.is_mars)})"
    )


def rules_with(name: str) -> list[str]:
    """Return the names of the rules and corrections that have a hyperparameter."""
    rules = [n for n, row in REGISTRY.items() if name in row.table]
    return rules + [n for n, kind in CORRECTIONS.items() if name in options_of(kind)]


# ---- the two kinds of tensors --------------------------------------------------------


def of_matrices(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of matrices: ``values`` without the options of
    ``Rest``.

    Args:
        values: hyperparameters of matrices and other tensors.

    Raises:
        ValueError: an unknown type, ``optimize_1d`` for a baseline, an option of
            ``Rest`` out of its range.
    """
    _rest_options(values)
    return {n: value for n, value in values.items() if n not in options_of(Rest)}


def of_rest(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the hyperparameters of tensors that are not matrices, with their
    ``lr_ratio``; None if the rule moves them by the same values as matrices.

    Args:
        values: as for ``of_matrices``, with the rule's defaults. None for a name that
            ends in ``_1d`` is lr, betas, weight_decay or nesterov.

    Raises:
        ValueError: as ``of_matrices``; ``lr_1d`` beside a learning rate of zero.
    """
    row, rest = _rest_options(values)
    own = of_matrices(values)
    if rest.optimize_1d:
        names = shared_by_adamw() | options_of(Matrices).keys()
        known = all_hyperparameters()
        kept = {n: v for n, v in own.items() if n in names or n not in known}
        return {**kept, "mars_type": "mars-adamw"} if row.matrix_only else None
    if row.fallback != "itself":
        return of_adamw(values)
    numbers = _numbers(rest, own)
    return {**own, **numbers} if numbers else None


def of_adamw(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of AdamW beside a rule, for tensors that are not
    matrices, and for embeddings; ``values`` is as for ``of_rest``.
    """
    row, rest = _rest_options(values)
    own = of_matrices(values)
    known, shared = all_hyperparameters(), shared_by_adamw()
    kept = {n: v for n, v in own.items() if n in shared or n not in known}
    adamw: dict[str, Any] = dict(mars_type="adamw", nesterov=False)
    adamw["epsilon_hat"] = row.fallback == "adamw" or own.get("epsilon_hat", False)
    return {**kept, **adamw, **_numbers(rest, own)}


def _numbers(rest: Rest, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that ``Rest`` gives, by the names of a param group."""
    numbers = {BESIDE[n]: getattr(rest, n) for n in BESIDE}
    numbers = {n: value for n, value in numbers.items() if value is not None}
    ratio = rest.lr_1d_ratio
    if "lr" in numbers:
        ratio = ratio_of(numbers.pop("lr"), rest.base_lr, own)
    if ratio is not None:
        numbers["lr_ratio"] = own.get("lr_ratio", 1.0) * ratio
    return numbers


def shared_by_adamw() -> set[str]:
    """Return the hyperparameters that AdamW beside a rule shares with it."""
    names = {*options_of(Choice), *FALLBACK_TABLE}
    return names.union(*map(options_of, CORRECTIONS.values()))


def _rest_options(values: Mapping[str, Any]) -> tuple[NamedRule, Rest]:
    row = named(values.get("mars_type", Choice.mars_type))
    rest = Rest(**arguments(Rest, values))
    if rest.optimize_1d and not row.is_mars:
        raise ValueError(
            f"got optimize_1d=True with mars_type={row.name!r}, expected a MARS type: "
            "a baseline corrects nothing, leave optimize_1d False"
        )
    return row, rest


def ratio_of(lr_1d: Number, base_lr: Number | None, own: Mapping[str, Any]) -> Number:
    """Return ``lr_1d`` as a share of the peak learning rate.

    Raises:
        ValueError: that is zero.
    """
    lr = own.get("lr", Choice.lr) if base_lr is None else base_lr
    base = float(lr.detach() if isinstance(lr, Tensor) else lr)  # waits for a device
    if base == 0:
        raise ValueError(
            f"got lr=0 with lr_1d={lr_1d!r}, expected a base learning rate, which "
            "lr_1d is measured against: add the group with its peak lr, or pass "
            "base_lr"
        )
    ratio = lr_1d / base
    checks.at_least_zero("lr_1d / base_lr", ratio)
    return ratio


def algorithm_of(values: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm that ``values["mars_type"]`` names, from hyperparameters by
    the names of param groups. A name that is left out has the rule's default.

    Raises:
        ValueError: an unknown type, a hyperparameter that the rule does not have, or
            that is out of its range.
    """
    choice = Choice(**arguments(Choice, values))
    row = named(choice.mars_type)
    kind = correction_named(resolve(choice.is_approx, choice.correction))
    check_suits(row, kind, {n: v for n, v in values.items() if v is not None})
    known = {n: line for n, line in all_hyperparameters().items() if line.is_whole}
    known |= hyperparameters_of(row.preconditioner, kind)
    check_values(known, values)  # whether they are read or not
    return assembled(row, kind, values)


def assembled(
    row: NamedRule, correction: type[Correction], values: Mapping[str, Any]
) -> Algorithm:
    """Return the algorithm of a rule. A baseline has no correction, but the
    correction's values are checked.
    """
    choice = Choice(**arguments(Choice, values))
    checked = correction(**arguments(correction, values))
    return row.algorithm(
        correction=checked if row.is_mars else None,
        state_dtype=choice.state_dtype,
        stochastic_rounding=choice.stochastic_rounding,
        master_weight_bits=choice.master_weight_bits,
        matrices=Matrices(**arguments(Matrices, values)),
        **arguments(row.preconditioner, values),
    )
