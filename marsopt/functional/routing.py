"""The authors' routing of whole models: matrices by a named rule, the rest by AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.functional.binding import Side, sides
from marsopt.rules import checks
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction
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
from marsopt.rules.newton_schulz import NewtonSchulz
from marsopt.rules.preconditioner import Preconditioner
from marsopt.rules.registry import (
    CORRECTIONS,
    FALLBACK_TABLE,
    FOLLOWED,
    REGISTRY,
    NamedRule,
    correction_named,
    named,
    resolve,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """Which rules move a model, and the hyperparameters that are of no rule alone:
    ``RoutedOptions`` says what each of them is. ``lr`` is the learning rate.
    """

    mars_type: str = "mars-adamw"
    lr: Number = number(3e-3, checks.at_least_zero)
    base_lr: Number = number(3e-3, checks.at_least_zero)
    optimize_1d: bool = False
    lr_1d: Number | None = number(None, checks.none_or(checks.at_least_zero))
    betas_1d: tuple[Number, Number] | None = number(None, checks.none_or(checks.betas))
    weight_decay_1d: Number | None = number(None, checks.none_or(checks.at_least_zero))
    gamma_1d: Number | None = number(None, checks.none_or(checks.finite))
    is_approx: bool = structure(True, whole=True)
    correction: str | None = structure(None, whole=True)
    max_norm: Number | None = structure(None, checks.positive_or_none, whole=True)
    state_dtype: torch.dtype | None = structure(
        None, checks.floating_or_none, whole=True
    )
    stochastic_rounding: bool = structure(False, whole=True)

    def __post_init__(self) -> None:
        check_fields(self)


class Routing(NamedTuple):
    """Who moves what: the authors' routing."""

    matrix: Algorithm
    fallback: Algorithm | None  # None: ``matrix`` takes every tensor
    own_rate: bool = False  # whether the fallback has the rate lr_1d instead of lr
    own_gamma: bool = False  # whether the fallback takes gamma_1d instead of gamma

    def sides(self, params: Sequence[Tensor]) -> list[Side]:
        """Return who moves these tensors."""
        return sides(self.matrix, self.fallback, params, [p.shape for p in params])


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
            f"of {', '.join(owners(name))}; leave it out, or choose one of these"
        )


def check_taken(
    mars_types: Iterable[str], is_approx: bool, correction: str | None
) -> None:
    """Check that one of the rules of a model takes the correction that was asked for:
    a baseline beside a MARS rule may stay plain.

    Raises:
        ValueError: none does.
    """
    rows = [named(mars_type) for mars_type in mars_types]
    kind = correction_named(resolve(is_approx, correction))
    is_asked = correction is not None or not is_approx
    takes = kind.suits_baselines or any(row.is_mars for row in rows)
    if not is_asked or takes or not rows:
        return
    by_all = [name for name, other in CORRECTIONS.items() if other.suits_baselines]
    raise ValueError(
        f"got {correction=}, {is_approx=} with mars_type={rows[0].name!r}, expected "
        f"None, True or one of {by_all}: a baseline corrects nothing; choose a "
        f"MARS type ({', '.join(n for n, row in REGISTRY.items() if row.is_mars)})"
    )


def owners(name: str) -> list[str]:
    """Return the names of the rules and corrections that have a hyperparameter."""
    rules = [n for n, row in REGISTRY.items() if name in row.table]
    return rules + [n for n, kind in CORRECTIONS.items() if name in table(kind)]


def route(values: Mapping[str, Any]) -> Routing:
    """Return the algorithms behind ``values["mars_type"]``, from hyperparameters by the
    names that ``mars`` has. What is left out is the rule's own; None for one of those
    that end in ``_1d`` is lr, betas or weight_decay.

    Raises:
        ValueError: an unknown type, ``optimize_1d`` for a baseline, a hyperparameter
            that the rule does not have, or that is out of its range.
    """
    choice = Choice(**arguments(Choice, values))
    row = named(choice.mars_type)
    kind = correction_named(resolve(choice.is_approx, choice.correction))
    check_suits(row, kind, {n: v for n, v in values.items() if v is not None})
    check_values(hyperparameters_of(row.preconditioner, kind), values)
    NewtonSchulz(**arguments(NewtonSchulz, values))  # checked, whether read or not
    if choice.optimize_1d and not row.is_mars:
        raise ValueError(
            f"got optimize_1d=True with mars_type={row.name!r}, expected a MARS type: "
            "a baseline corrects nothing, leave optimize_1d False"
        )
    if choice.gamma_1d is not None and not kind.is_ahead:
        ahead = [n for n, other in CORRECTIONS.items() if other.is_ahead]
        raise ValueError(
            f"got gamma_1d={choice.gamma_1d!r} with correction={kind.name!r}, expected "
            f"None: it is of corrections that look ahead, leave it out or choose one "
            f"of {ahead}"
        )
    correction = kind(**arguments(kind, values))
    unclipped = replace(correction, clip=None) if kind.suits_baselines else None
    matrices = Matrices(**arguments(Matrices, values))
    common: dict[str, Any] = dict(
        state_dtype=choice.state_dtype,
        stochastic_rounding=choice.stochastic_rounding,
        correction=correction if row.is_mars else unclipped,
    )

    def algorithm(row: NamedRule, numbers: Mapping[str, Any], **more: Any) -> Algorithm:
        return row.algorithm(**arguments(row.preconditioner, numbers), **more)

    matrix, adamw = algorithm(row, values, matrices=matrices, **common), named("adamw")
    beside = {name: values[name] for name in FALLBACK_TABLE if name in values}
    if choice.optimize_1d:
        common["matrices"] = matrices
        fallback = algorithm(adamw, beside, **common) if row.matrix_only else None
        return Routing(matrix, fallback)
    apart = [name for name in FOLLOWED if values.get(name) is not None]
    if row.fallback == "itself" and not apart:
        return Routing(matrix, None)
    numbers = {FOLLOWED[name]: values[name] for name in apart}
    # beside a rule, only a correction that suits baselines applies, and never a clip
    common["correction"] = unclipped
    if row.fallback == "itself":
        fallback = algorithm(row, {**values, **numbers}, **common)
    else:
        numbers |= {"epsilon_hat": True} if row.fallback == "adamw" else {}
        fallback = algorithm(adamw, {**beside, **numbers}, **common)
    return Routing(matrix, fallback, choice.lr_1d is not None, unclipped is not None)
