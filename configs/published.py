"""The numbers of the recipes for GPT-2, in three tables; nothing here needs torchtitan.

What the authors ran is followed where it differs from what they wrote (AGI-Arena/MARS,
commit 4831e28; docs/recipes.md):

- Their gradient is the sum over micro-steps: 4 or 12 times the mean when it meets the
  clip at 1.0. ``micro_steps`` keeps that factor on any number of GPUs.
- Muon and MARS-Shampoo orthogonalize the embeddings' step too; MARS-M and Moonlight
  give embeddings to AdamW.
- MARS-M decays by 0.01, as its configurations say; its README says 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass

GPUS = 8


@dataclass(frozen=True)
class Size:
    """What depends on the model's size alone."""

    micro_batch: int  # sequences per GPU and micro-step
    micro_steps: int  # GPUS x micro_batch x micro_steps = 480
    min_lr: float
    lr_1d: float  # peak, of LayerNorm weights where they have a rate of their own


SIZES = {
    "small": Size(micro_batch=15, micro_steps=4, min_lr=3e-5, lr_1d=3e-3),
    "medium": Size(micro_batch=15, micro_steps=4, min_lr=6e-5, lr_1d=1.5e-3),
    "large": Size(micro_batch=5, micro_steps=12, min_lr=1e-5, lr_1d=1e-3),
    "xl": Size(micro_batch=5, micro_steps=12, min_lr=1e-5, lr_1d=1e-3),
}

# Peak learning rates. Not published: MARS-Shampoo (Muon's: the same orthogonal step),
# Lion (a third of AdamW's, the upper end of "3 to 10 times smaller" in its paper, arXiv
# 2302.06675, section 5), MARS-Lion (Lion's, so that the two differ in the correction)
# and xl_mars_shampoo (large's: a guess).
LR = {
    "adamw": {"small": 6e-4, "medium": 3e-4, "large": 2e-4, "xl": 2e-4},
    "lion": {"small": 2e-4, "medium": 1e-4, "large": 6.67e-5},
    "muon": {"small": 2e-2, "medium": 1e-2, "large": 6.67e-3},
    "moonlight": {"small": 6e-3, "medium": 5e-3, "large": 5e-3, "xl": 3e-3},
    "mars_adamw": {"small": 6e-3, "medium": 3e-3, "large": 2e-3, "xl": 2e-3},
    "mars_lion": {"small": 2e-4, "medium": 1e-4, "large": 6.67e-5},
    "mars_shampoo": {"small": 2e-2, "medium": 1e-2, "large": 6.67e-3, "xl": 6.67e-3},
    "mars_m": {"small": 6e-3, "medium": 5e-3, "large": 5e-3, "xl": 3e-3},
}


@dataclass(frozen=True)
class Decay:
    """What depends on the rule alone."""

    matrices: float  # weight decay
    embeddings: float
    vectors: float  # LayerNorm weights
    betas: tuple[float, float] = (0.95, 0.99)
    min_lr_divisor: float = 1.0  # of the size's


# NAdamW, SOAP and SOAP-Muon are of no published recipe: NAdamW's numbers are those of a
# short sweep of configs.tiny's model, SOAP's its authors' defaults (arXiv 2409.11321).
# Lion, and MARS-Lion with it: decay 3 times AdamW's, so that lr x decay is AdamW's (its
# paper's advice), and a third of its final rate. MARS-M and Moonlight decay everything
# alike. Momentum rules have the first of betas alone.
RULES = {
    "adamw": Decay(0.1, 0.0, 0.0, betas=(0.9, 0.95)),
    "nadamw": Decay(0.01, 0.0, 0.0, betas=(0.9, 0.99)),
    "lion": Decay(0.3, 0.0, 0.0, betas=(0.9, 0.99), min_lr_divisor=3),
    "muon": Decay(0.0, 0.0, 0.1),
    "moonlight": Decay(0.1, 0.1, 0.1),
    "mars_adamw": Decay(0.01, 0.0, 0.1),
    "mars_lion": Decay(0.3, 0.0, 0.1, min_lr_divisor=3),
    "mars_shampoo": Decay(0.0, 0.0, 0.1),
    "mars_m": Decay(0.01, 0.01, 0.01),
    "soap": Decay(0.01, 0.01, 0.01, betas=(0.95, 0.95)),
    "mars_soap": Decay(0.01, 0.01, 0.01, betas=(0.95, 0.95)),
    "soap_muon": Decay(0.1, 0.1, 0.1, betas=(0.95, 0.95)),
    "mars_soap_muon": Decay(0.1, 0.1, 0.1, betas=(0.95, 0.95)),
}

# rules that move LayerNorm weights at the matrices' rate
ONE_RATE = (
    *("adamw", "nadamw", "lion", "moonlight", "mars_m"),
    *("soap", "mars_soap", "soap_muon", "mars_soap_muon"),
)
