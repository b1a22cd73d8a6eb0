"""The authors' options of a whole model: one rule for its matrices, and an AdamW or the
rule itself for its other tensors. Their ``is_approx``, ``optimize_1d``, ``base_lr`` and
``_1d`` become options of tensors of one kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.checks import Number, Weight
from marsopt.rules.component import Algorithm, Correction, Preconditioner
from marsopt.rules.mars import Approximate
from marsopt.rules.matrices import Matrices
from marsopt.rules.options import (
    Option,
    OptionTable,
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
)


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerOptions:
    """The options of an optimizer that no component has.

    Args:
        mars_type: a name in ``marsopt.REGISTRY``: the rule of matrices. The baselines
            "adamw", "nadamw" and "lion" update every tensor.
        lr: learning rate; ``marsopt.mars`` has none, as each step is given its own.
        lr_ratio: the learning rate of a param group over ``lr``, which schedules may
            write into every group.
        is_approx: False = exact MARS; True = as ``correction`` says.
        correction: "approximate" or "exact", in place of ``is_approx``. None = as
            ``is_approx`` says. Baselines take none.
        max_norm: threshold of the global gradient norm, as in ``Rule``.
    """

    mars_type: str = "mars-adamw"
    lr: Number = number(3e-3, checks.at_least_zero)
    lr_ratio: Number = number(1.0, checks.at_least_zero)
    is_approx: bool = structure(True, whole=True)
    correction: str | None = structure(None, whole=True)
    max_norm: Number | None = structure(None, checks.positive_or_none, whole=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class RestOptions:
    """The options of tensors that are not matrices.

    Args:
        optimize_1d: give tensors that are not matrices to the MARS rule too (with
            matrix rules: to MARS-AdamW), with its options.
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


OPTIMIZER, REST = options_of(OptimizerOptions), options_of(RestOptions)


# ---- which options a rule has --------------------------------------------------------


@cache
def group_options(
    preconditioner: type[Preconditioner], correction: type[Correction]
) -> OptionTable:
    """Return the options of a rule's param groups: ``betas`` stands for its single
    momentums there.
    """
    lines = options_of(preconditioner).items()
    return {
        **OPTIMIZER,
        **REST,
        **options_of(Algorithm),
        **options_of(correction),
        **FALLBACK_TABLE,
        **{name: line for name, line in lines if line.beta is None},
    }


def all_options() -> OptionTable:
    """Return the options that rules and corrections have, which ``mars`` and ``MARS``
    take. A default that rules do not share is None: each rule's own.
    """
    preconditioners = dict.fromkeys(row.preconditioner for row in REGISTRY.values())
    return _all_options(tuple(preconditioners), tuple(CORRECTIONS.values()))


@cache
def _all_options(
    preconditioners: tuple[type[Preconditioner], ...],
    corrections: tuple[type[Correction], ...],
) -> OptionTable:
    lines: dict[str, Option] = {}
    for kind in (*corrections, Correction):
        lines |= {**OPTIMIZER, **options_of(Algorithm), **options_of(kind)}
    lines |= {**FALLBACK_TABLE, **REST}
    shared = lines.keys() - {"betas", "weight_decay"}  # rules share their defaults
    for preconditioner in preconditioners:
        for name, line in options_of(preconditioner).items():
            if line.beta is not None or name in shared:
                continue
            without_default = line._replace(default=None, hint=line.hint | None)
            lines[name] = line if line.is_whole else without_default
    return lines


def check_options(
    row: NamedRule, correction: type[Correction], values: Mapping[str, Any]
) -> None:
    """Check that a rule and a correction have the options in ``values``, and their
    ranges, whether formulas read them or not.

    Raises:
        ValueError: another rule or correction has one of them, or it is out of its
            range; ``optimize_1d`` for a baseline.
    """
    known = all_options()
    suitable = {name: line for name, line in known.items() if line.is_whole}
    suitable |= group_options(row.preconditioner, correction)
    for name, value in values.items():
        if value is not None and name in known and name not in suitable:
            raise ValueError(
                f"got {name}={value!r} with mars_type={row.name!r}, expected None: it "
                f"is of {', '.join(rules_with(name))}; leave it out, or choose one of "
                "these"
            )
    check_values(suitable, values)
    if values.get("optimize_1d") and not row.is_mars:
        raise ValueError(
            f"got optimize_1d=True with mars_type={row.name!r}, expected a MARS type: "
            "a baseline corrects nothing, leave optimize_1d False"
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
    """Return the names of the rules and corrections that have an option."""
    rules = [n for n, row in REGISTRY.items() if name in row.table]
    return rules + [n for n, kind in CORRECTIONS.items() if name in options_of(kind)]


# ---- the two kinds of tensors --------------------------------------------------------


def matrix_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of matrices: ``values`` without ``REST``."""
    return {name: value for name, value in values.items() if name not in REST}


def rest_values(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options of tensors that are not matrices, with their ``lr_ratio``;
    None if the rule updates them by the values of matrices.

    Args:
        values: options of matrices and of other tensors, with the rule's defaults. None
            for a name that ends in ``_1d`` is lr, betas, weight_decay or nesterov.

    Raises:
        ValueError: an unknown type; ``lr_1d`` beside a learning rate of zero.
    """
    row = named(values.get("mars_type", OptimizerOptions.mars_type))
    if values.get("optimize_1d"):
        mars_adamw = _shared_by_adamw(values, options_of(Matrices))
        return {**mars_adamw, "mars_type": "mars-adamw"} if row.matrix_only else None
    if row.fallback != "itself":
        return adamw_values(values)
    numbers = _rest_numbers(values)
    return {**matrix_values(values), **numbers} if numbers else None


def adamw_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of AdamW beside a rule, for tensors that are not matrices, and
    for embeddings; ``values`` is as for ``rest_values``.
    """
    row = named(values.get("mars_type", OptimizerOptions.mars_type))
    epsilon_hat = row.fallback == "adamw" or values.get("epsilon_hat", False)
    return {
        **_shared_by_adamw(values),
        "mars_type": "adamw",
        "nesterov": False,
        "epsilon_hat": epsilon_hat,
        **_rest_numbers(values),
    }


def _shared_by_adamw(
    values: Mapping[str, Any], more: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the values that AdamW beside a rule shares with it; and ``more``."""
    known = all_options()
    shared = {name for name, line in known.items() if line.is_whole}
    shared |= {*OPTIMIZER, *FALLBACK_TABLE, *more}
    shared = shared.union(*map(options_of, CORRECTIONS.values()))
    return {n: v for n, v in values.items() if n in shared or n not in known}


def _rest_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``REST``, by the names of options of matrices."""
    numbers: dict[str, Any] = {
        name: values[name_1d]
        for name_1d, name in BESIDE.items()
        if values.get(name_1d) is not None
    }
    ratio = values.get("lr_1d_ratio")
    if "lr" in numbers:
        ratio = ratio_of(numbers.pop("lr"), values)
    if ratio is not None:
        numbers["lr_ratio"] = values.get("lr_ratio", 1.0) * ratio
    return numbers


def ratio_of(lr_1d: Number, values: Mapping[str, Any]) -> Number:
    """Return ``lr_1d`` as a share of the peak learning rate.

    Raises:
        ValueError: that is zero.
    """
    lr = values.get("base_lr")
    if lr is None:
        lr = values.get("lr", OptimizerOptions.lr)
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
