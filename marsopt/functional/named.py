"""The named rules as functions, and the authors' routing of whole models."""

from __future__ import annotations

import inspect
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

# Arguments of a correction, and of every rule.
CORRECTION = dict(
    gamma=Correction.gamma,
    clip=Correction.clip,
    clip_per=Correction.clip_per,
    is_approx=True,
    correction=None,
    h_dtype=None,
)
COMMON = dict(max_norm=None, state_dtype=None, matrices="2d", block_rows=None)
# Which matrices tensors are made of, and what of them is clipped.
MATRICES = dict(matrices="2d", block_rows=None, clip_per=Correction.clip_per)

DOCUMENTATION = """{name} ({source}) as a ``Rule``.

{page}
{correction}
    max_norm: threshold of the global gradient norm, inside the step; None = off.
    state_dtype: dtype of the state buffers; None = the parameter's own.
    matrices, block_rows: which matrices a tensor is made of: ``kind`` and
        ``block_rows`` of ``marsopt.Matrices``.

Raises:
    ValueError: a hyperparameter out of its range.
"""
CORRECTED = """
c is MARS's corrected and clipped gradient (``marsopt.Correction``).

    gamma, clip, clip_per, h_dtype: as in ``Correction``.
    is_approx: True: h is the previous gradient, kept in the state (a ``reference``
        given to ``step`` takes its place). False: every step needs its ``reference``.
    correction: "approximate", "exact" or "transport" instead; None = what is_approx
        says.
"""


class NamedFactory:
    """Builds the ``Rule`` of one row of the registry."""

    def __init__(self, row: NamedRule) -> None:
        self.row = row
        self.__name__ = row.name.replace("-", "_")
        self.__qualname__ = self.__name__
        defaults = {
            **row.arguments,
            **(CORRECTION if row.is_mars else {}),
            **COMMON,
        }
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value)
                for name, value in defaults.items()
            ],
            return_annotation=Rule,
        )
        self.__doc__ = DOCUMENTATION.format(
            name=row.name,
            source=row.source,
            page=inspect.getdoc(row.preconditioner),
            correction=CORRECTED if row.is_mars else "",
        )

    def __repr__(self) -> str:
        return f"marsopt.{self.__name__}"

    def __call__(self, **given: Any) -> Rule:
        self.__signature__.bind(**given)  # raises TypeError for unknown names
        max_norm = given.pop("max_norm", None)
        matrices = Matrices(
            kind=given.pop("matrices", COMMON["matrices"]),
            block_rows=given.pop("block_rows", None),
        )
        correction = None
        if self.row.is_mars:
            own = {name: given.pop(name, CORRECTION[name]) for name in CORRECTION}
            correction = _correction(**own)
        return Rule(
            matrix=self.row.algorithm(
                correction=correction, matrices=matrices, **given
            ),
            max_norm=max_norm,
        )


def _correction(
    *,
    is_approx: bool,
    correction: str | None,
    **own: Any,
) -> Correction:
    kind = resolve(is_approx, correction)
    return Correction(kind=kind, **own)


class Routing(NamedTuple):
    """Who moves what: the authors' routing."""

    matrix: Algorithm
    rest: Algorithm | None  # None: ``matrix`` takes every tensor
    own_rate: bool  # whether the rest has the rate lr_1d instead of lr
    own_gamma: bool = False  # whether the rest takes gamma_1d instead of gamma


def route(given: Mapping[str, Any]) -> Routing:
    """Return the algorithms behind ``given["mars_type"]``, from the authors'
    hyperparameters: the arguments of ``mars``.

    Raises:
        ValueError: an unknown type, ``optimize_1d`` for a baseline, a hyperparameter
            out of its range.
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
    found = _correction(**{name: given[name] for name in CORRECTION})
    unclipped = replace(found, clip=None) if found.transports else None
    common["correction"] = found if row.is_mars else unclipped
    if given.get("gamma_1d") is not None and unclipped is None:
        raise ValueError(
            f"got gamma_1d={given['gamma_1d']!r} with correction={found.kind!r}, "
            'expected None: it is of correction="transport" alone'
        )
    # matrix rules take the authors' betas one by one
    momentum, beta2 = given["betas"]
    values = {**given, "momentum": momentum, "beta2": beta2}

    def algorithm(row: NamedRule, **more: Any) -> Algorithm:
        own = {name: values[name] for name in row.arguments if name in values}
        return row.algorithm(**{**own, **more})

    matrix, adamw = algorithm(row, **common), REGISTRY["adamw"]
    if row.others == "itself" or (optimize_1d and not row.matrix_only):
        return Routing(matrix, None, False)
    if optimize_1d:
        return Routing(matrix, algorithm(adamw, **common), False)
    rest = dict(
        betas=given["betas_1d"], state_dtype=given["state_dtype"], correction=unclipped
    )
    looks_ahead = unclipped is not None
    if row.others == "adamw":
        own = algorithm(adamw, **rest, epsilon_hat=True)
        return Routing(matrix, own, False, looks_ahead)
    own = algorithm(adamw, **rest, weight_decay=given["weight_decay_1d"])
    return Routing(matrix, own, True, looks_ahead)


def mars(
    *,
    mars_type: str = "mars-adamw",
    lr: float = 3e-3,
    betas: tuple[Number, Number] = (0.95, 0.99),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    amsgrad: bool = False,
    gamma: Number = 0.025,
    is_approx: bool = True,
    optimize_1d: bool = False,
    lr_1d: float = 3e-3,
    betas_1d: tuple[Number, Number] = (0.9, 0.95),
    weight_decay_1d: Number = 0.1,
    clip: Number | None = 1.0,
    max_norm: Number | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
    clip_per: str = "matrix",
    correction: str | None = None,
    gamma_1d: Number | None = None,
    epsilon_hat: bool = False,
    ns: NewtonSchulz = NewtonSchulz(),
    state_dtype: torch.dtype | None = None,
    h_dtype: torch.dtype | None = None,
) -> Rule:
    """Return the authors' routing as one rule: matrices by ``mars_type``, other tensors
    by AdamW.

    Args:
        mars_type: a name in ``marsopt.REGISTRY``. "adamw" and "lion" take every tensor.
        lr: the peak rate that ``lr_1d`` is measured against; the rate of a step is
            given to ``step``.
        matrices, block_rows, clip_per: which matrices a tensor is made of ("2d": one,
            if it has exactly two dims; "batched", "flattened": see ``Matrices``), and
            whether each is clipped.
        betas, eps, weight_decay, amsgrad, epsilon_hat, gamma, clip, max_norm: as in
            ``mars_adamw``; rules with one momentum take betas[0], NorMuon
            betas[1] for the moment of rows.
        is_approx, correction: where the reference gradient comes from, as in
            ``mars_adamw``. With "transport" every ``mars_type`` looks ahead, baselines
            (without clip) and the AdamW beside them too.
        optimize_1d: give the other tensors to the MARS rule too (matrix rules: to
            MARS-AdamW).
        gamma_1d: with transport, gamma of the AdamW for the others; None = gamma.
        lr_1d, betas_1d, weight_decay_1d: of the AdamW for the others; its rate is the
            step's lr times lr_1d / lr, so that it follows the schedule. "mars-m",
            "moonlight" and NorMuon give it lr and weight_decay, as their authors do.
        ns: how matrices are orthogonalized.
        state_dtype, h_dtype: dtype of the state buffers, and of h alone; None = the
            parameter's own.

    Raises:
        ValueError: an unknown ``mars_type`` or a hyperparameter out of its range.
    """
    given = dict(locals())
    checks.positive("lr", lr)
    checks.at_least_zero("lr_1d", lr_1d)
    chosen = route(given)
    return Rule(
        matrix=chosen.matrix,
        rest=chosen.rest,
        rest_ratio=lr_1d / lr if chosen.own_rate else 1.0,
        rest_gamma=gamma_1d if chosen.own_gamma else None,
        max_norm=max_norm,
    )


FACTORIES = {
    name.replace("-", "_"): NamedFactory(row) for name, row in REGISTRY.items()
}
