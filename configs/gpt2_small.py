"""GPT-2 small (124M) as the MARS authors publish it: 480 sequences of 1024 tokens a
step, 100,000 steps, 50B tokens.
"""

from __future__ import annotations

from configs.base import SHAPES, gpt2_recipe, training
from train.titan_optim import CosineSchedule, MarsOptimizers
from train.trainer import MarsTrainer


def small_mars_adamw() -> MarsTrainer.Config:
    """MARS-AdamW on OpenWebText (AGI-Arena/MARS, config/train_gpt2_small_mars.py)."""
    return gpt2_recipe(
        name="small_mars_adamw",
        shape=SHAPES["small"],
        tokenizer="gpt2",
        data="data/openwebtext",
        optimizer=MarsOptimizers.Config(
            mars_type="mars-adamw", lr=6e-3, lr_1d=3e-3, weight_decay=0.01, gamma=0.025
        ),
        lr_scheduler=CosineSchedule.Config(warmup_steps=2000, min_lr=3e-5),
        training=training(
            local_batch_size=15, global_batch_size=480, seq_len=1024, steps=100_000
        ),
        validation_samples=24_000,  # the authors' 200 batches of 15 on 8 GPUs
        validation_interval=1000,
        checkpoint_interval=1000,
        log_freq=10,
        compile_model=True,
    )
