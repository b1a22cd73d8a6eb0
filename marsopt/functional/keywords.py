"""Names and types of all options, for editors and type checkers. Python checks options
by ``marsopt/rules/options.py``, which a test compares with these.
"""

from collections.abc import Mapping
from typing import Literal, TypedDict

import torch

from marsopt.rules.checks import Number, Weight
from marsopt.rules.component import MasterBits, Per
from marsopt.rules.matrices import Kind
from marsopt.step.owners import Collectives

Parts = int | tuple[int, ...] | None  # splits of a fused weight


class PartOptions(TypedDict, total=False):
    """Options that the signature of ``MARS`` does not spell out."""

    adjust_lr_fn: str | None
    base_lr: Number | None
    cautious_weight_decay: bool
    clip_per: Per
    h_dtype: torch.dtype | None
    master_weight_bits: MasterBits
    max_dim: int | None
    ns_coefficients: str
    ns_dtype: torch.dtype | None
    ns_eps: float
    ns_steps: int
    orthogonalize: bool | None
    precondition_frequency: int | None
    shampoo_beta: Number | None
    sides: Literal["both", "short"] | None
    splits: Parts | Mapping[str, Parts]  # by names of parameters in for_model
    stagger: bool | None
    stochastic_rounding: bool


class Options(PartOptions, total=False):
    """Options of ``rule`` and ``mars``."""

    amsgrad: bool
    beta2: Number  # only in ``rule``
    betas: tuple[Number, Number] | None
    betas_1d: tuple[Number, Number] | None
    clip: Number | None
    correction: str | None
    eps: Number
    epsilon_hat: bool
    gamma: Number
    is_approx: bool
    log_time: Number | None
    lr_1d: Number | None
    matrices: Kind
    max_norm: Number | None
    momentum: Number  # only in ``rule``
    nesterov: Weight | None
    nesterov_1d: Weight | None
    optimize_1d: bool
    state_dtype: torch.dtype | None
    weight_decay: Number | None
    weight_decay_1d: Number | None


class RoleOptions(Options, total=False):
    """Options of ``rule_for``."""

    adapters: Literal["matrix", "adamw"]
    convolutions: bool
    experts: bool


class ModelOptions(RoleOptions, total=False):
    """Options of ``for_model``."""

    collectives: Collectives
    compile: bool | None
    nonfinite: Literal["skip", "raise"]
