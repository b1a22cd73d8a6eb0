"""The authors' routing of whole models: matrices by a named rule, the rest by AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from marsopt.functional.rule import Rule
from marsopt.rules import checks
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.checks import Number
from marsopt.rules.correction import Approximate, Correction
from marsopt.rules.decay import Decay, Weight
from marsopt.rules.hyperparameters import (
    Hyperparameter,
    Table,
    arguments,
    check_fields,
    check_values,
    number,
    structure,
    table,
)
from marsopt.rules.matrices import Matrices
from marsopt.rules.preconditioner import Preconditioner
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
    """Which rules move a model, and the options that no single rule has.

    Args:
        mars_type: a name in ``marsopt.REGISTRY``: the rule of matrices. The elementwise
            baselines "adamw", "nadamw" and "lion" move every tensor.
        lr: learning rate of matrices; ``marsopt.mars`` has none, as each step is given
            its own.
        base_lr: the peak learning rate that ``lr_1d`` is measured against.
        optimize_1d: give tensors that are not matrices to the MARS rule too (with
            matrix rules: to MARS-AdamW), with its hyperparameters.
        lr_1d: learning rate of tensors that are not matrices, times the step's lr /
            base_lr, so that it follows the schedule. None = the rule's own: lr itself,
            or the authors' 3e-3.
        betas_1d: betas of tensors that are not matrices. None = the rule's own: betas
            themselves, or the authors' (0.9, 0.95).
        weight_decay_1d: weight decay of tensors that are not matrices. None = the
            rule's own: weight_decay itself, or the authors' 0.1.
        nesterov_1d: ``nesterov`` of tensors that are not matrices. None = off in AdamW
            beside a matrix rule, else nesterov itself.
        is_approx: False = exact MARS; True = what ``correction`` says.
        correction: "approximate" or "exact", in place of ``is_approx``. None = what
            ``is_approx`` says. Baselines, and the AdamW beside a rule, take none.
        max_norm: threshold of the global gradient norm, as in ``Rule``.
        state_dtype: dtype of the state, as in ``Algorithm``.
        stochastic_rounding: round state of bfloat16 at random, as in ``Algorithm``.
    """

    mars_type: str = "mars-adamw"
    lr: Number = number(3e-3, checks.at_least_zero)
    base_lr: Number = number(3e-3, checks.at_least_zero)
    optimize_1d: bool = False
    lr_1d: Number | None = number(None, checks.none_or(checks.at_least_zero))
    betas_1d: tuple[Decay, Decay] | None = number(None, checks.none_or(checks.betas))
    weight_decay_1d: Number | None = number(None, checks.none_or(checks.at_least_zero))
    nesterov_1d: Weight | None = number(None, checks.none_or(checks.gradient_weight))
    is_approx: bool = structure(True, whole=True)
    correction: str | None = structure(None, whole=True)
    max_norm: Number | None = structure(None, checks.positive_or_none, whole=True)
    state_dtype: torch.dtype | None = structure(
        None, checks.state_dtype_or_none, whole=True
    )
    stochastic_rounding: bool = structure(False, whole=True)

    def __post_init__(self) -> None:
        check_fields(self)


@cache
def shared_hyperparameters(correction: type[Correction]) -> Table:
    """Return the hyperparameters that every param group has with this correction."""
    return {**table(Choice), **table(Matrices), **table(correction), **FALLBACK_TABLE}


@cache
def hyperparameters_of(
    preconditioner: type[Preconditioner], correction: type[Correction]
) -> Table:
    """Return the hyperparameters of a rule's param groups: one momentum is a part of
    ``betas`` there.
    """
    lines = {n: line for n, line in table(preconditioner).items() if line.beta is None}
    return {**shared_hyperparameters(correction), **lines}


def all_hyperparameters() -> Table:
    """Return what ``mars`` and ``MARS`` take: the hyperparameters of all rules and
    corrections. A default that rules do not share is None: each rule's own.
    """
    preconditioners = dict.fromkeys(row.preconditioner for row in REGISTRY.values())
    return _all_hyperparameters(tuple(preconditioners), tuple(CORRECTIONS.values()))


@cache
def _all_hyperparameters(
    preconditioners: tuple[type[Preconditioner], ...],
    corrections: tuple[type[Correction], ...],
) -> Table:
    lines: dict[str, Hyperparameter] = {}
    for correction in (*corrections, Correction):
        lines |= shared_hyperparameters(correction)
    shared = lines.keys() - {"betas", "weight_decay"}  # whose defaults rules share
    for preconditioner in preconditioners:
        for name, line in table(preconditioner).items():
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
        ValueError: one is of other rules or corrections.
    """
    suitable = hyperparameters_of(row.preconditioner, correction)
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
    return rules + [n for n, kind in CORRECTIONS.items() if name in table(kind)]


def route(values: Mapping[str, Any]) -> Rule:
    """Return the rule behind ``values["mars_type"]``, from hyperparameters by the names
    that ``mars`` has. A name that is left out has the rule's default; None for a name
    that ends in ``_1d`` is lr, betas or weight_decay. Its ``rest_ratio`` is ``lr_1d``,
    over a ``base_lr`` of 1.

    Raises:
        ValueError: an unknown type, ``optimize_1d`` for a baseline, a hyperparameter
            that the rule does not have, or that is out of its range.
    """
    choice = Choice(**arguments(Choice, values))
    row = named(choice.mars_type)
    kind = correction_named(resolve(choice.is_approx, choice.correction))
    check_suits(row, kind, {n: v for n, v in values.items() if v is not None})
    known = {n: line for n, line in all_hyperparameters().items() if line.is_whole}
    known |= hyperparameters_of(row.preconditioner, kind)
    check_values(known, values)  # whether they are read or not
    if choice.optimize_1d and not row.is_mars:
        raise ValueError(
            f"got optimize_1d=True with mars_type={row.name!r}, expected a MARS type: "
            "a baseline corrects nothing, leave optimize_1d False"
        )
    correction = kind(**arguments(kind, values))
    matrices = Matrices(**arguments(Matrices, values))
    common: dict[str, Any] = dict(
        state_dtype=choice.state_dtype,
        stochastic_rounding=choice.stochastic_rounding,
        correction=correction if row.is_mars else None,
    )

    def algorithm(row: NamedRule, numbers: Mapping[str, Any], **more: Any) -> Algorithm:
        return row.algorithm(**arguments(row.preconditioner, numbers), **more)

    def rule(rest: Algorithm | None, ratio: Number | None = None) -> Rule:
        matrix = algorithm(row, values, **common, matrices=matrices)
        bound = choice.max_norm
        return Rule(matrix=matrix, rest=rest, rest_ratio=ratio, max_norm=bound)

    adamw = named("adamw")
    of_adamw = {name: values[name] for name in FALLBACK_TABLE if name in values}
    if choice.optimize_1d:
        everywhere = dict(**common, matrices=matrices)
        is_needed = row.matrix_only
        return rule(algorithm(adamw, of_adamw, **everywhere) if is_needed else None)
    apart = [name for name in BESIDE if values.get(name) is not None]
    if row.fallback == "itself" and not apart:
        return rule(None)
    numbers = {BESIDE[name]: values[name] for name in apart}
    beside = common | dict(correction=None)  # the AdamW beside a rule is plain
    if row.fallback == "itself":
        rest = algorithm(row, {**values, **numbers}, **beside)
    else:
        numbers |= {"epsilon_hat": True} if row.fallback == "adamw" else {}
        rest = algorithm(adamw, {**of_adamw, **numbers}, **beside)
    return rule(rest, choice.lr_1d)
