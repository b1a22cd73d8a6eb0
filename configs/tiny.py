"""A model that two CPU cores train in minutes, on bytes of the standard library's
source.
"""

from __future__ import annotations

from configs.base import gpt2_recipe, training
from train.gpt2 import Shape
from train.titan_optim import CosineSchedule, MarsOptimizers
from train.trainer import MarsTrainer


def tiny_mars_adamw() -> MarsTrainer.Config:
    """MARS-AdamW, 0.85M parameters, 1400 steps of 2048 bytes."""
    return gpt2_recipe(
        name="tiny_mars_adamw",
        shape=Shape(
            num_layers=4,
            num_heads=4,
            width=128,
            block_size=128,
            vocab_size=257,
            inverse_layer_scale=False,
        ),
        tokenizer="bytes",
        data="data/python",
        # eager: at this size compiling the step costs half a minute and saves a few
        # seconds
        optimizer=MarsOptimizers.Config(
            mars_type="mars-adamw", lr=6e-3, weight_decay=0.01, compile=False
        ),
        lr_scheduler=CosineSchedule.Config(warmup_steps=100, min_lr=6e-4),
        training=training(
            local_batch_size=8, global_batch_size=16, seq_len=128, steps=1400
        ),
        validation_samples=1024,
        validation_interval=200,
        checkpoint_interval=200,
        log_freq=10,
        compile_model=False,
    )
