"""The authors' routing of whole models: matrices by a named rule, the rest by AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from marsopt.functional.rule import Rule
from marsopt.rules import checks
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction, resolve
from marsopt.rules.matrices import Matrices
from marsopt.rules.newton_schulz import NewtonSchulz
from marsopt.rules.registry import REGISTRY, NamedRule, named

# Which matrices tensors are made of, and what of them is clipped.
MATRICES = dict(matrices="2d", block_rows=None, clip_per=Correction.clip_per)
# What tensors that are not matrices take where it is None.
FOLLOWED = {"lr_1d": "lr", "betas_1d": "betas", "weight_decay_1d": "weight_decay"}


class Routing(NamedTuple):
    """Who moves what: the authors' routing."""

    matrix: Algorithm
    rest: Algorithm | None  # None: ``matrix`` takes every tensor
    own_rate: bool  # whether the rest has the rate lr_1d instead of lr
    own_gamma: bool = False  # whether the rest takes gamma_1d instead of gamma


def route(given: Mapping[str, Any]) -> Routing:
    """Return the algorithms behind ``given["mars_type"]``, from the authors'
    hyperparameters: the arguments of ``mars``, complete; None for one of those that end
    in ``_1d`` is the rule's own lr, betas or weight_decay.

    Raises:
        ValueError: an unknown type, ``optimize_1d`` for a baseline, ``nesterov`` for a
            rule that has none, a hyperparameter out of its range.
    """
    given = {**MATRICES, **given}
    row, optimize_1d = named(given["mars_type"]), given["optimize_1d"]
    matrices = Matrices(kind=given["matrices"], block_rows=given["block_rows"])
    common = dict(state_dtype=given["state_dtype"], matrices=matrices)
    if optimize_1d and not row.is_mars:
        raise ValueError(
            f"got optimize_1d=True with mars_type={row.name!r}, expected a MARS type: "
            "a baseline corrects nothing, leave optimize_1d False"
        )
    found = Correction(
        kind=resolve(given["is_approx"], given["correction"]),
        **{name: given[name] for name in ("gamma", "clip", "clip_per", "h_dtype")},
    )
    unclipped = replace(found, clip=None) if found.transports else None
    common["correction"] = found if row.is_mars else unclipped
    if given.get("gamma_1d") is not None and unclipped is None:
        raise ValueError(
            f"got gamma_1d={given['gamma_1d']!r} with correction={found.kind!r}, "
            'expected None: it is of correction="transport" alone'
        )
    nesterov = given.pop("nesterov", None)
    if nesterov is not None and "nesterov" not in row.arguments:
        raise ValueError(
            f"got nesterov={nesterov!r} with mars_type={row.name!r}, expected None: "
            "its momentum has no Nesterov form"
        )
    form = {} if nesterov is None else {"nesterov": nesterov}

    def algorithm(row: NamedRule, numbers: Mapping[str, Any], **more) -> Algorithm:
        # matrix rules take the authors' betas one by one
        momentum, beta2 = numbers["betas"]
        values = {**numbers, "momentum": momentum, "beta2": beta2}
        own = {name: values[name] for name in row.arguments if name in values}
        return row.algorithm(**{**own, **more})

    matrix, adamw = algorithm(row, given, **common, **form), REGISTRY["adamw"]
    if optimize_1d:
        rest = algorithm(adamw, given, **common) if row.matrix_only else None
        return Routing(matrix, rest, False)
    apart = [name for name in FOLLOWED if given[name] is not None]
    if row.others == "itself" and not apart:
        return Routing(matrix, None, False)
    numbers = {**given, **{FOLLOWED[name]: given[name] for name in apart}}
    # a tensor beside the rule is corrected by transport alone, and never clipped
    common = dict(state_dtype=given["state_dtype"], correction=unclipped)
    if row.others == "itself":
        rest = algorithm(row, numbers, **common, **form)
    elif row.others == "adamw":
        rest = algorithm(adamw, numbers, **common, epsilon_hat=True)
    else:
        rest = algorithm(adamw, numbers, **common)
    return Routing(matrix, rest, given["lr_1d"] is not None, unclipped is not None)


def mars(
    *,
    mars_type: str = "mars-adamw",
    base_lr: float = 3e-3,
    betas: tuple[Number, Number] | None = None,
    eps: Number = 1e-8,
    weight_decay: Number | None = None,
    amsgrad: bool = False,
    gamma: Number = 0.025,
    is_approx: bool = True,
    optimize_1d: bool = False,
    lr_1d: float | None = None,
    betas_1d: tuple[Number, Number] | None = None,
    weight_decay_1d: Number | None = None,
    clip: Number | None = 1.0,
    max_norm: Number | None = None,
    epsilon_hat: bool = False,
    nesterov: bool | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
    clip_per: str = "matrix",
    ns_steps: int = 5,
    ns_coefficients: str = "quintic",
    ns_dtype: torch.dtype = torch.bfloat16,
    ns_gram: bool = False,
    state_dtype: torch.dtype | None = None,
    h_dtype: torch.dtype | None = None,
    correction: str | None = None,
    gamma_1d: Number | None = None,
) -> Rule:
    """Return the authors' routing as one rule: matrices by ``mars_type``, other tensors
    by AdamW.

    What is None is the rule's own, as ``MARS`` has it too: ``betas``, ``weight_decay``,
    ``nesterov``, and ``lr_1d``, ``betas_1d`` and ``weight_decay_1d`` of tensors that
    are not matrices (docs/guide.md has the table).

    Args:
        mars_type: a name in ``marsopt.REGISTRY``. "adamw", "nadamw" and "lion" take
            every tensor.
        base_lr: the peak rate that ``lr_1d`` is measured against. It is no learning
            rate: that of a step is given to ``step``.
        matrices, block_rows, clip_per: which matrices a tensor is made of ("2d": one,
            if it has exactly two dims; "batched", "flattened": see ``Matrices``), and
            whether each is clipped.
        betas, eps, weight_decay, amsgrad, epsilon_hat, nesterov, gamma, clip, max_norm:
            as in ``mars_adamw``; rules with one momentum take betas[0], NorMuon
            betas[1] for the moment of rows.
        is_approx, correction: where the reference gradient comes from, as in
            ``mars_adamw``. With "transport" every ``mars_type`` looks ahead, baselines
            (without clip) and the AdamW beside them too.
        optimize_1d: give the other tensors to the MARS rule too (matrix rules: to
            MARS-AdamW), with its own numbers.
        gamma_1d: with transport, gamma of the AdamW for the others; None = gamma.
        lr_1d, betas_1d, weight_decay_1d: of what moves the others; its rate is the
            step's lr times lr_1d / base_lr, so that it follows the schedule.
        ns_steps, ns_coefficients, ns_dtype, ns_gram: how matrices are orthogonalized:
            see ``NewtonSchulz``.
        state_dtype, h_dtype: dtype of the state buffers, and of h alone; None = the
            parameter's own.

    Raises:
        ValueError: an unknown ``mars_type`` or a hyperparameter out of its range.
    """
    given = dict(locals())
    own = named(mars_type).hyperparameters
    given |= {name: own[name] for name in own if given[name] is None}
    checks.positive("base_lr", base_lr)
    if given["lr_1d"] is not None:
        checks.at_least_zero("lr_1d", given["lr_1d"])
    given["ns"] = NewtonSchulz(ns_steps, ns_coefficients, ns_dtype, gram=ns_gram)
    chosen = route(given)
    return Rule(
        matrix=chosen.matrix,
        rest=chosen.rest,
        rest_ratio=given["lr_1d"] / base_lr if chosen.own_rate else 1.0,
        rest_gamma=gamma_1d if chosen.own_gamma else None,
        max_norm=max_norm,
    )
