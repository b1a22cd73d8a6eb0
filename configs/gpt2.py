"""GPT-2 as the MARS authors train it: 480 sequences of 1024 tokens a step, 100,000
steps, so 50B tokens, on 8 GPUs; warm-up 2000 steps, then a cosine; global clip 1.0.

All numbers of these recipes stand in three tables. What the authors ran is followed
where it differs from what they wrote (AGI-Arena/MARS, commit 4831e28; docs/recipes.md):

- Their gradient is the sum over micro-steps: 4 or 12 times the mean when it meets the
  clip at 1.0. ``micro_steps`` keeps that factor on any number of GPUs.
- Muon and MARS-Shampoo orthogonalize the embeddings' step too; MARS-M and Moonlight
  give embeddings to AdamW.
- MARS-M decays by 0.01, as its configurations say; its README says 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.base import SHAPES, gpt2_recipe, training
from train.engine.titan_optim import MarsOptimizers, RateSchedule
from train.engine.trainer import MarsTrainer

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


# Lion, and MARS-Lion with it: decay 3 times AdamW's, so that lr x decay is AdamW's (its
# paper's advice), and a third of its final rate. MARS-M and Moonlight decay everything
# alike. Momentum rules have the first of betas alone.
RULES = {
    "adamw": Decay(0.1, 0.0, 0.0, betas=(0.9, 0.95)),
    "lion": Decay(0.3, 0.0, 0.0, betas=(0.9, 0.99), min_lr_divisor=3),
    "muon": Decay(0.0, 0.0, 0.1),
    "moonlight": Decay(0.1, 0.1, 0.1),
    "mars_adamw": Decay(0.01, 0.0, 0.1),
    "mars_lion": Decay(0.3, 0.0, 0.1, min_lr_divisor=3),
    "mars_shampoo": Decay(0.0, 0.0, 0.1),
    "mars_m": Decay(0.01, 0.01, 0.01),
}

# rules that move LayerNorm weights at the matrices' rate
ONE_RATE = ("adamw", "lion", "moonlight", "mars_m")

DATA = {"": "data/openwebtext", "_fw": "data/fineweb-edu"}


def optimizer(rule: str, lr: float, lr_1d: float, **options) -> MarsOptimizers.Config:
    """Of a row of ``RULES``; ``options`` are fields of ``MarsOptimizers.Config``."""
    row = RULES[rule]
    if rule in ONE_RATE:
        lr_1d = lr
    return MarsOptimizers.Config(
        mars_type=rule.replace("_", "-"),
        lr=lr,
        lr_1d=lr_1d,
        betas=row.betas,
        weight_decay=row.matrices,
        embedding_weight_decay=row.embeddings,
        weight_decay_1d=row.vectors,
        **options,
    )


def recipe(
    size: str, rule: str, suffix: str = "", *, variant: str = "", **options
) -> MarsTrainer.Config:
    """The configuration SIZE_RULE (OpenWebText) or SIZE_RULE_fw (FineWeb-Edu), or a
    ``variant`` of it, with these ``options`` of ``MarsOptimizers.Config``.
    """
    numbers, lr = SIZES[size], LR[rule][size]
    return gpt2_recipe(
        name=f"{size}_{rule}{variant}{suffix}",
        shape=SHAPES[size],
        tokenizer="gpt2",
        data=DATA[suffix],
        optimizer=optimizer(rule, lr, numbers.lr_1d, **options),
        lr_scheduler=RateSchedule.Config(
            warmup_steps=2000, min_lr=numbers.min_lr / RULES[rule].min_lr_divisor
        ),
        training=training(
            local_batch_size=numbers.micro_batch,
            global_batch_size=GPUS * numbers.micro_batch * numbers.micro_steps,
            seq_len=1024,
            steps=100_000,
        ),
        # of the 4330 windows held out of OpenWebText what every divisor of 480 divides;
        # the authors draw 200 micro-batches of one GPU at random
        validation_samples=3840,
        validation_interval=1000,
        checkpoint_interval=1000,
        log_freq=10,
        compile_model=True,
        num_summed=numbers.micro_steps,
    )
