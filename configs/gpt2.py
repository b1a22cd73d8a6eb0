"""GPT-2 as the MARS authors train it: 480 sequences of 1024 tokens a step, 100,000
steps, so 50B tokens, on 8 GPUs; warm-up 2000 steps, then a cosine; global clip 1.0.
The numbers: published.py.
"""

from __future__ import annotations

from configs.base import SHAPES, gpt2_recipe, training
from configs.published import GPUS, LR, ONE_RATE, RULES, SIZES
from train.engine.titan_optim import MarsOptimizers, RateSchedule
from train.engine.trainer import MarsTrainer

DATA = dict.fromkeys(("", "_4_bytes"), "data/openwebtext")
DATA |= {"_fw": "data/fineweb-edu"}


def optimizer(rule: str, lr: float, lr_1d: float, **options) -> MarsOptimizers.Config:
    """Of a row of ``RULES``; ``options`` are fields of ``MarsOptimizers.Config``."""
    row = RULES[rule]
    return MarsOptimizers.Config(
        mars_type=rule.replace("_", "-"),
        lr=lr,
        lr_1d=None if rule in ONE_RATE else lr_1d,
        betas=row.betas,
        weight_decay=row.matrices,
        embedding_weight_decay=row.embeddings,
        weight_decay_1d=row.vectors,
        **options,
    )


def recipe(size: str, rule: str, suffix: str = "") -> MarsTrainer.Config:
    """The configuration SIZE_RULE (OpenWebText) or SIZE_RULE_fw (FineWeb-Edu); or
    SIZE_RULE_4_bytes, whose tensors are stored otherwise.
    """
    numbers, lr = SIZES[size], LR[rule][size]
    min_lr = numbers.min_lr / RULES[rule].min_lr_divisor
    return gpt2_recipe(
        name=f"{size}_{rule}{suffix}",
        shape=SHAPES[size],
        tokenizer="gpt2",
        data=DATA[suffix],
        optimizer=optimizer(rule, lr, numbers.lr_1d),
        lr_scheduler=RateSchedule.Config(
            warmup_steps=2000, min_lr_factor=round(min_lr / lr, 12)
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
