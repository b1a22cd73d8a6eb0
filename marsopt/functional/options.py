"""The options of the named rules, one ``TypedDict`` per family: an option's name, its
type, and the sentence that ``help`` shows. Defaults and ranges are those of the fields
that the options set (marsopt/rules/hyperparameters.py).
"""

from typing import Annotated, TypedDict, get_type_hints

import torch

from marsopt.rules.checks import Number
from marsopt.rules.correction import Per
from marsopt.rules.decay import Decay, Weight
from marsopt.rules.matrices import Kind
from marsopt.rules.soap import Sides

Pair = tuple[Decay, Decay]
Eps = Annotated[Number, "added to the root of the second moment."]
Amsgrad = Annotated[
    bool, "AdamW: divide by the root of the largest second moment so far."
]
EpsilonHat = Annotated[
    bool,
    "AdamW: add eps before debiasing the second moment, as the MARS-M and Moonlight "
    "scripts do.",
]
Nesterov = Annotated[
    Weight | None,
    "True = Nesterov's form of the rule's momentum; a number in [0, 1] = the weight of "
    "the gradient beside its debiased average; None = the rule's own.",
]

# ---- what families share -------------------------------------------------------------


class CommonOptions(TypedDict, total=False):
    """Options of every rule and of ``MARS``."""

    cautious_weight_decay: Annotated[
        bool,
        "decay only those elements of x that the step moves towards zero as well "
        '("Cautious Weight Decay", arXiv 2510.12402; dion\'s ``cautious_wd``).',
    ]
    stochastic_rounding: Annotated[
        bool,
        "round what a step writes into state of bfloat16 up or down at random, right "
        "on average. Parameters are rounded to nearest.",
    ]
    block_rows: Annotated[
        int | None,
        "this many consecutive rows are a matrix: the head width of a projection "
        "(num_heads * head_width, cols), or the rows of each of several fused "
        "projections. None = all rows.",
    ]


class StepOptions(TypedDict, total=False):
    """Options of every rule that ``MARS`` has in its signature."""

    max_norm: Annotated[
        Number | None,
        "threshold of the global gradient norm, applied inside the step in place of "
        "clip_grad_norm_; None = off.",
    ]
    state_dtype: Annotated[
        torch.dtype | None,
        "dtype of the state; None = the parameter's own, float32 for float16. Not "
        "narrower than the parameter, except torch.bfloat16 with "
        "``stochastic_rounding``.",
    ]
    matrices: Annotated[
        Kind,
        '"2d": a tensor of exactly two dims is a matrix, any other is none. "batched": '
        "a tensor (..., rows, cols), as the weights of experts, is a batch of "
        'matrices. "flattened": a tensor (rows, ...), as the kernel of a convolution, '
        "is one matrix.",
    ]


class RuleOptions(CommonOptions, StepOptions, total=False):
    """Options of every rule."""

    weight_decay: Annotated[
        Number, "decoupled weight decay: x <- (1 - lr weight_decay) x - ..."
    ]


class ReferenceOptions(TypedDict, total=False):
    """Options of corrections that ``MARS`` does not have in its signature."""

    clip_per: Annotated[
        Per,
        'what has a norm of its own: "matrix", where a tensor is made of several '
        '(``matrices``, ``block_rows``), or "tensor".',
    ]
    h_dtype: Annotated[
        torch.dtype | None,
        "dtype of a kept gradient; None = that of the other buffers. Half precision "
        "saves memory and traffic, and rounds the gradient by up to 2^-9 (bf16).",
    ]
    store_iterate: Annotated[
        bool,
        "with transport, keep x in the state of AdamW too: 4 bytes a parameter more "
        "of state and of traffic, for one rounding less.",
    ]


class CorrectionOptions(ReferenceOptions, total=False):
    """Options of rules that correct the gradient."""

    gamma: Annotated[Number, "scale of the variance reduction; 0 turns it off."]
    clip: Annotated[
        Number | None, "threshold of the norm of the corrected gradient; None = off."
    ]
    is_approx: Annotated[bool, "False = exact MARS; True = what ``correction`` says."]
    correction: Annotated[
        str | None,
        '"approximate", "exact", "transport" or "svrg", in place of ``is_approx``; '
        "None = what ``is_approx`` says. ``mars`` gives transport to baselines too, "
        "without clip, and to the AdamW beside a rule; baselines take no other.",
    ]


class MatrixOptions(TypedDict, total=False):
    """Options of matrix rules; ``NewtonSchulz`` says more of ``ns_...``."""

    adjust_lr_fn: Annotated[
        str | None,
        'scale by shape, in torch.optim.Muon\'s words: "original" (sqrt(max(1, '
        'rows/cols))) or "match_rms_adamw" (0.2 sqrt(max(rows, cols)), Moonlight\'s). '
        "SOAP has it with ``orthogonalize``. None = the rule's own.",
    ]
    ns_steps: Annotated[int, "number of Newton-Schulz iterations."]
    ns_coefficients: Annotated[
        str,
        "coefficients of the iterations: \"quintic\" (Muon's and the authors'), "
        '"polar_express" or "taylor".',
    ]
    ns_dtype: Annotated[
        torch.dtype | None,
        "precision of the iterations. None = what the device does best: bfloat16; "
        "on a CPU without instructions for it, float32.",
    ]
    ns_eps: Annotated[
        float,
        "added to the Frobenius norm that divides the input, so that a zero matrix "
        "stays zero.",
    ]
    ns_gram: Annotated[
        bool | None,
        "iterate on the Gram matrix of the short side where that is faster; it is "
        "less precise. None = on a CPU, where ``ns_dtype`` is None too.",
    ]
    ns_scaling: Annotated[
        str,
        '"frobenius": the input is divided by its norm. "aol": then also by the roots '
        "of its Gram matrix's absolute row sums, after which four steps do what five "
        'did ("Turbo-Muon", arXiv 2512.04632).',
    ]
    ns_block_rows: Annotated[
        int | None,
        "rows, at least, of the blocks in which symmetric products are computed; None "
        "= 256 on a CPU, 2048 on a GPU.",
    ]


class FactorOptions(TypedDict, total=False):
    """Options of SOAP's factors and bases. None = SOAP's own default."""

    shampoo_beta: Annotated[
        Decay | None, "decay rate of SOAP's factors; None = betas[1]."
    ]
    sides: Annotated[
        Sides | None,
        'which sides of a matrix have a factor in SOAP: "both", or the "short" one '
        "alone, with less state and fewer products.",
    ]
    precondition_frequency: Annotated[
        int | None, "steps from one refresh of SOAP's bases to the next."
    ]
    max_dim: Annotated[
        int | None,
        "a side longer than this has no factor in SOAP, as that of a vocabulary.",
    ]
    stagger: Annotated[
        bool | None,
        "refresh SOAP's bases tensor after tensor, not all in the same step: every "
        "step then takes the same time.",
    ]
    orthogonalize: Annotated[
        bool | None, "step along the orthogonal factor of SOAP's step (SOAP-Muon)."
    ]


# ---- one family each -----------------------------------------------------------------


class AdamWOptions(RuleOptions, total=False):
    """Options of AdamW and NAdamW."""

    betas: Annotated[Pair, "decay rates of the first and the second moment."]
    eps: Eps
    amsgrad: Amsgrad
    epsilon_hat: EpsilonHat
    nesterov: Nesterov


class LionOptions(RuleOptions, total=False):
    """Options of Lion."""

    betas: Annotated[Pair, "weights of the momentum in the step and in its average."]


class AverageOptions(RuleOptions, total=False):
    """Options of rules with one momentum: MARS-Lion, and the matrix rules but SOAP."""

    momentum: Annotated[Decay, "decay rate of the momentum, the authors' betas[0]."]


class OrthogonalOptions(AverageOptions, MatrixOptions, total=False):
    """Options of Muon, Moonlight, and MARS on either."""

    nesterov: Nesterov


class NorMuonOptions(OrthogonalOptions, total=False):
    """Options of NorMuon."""

    beta2: Annotated[Decay, "decay rate of the second moment, one number a row."]
    eps: Eps


class SOAPOptions(RuleOptions, MatrixOptions, FactorOptions, total=False):
    """Options of SOAP and SOAP-Muon."""

    betas: Annotated[Pair, "decay rates of the moments in the eigenbasis."]
    eps: Eps
    nesterov: Nesterov


# ---- the same on MARS's corrected gradient -------------------------------------------


class MarsAdamWOptions(AdamWOptions, CorrectionOptions, total=False):
    """Options of MARS-AdamW."""


class MarsLionOptions(AverageOptions, CorrectionOptions, total=False):
    """Options of MARS-Lion."""


class MarsOrthogonalOptions(OrthogonalOptions, CorrectionOptions, total=False):
    """Options of MARS-Shampoo and MARS-M."""


class MarsNorMuonOptions(NorMuonOptions, CorrectionOptions, total=False):
    """Options of MARS-NorMuon."""


class MarsSOAPOptions(SOAPOptions, CorrectionOptions, total=False):
    """Options of MARS-SOAP and MARS-SOAP-Muon."""


# ---- whole models, whose rule ``mars_type`` names ------------------------------------


class ClassOptions(
    CommonOptions, ReferenceOptions, MatrixOptions, FactorOptions, total=False
):
    """Options of ``mars`` and ``MARS`` that the signature of ``MARS`` does not have."""

    base_lr: Annotated[
        Number,
        "the peak learning rate that ``lr_1d`` is measured against. It is no learning "
        "rate: ``step`` is given the lr of each step, or the param group has it.",
    ]


class ModelOptions(ClassOptions, StepOptions, CorrectionOptions, total=False):
    """Options of whole models, whatever their rule."""

    optimize_1d: Annotated[
        bool,
        "give tensors that are not matrices to the MARS rule too (matrix rules: to "
        "MARS-AdamW), with its hyperparameters.",
    ]
    lr_1d: Annotated[
        Number | None,
        "learning rate of tensors that are not matrices, times the step's lr / "
        "base_lr, so that it follows the schedule. None = the rule's own: lr itself, "
        "or the authors' 3e-3.",
    ]
    betas_1d: Annotated[
        Pair | None,
        "betas of tensors that are not matrices. None = the rule's own: betas "
        "themselves, or the authors' (0.9, 0.95).",
    ]
    weight_decay_1d: Annotated[
        Number | None,
        "weight decay of tensors that are not matrices. None = the rule's own: "
        "weight_decay itself, or the authors' 0.1.",
    ]
    nesterov_1d: Annotated[
        Weight | None,
        "``nesterov`` of tensors that are not matrices. None = off in AdamW beside a "
        "matrix rule, else nesterov itself.",
    ]
    gamma_1d: Annotated[
        Number | None,
        "with transport, gamma of the AdamW for tensors that are not matrices; None = "
        "gamma.",
    ]
    betas: Annotated[
        Pair | None,
        "decay rates of the moments. Rules with one momentum use betas[0], NorMuon "
        "betas[1] for that of rows. None = the rule's own.",
    ]
    eps: Eps
    weight_decay: Annotated[
        Number | None, "decoupled weight decay; None = the rule's own."
    ]
    amsgrad: Amsgrad
    epsilon_hat: EpsilonHat
    nesterov: Nesterov


class RoutedOptions(ModelOptions, total=False):
    """Options of ``mars``."""

    mars_type: Annotated[
        str,
        "a name in ``marsopt.REGISTRY``: the rule of matrices. Elementwise baselines "
        '("adamw", "nadamw", "lion") take every tensor.',
    ]


def sentences(options: type) -> dict[str, str]:
    """Return the sentence of each option of a ``TypedDict``."""
    hints = get_type_hints(options, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}
