"""The named rules as functions. Signatures repeat the defaults of the registry, for
readers, editors and type checkers; a test compares the two.
"""

from __future__ import annotations

from typing import Any

import torch

from marsopt.functional.rule import Rule
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction, resolve
from marsopt.rules.matrices import Matrices
from marsopt.rules.newton_schulz import NewtonSchulz
from marsopt.rules.registry import REGISTRY


def _rule(name: str, given: dict[str, Any]) -> Rule:
    """Return a named rule from the arguments of its function, all of them.

    Raises:
        ValueError: a hyperparameter out of its range.
    """
    row, max_norm = REGISTRY[name], given.pop("max_norm")
    matrices = Matrices(kind=given.pop("matrices"), block_rows=given.pop("block_rows"))
    correction = None
    if row.is_mars:
        kind = resolve(given.pop("is_approx"), given.pop("correction"))
        own = {k: given.pop(k) for k in ("gamma", "clip", "clip_per", "h_dtype")}
        correction = Correction(kind=kind, **own)
    if row.matrix_only:
        parts = "steps", "coefficients", "dtype", "gram"
        given["ns"] = NewtonSchulz(**{k: given.pop(f"ns_{k}") for k in parts})
    algorithm = row.algorithm(correction=correction, matrices=matrices, **given)
    return Rule(matrix=algorithm, max_norm=max_norm)


def adamw(
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.01,
    amsgrad: bool = False,
    epsilon_hat: bool = False,
    nesterov: bool = False,
    max_norm: Number | None = None,
    state_dtype: torch.dtype | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
) -> Rule:
    """Return AdamW (arXiv 1711.05101), as torch.optim.AdamW.

    Args:
        betas, eps, weight_decay, amsgrad, epsilon_hat, nesterov: of the step;
            ``marsopt.AdamW`` has its formulas.
        max_norm, state_dtype, matrices, block_rows: as in ``marsopt.mars``.
    """
    return _rule("adamw", locals())


def nadamw(
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.01,
    amsgrad: bool = False,
    epsilon_hat: bool = False,
    max_norm: Number | None = None,
    state_dtype: torch.dtype | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
) -> Rule:
    """Return NAdamW: AdamW with Nesterov's momentum (Dozat, 2016).

    Args:
        betas, eps, weight_decay, amsgrad, epsilon_hat: of the step;
            ``marsopt.AdamW`` has its formulas.
        max_norm, state_dtype, matrices, block_rows: as in ``marsopt.mars``.
    """
    return _rule("nadamw", locals())


def mars_adamw(
    *,
    betas: tuple[Number, Number] = (0.95, 0.99),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    amsgrad: bool = False,
    epsilon_hat: bool = False,
    nesterov: bool = False,
    gamma: Number = 0.025,
    clip: Number | None = 1.0,
    clip_per: str = "matrix",
    is_approx: bool = True,
    correction: str | None = None,
    h_dtype: torch.dtype | None = None,
    max_norm: Number | None = None,
    state_dtype: torch.dtype | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
) -> Rule:
    """Return MARS-AdamW (arXiv 2411.10438, Algorithm 2).

    Args:
        betas, eps, weight_decay, amsgrad, epsilon_hat, nesterov: of the step;
            ``marsopt.AdamW`` has its formulas.
        gamma, clip, clip_per, h_dtype, correction (its kind; None = what is_approx
            says), is_approx: of the corrected gradient; see ``marsopt.Correction``.
        max_norm, state_dtype, matrices, block_rows: as in ``marsopt.mars``.
    """
    return _rule("mars-adamw", locals())


def lion(
    *,
    betas: tuple[Number, Number] = (0.9, 0.99),
    weight_decay: Number = 0.0,
    max_norm: Number | None = None,
    state_dtype: torch.dtype | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
) -> Rule:
    """Return Lion (arXiv 2302.06675).

    Args:
        betas, weight_decay: of the step; ``marsopt.Lion`` has its formulas.
        max_norm, state_dtype, matrices, block_rows: as in ``marsopt.mars``.
    """
    return _rule("lion", locals())


def mars_lion(
    *,
    momentum: Number = 0.95,
    weight_decay: Number = 0.0,
    gamma: Number = 0.025,
    clip: Number | None = 1.0,
    clip_per: str = "matrix",
    is_approx: bool = True,
    correction: str | None = None,
    h_dtype: torch.dtype | None = None,
    max_norm: Number | None = None,
    state_dtype: torch.dtype | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
) -> Rule:
    """Return MARS-Lion (arXiv 2411.10438, Algorithm 3).

    Args:
        momentum, weight_decay: of the step; ``marsopt.SignAverage`` has its formulas.
        gamma, clip, clip_per, h_dtype, correction (its kind; None = what is_approx
            says), is_approx: of the corrected gradient; see ``marsopt.Correction``.
        max_norm, state_dtype, matrices, block_rows: as in ``marsopt.mars``.
    """
    return _rule("mars-lion", locals())


def muon(
    *,
    momentum: Number = 0.95,
    weight_decay: Number = 0.1,
    nesterov: bool = True,
    adjust_lr_fn: str = "original",
    ns_steps: int = 5,
    ns_coefficients: str = "quintic",
    ns_dtype: torch.dtype = torch.bfloat16,
    ns_gram: bool = False,
    max_norm: Number | None = None,
    state_dtype: torch.dtype | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
) -> Rule:
    """Return Muon (K. Jordan, kellerjordan.github.io/posts/muon, 2024).

    Args:
        momentum, weight_decay, nesterov, adjust_lr_fn: of the step;
            ``marsopt.Orthogonal`` has its formulas.
        ns_steps, ns_coefficients, ns_dtype, ns_gram: of Newton-Schulz; see
            ``marsopt.NewtonSchulz``.
        max_norm, state_dtype, matrices, block_rows: as in ``marsopt.mars``.
    """
    return _rule("muon", locals())


def mars_shampoo(
    *,
    momentum: Number = 0.95,
    weight_decay: Number = 0.0,
    nesterov: bool = False,
    adjust_lr_fn: str = "original",
    ns_steps: int = 5,
    ns_coefficients: str = "quintic",
    ns_dtype: torch.dtype = torch.bfloat16,
    ns_gram: bool = False,
    gamma: Number = 0.025,
    clip: Number | None = 1.0,
    clip_per: str = "matrix",
    is_approx: bool = True,
    correction: str | None = None,
    h_dtype: torch.dtype | None = None,
    max_norm: Number | None = None,
    state_dtype: torch.dtype | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
) -> Rule:
    """Return MARS-Shampoo (arXiv 2411.10438, Algorithm 4).

    Args:
        momentum, weight_decay, nesterov, adjust_lr_fn: of the step;
            ``marsopt.Orthogonal`` has its formulas.
        ns_steps, ns_coefficients, ns_dtype, ns_gram: of Newton-Schulz; see
            ``marsopt.NewtonSchulz``.
        gamma, clip, clip_per, h_dtype, correction (its kind; None = what is_approx
            says), is_approx: of the corrected gradient; see ``marsopt.Correction``.
        max_norm, state_dtype, matrices, block_rows: as in ``marsopt.mars``.
    """
    return _rule("mars-shampoo", locals())


def moonlight(
    *,
    momentum: Number = 0.95,
    weight_decay: Number = 0.1,
    nesterov: bool = True,
    adjust_lr_fn: str = "match_rms_adamw",
    ns_steps: int = 5,
    ns_coefficients: str = "quintic",
    ns_dtype: torch.dtype = torch.bfloat16,
    ns_gram: bool = False,
    max_norm: Number | None = None,
    state_dtype: torch.dtype | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
) -> Rule:
    """Return Moonlight's Muon (arXiv 2502.16982).

    Args:
        momentum, weight_decay, nesterov, adjust_lr_fn: of the step;
            ``marsopt.Orthogonal`` has its formulas.
        ns_steps, ns_coefficients, ns_dtype, ns_gram: of Newton-Schulz; see
            ``marsopt.NewtonSchulz``.
        max_norm, state_dtype, matrices, block_rows: as in ``marsopt.mars``.
    """
    return _rule("moonlight", locals())


def mars_m(
    *,
    momentum: Number = 0.95,
    weight_decay: Number = 0.0,
    nesterov: bool = False,
    adjust_lr_fn: str = "match_rms_adamw",
    ns_steps: int = 5,
    ns_coefficients: str = "quintic",
    ns_dtype: torch.dtype = torch.bfloat16,
    ns_gram: bool = False,
    gamma: Number = 0.025,
    clip: Number | None = 1.0,
    clip_per: str = "matrix",
    is_approx: bool = True,
    correction: str | None = None,
    h_dtype: torch.dtype | None = None,
    max_norm: Number | None = None,
    state_dtype: torch.dtype | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
) -> Rule:
    """Return MARS-M (arXiv 2510.21800).

    Args:
        momentum, weight_decay, nesterov, adjust_lr_fn: of the step;
            ``marsopt.Orthogonal`` has its formulas.
        ns_steps, ns_coefficients, ns_dtype, ns_gram: of Newton-Schulz; see
            ``marsopt.NewtonSchulz``.
        gamma, clip, clip_per, h_dtype, correction (its kind; None = what is_approx
            says), is_approx: of the corrected gradient; see ``marsopt.Correction``.
        max_norm, state_dtype, matrices, block_rows: as in ``marsopt.mars``.
    """
    return _rule("mars-m", locals())


def normuon(
    *,
    momentum: Number = 0.95,
    beta2: Number = 0.95,
    eps: Number = 1e-8,
    weight_decay: Number = 0.1,
    nesterov: bool = False,
    adjust_lr_fn: str = "match_rms_adamw",
    ns_steps: int = 5,
    ns_coefficients: str = "quintic",
    ns_dtype: torch.dtype = torch.bfloat16,
    ns_gram: bool = False,
    max_norm: Number | None = None,
    state_dtype: torch.dtype | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
) -> Rule:
    """Return NorMuon (arXiv 2510.05491).

    Args:
        momentum, beta2, eps, weight_decay, nesterov, adjust_lr_fn: of the step;
            ``marsopt.NorMuon`` has its formulas.
        ns_steps, ns_coefficients, ns_dtype, ns_gram: of Newton-Schulz; see
            ``marsopt.NewtonSchulz``.
        max_norm, state_dtype, matrices, block_rows: as in ``marsopt.mars``.
    """
    return _rule("normuon", locals())


def mars_normuon(
    *,
    momentum: Number = 0.95,
    beta2: Number = 0.95,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    nesterov: bool = False,
    adjust_lr_fn: str = "match_rms_adamw",
    ns_steps: int = 5,
    ns_coefficients: str = "quintic",
    ns_dtype: torch.dtype = torch.bfloat16,
    ns_gram: bool = False,
    gamma: Number = 0.025,
    clip: Number | None = 1.0,
    clip_per: str = "matrix",
    is_approx: bool = True,
    correction: str | None = None,
    h_dtype: torch.dtype | None = None,
    max_norm: Number | None = None,
    state_dtype: torch.dtype | None = None,
    matrices: str = "2d",
    block_rows: int | None = None,
) -> Rule:
    """Return MARS's correction before NorMuon (arXiv 2510.05491).

    Args:
        momentum, beta2, eps, weight_decay, nesterov, adjust_lr_fn: of the step;
            ``marsopt.NorMuon`` has its formulas.
        ns_steps, ns_coefficients, ns_dtype, ns_gram: of Newton-Schulz; see
            ``marsopt.NewtonSchulz``.
        gamma, clip, clip_per, h_dtype, correction (its kind; None = what is_approx
            says), is_approx: of the corrected gradient; see ``marsopt.Correction``.
        max_norm, state_dtype, matrices, block_rows: as in ``marsopt.mars``.
    """
    return _rule("mars-normuon", locals())
