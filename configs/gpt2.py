"""GPT-2 as the MARS authors train it: 480 sequences of 1024 tokens a step, 50B tokens.

One step is 491,520 tokens, a run 100,000 steps, on OpenWebText; the global norm is
clipped at 1.0, and the first 2000 steps are warm-up.
"""

from __future__ import annotations

from configs.base import SHAPES, gpt2_recipe, training
from train.titan_optim import CosineSchedule, MarsOptimizers
from train.trainer import MarsTrainer


def _openwebtext(
    name: str,
    size: str,
    micro_batch: int,
    min_lr: float,
    optimizer: MarsOptimizers.Config,
) -> MarsTrainer.Config:
    return gpt2_recipe(
        name=name,
        shape=SHAPES[size],
        tokenizer="gpt2",
        data="data/openwebtext",
        optimizer=optimizer,
        lr_scheduler=CosineSchedule.Config(warmup_steps=2000, min_lr=min_lr),
        training=training(
            local_batch_size=micro_batch,
            global_batch_size=480,
            seq_len=1024,
            steps=100_000,
        ),
        validation_samples=24_000,  # the authors' 200 batches of 15 on 8 GPUs
        validation_interval=1000,
        checkpoint_interval=1000,
        log_freq=10,
        compile_model=True,
    )


def small_mars_adamw() -> MarsTrainer.Config:
    """124M, MARS-AdamW (AGI-Arena/MARS, config/train_gpt2_small_mars.py)."""
    return _openwebtext(
        "small_mars_adamw",
        "small",
        15,
        3e-5,
        MarsOptimizers.Config(
            mars_type="mars-adamw", lr=6e-3, lr_1d=3e-3, weight_decay=0.01, gamma=0.025
        ),
    )


def _mars_shampoo(name: str, size: str, micro_batch: int, min_lr: float, **rates):
    """The authors publish no MARS-Shampoo recipe: ``rates`` are those of their Muon."""
    optimizer = MarsOptimizers.Config(
        mars_type="mars-shampoo", weight_decay=0.0, gamma=0.025, **rates
    )
    return _openwebtext(name, size, micro_batch, min_lr, optimizer)


def small_mars_shampoo() -> MarsTrainer.Config:
    """124M, MARS-Shampoo, at Muon's rates."""
    return _mars_shampoo("small_mars_shampoo", "small", 15, 3e-5, lr=2e-2, lr_1d=3e-3)


def large_mars_shampoo() -> MarsTrainer.Config:
    """774M, MARS-Shampoo, at Muon's rates."""
    return _mars_shampoo("large_mars_shampoo", "large", 5, 1e-5, lr=6.67e-3, lr_1d=1e-3)


def xl_mars_shampoo() -> MarsTrainer.Config:
    """1.56B, MARS-Shampoo, at large's rates: a guess; planned here, never trained."""
    return _mars_shampoo("xl_mars_shampoo", "xl", 5, 1e-5, lr=6.67e-3, lr_1d=1e-3)
