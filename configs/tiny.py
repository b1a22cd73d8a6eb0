"""A model that two CPU cores train in minutes, on bytes of the standard library's
source.
"""

from __future__ import annotations

from configs.base import gpt2_recipe, training
from train.gpt2 import Shape
from train.titan_optim import CosineSchedule, MarsOptimizers
from train.trainer import MarsTrainer


def _tiny(name: str, min_lr: float, optimizer: MarsOptimizers.Config):
    return gpt2_recipe(
        name=name,
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
        optimizer=optimizer,
        lr_scheduler=CosineSchedule.Config(warmup_steps=100, min_lr=min_lr),
        training=training(
            local_batch_size=8, global_batch_size=16, seq_len=128, steps=1400
        ),
        validation_samples=1024,
        validation_interval=200,
        checkpoint_interval=200,
        log_freq=10,
        compile_model=False,
    )


# eager: at this size compiling the step costs half a minute and saves a few seconds


def tiny_mars_adamw() -> MarsTrainer.Config:
    """MARS-AdamW, 0.84M parameters, 1400 steps of 2048 bytes."""
    return _tiny(
        "tiny_mars_adamw",
        6e-4,
        MarsOptimizers.Config(
            mars_type="mars-adamw", lr=6e-3, weight_decay=0.01, compile=False
        ),
    )


def tiny_mars_shampoo() -> MarsTrainer.Config:
    """The same with MARS-Shampoo."""
    return _tiny(
        "tiny_mars_shampoo",
        3e-3,
        MarsOptimizers.Config(
            mars_type="mars-shampoo",
            lr=3e-2,
            weight_decay=0.01,
            compile=False,
            ns_dtype="float32",  # bf16 products are slow on most CPUs
        ),
    )
