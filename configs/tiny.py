"""A model that two CPU cores train in minutes, on bytes of the standard library's
source: one recipe for each optimizer.
"""

from __future__ import annotations

from configs.base import gpt2_recipe, training
from train.gpt2 import Shape
from train.titan_optim import CosineSchedule, MarsOptimizers
from train.trainer import MarsTrainer


def _tiny(name: str, mars_type: str, lr: float, **options) -> MarsTrainer.Config:
    """``mars_type`` at peak rate ``lr`` with the published recipes' other numbers, the
    rate falling to a tenth.
    """
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
        optimizer=MarsOptimizers.Config(
            mars_type=mars_type,
            lr=lr,
            ns_dtype="float32",  # bf16 products are slow on most CPUs
            # at this size compiling the step costs half a minute, saves a few seconds
            compile=False,
            **options,
        ),
        lr_scheduler=CosineSchedule.Config(warmup_steps=100, min_lr=lr / 10),
        training=training(
            local_batch_size=8, global_batch_size=16, seq_len=128, steps=1400
        ),
        validation_samples=1024,
        validation_interval=200,
        checkpoint_interval=200,
        log_freq=10,
        compile_model=False,
    )


def tiny_adamw() -> MarsTrainer.Config:
    """AdamW, 0.84M parameters, 1400 steps of 2048 bytes."""
    return _tiny("tiny_adamw", "adamw", 4e-3, betas=(0.9, 0.95), weight_decay=0.1)


def tiny_lion() -> MarsTrainer.Config:
    """Lion."""
    return _tiny("tiny_lion", "lion", 1e-3, betas=(0.9, 0.99), weight_decay=0.1)


def tiny_muon() -> MarsTrainer.Config:
    """Muon."""
    return _tiny("tiny_muon", "muon", 2e-2)


def tiny_moonlight() -> MarsTrainer.Config:
    """Moonlight."""
    return _tiny("tiny_moonlight", "moonlight", 6e-3, weight_decay=0.1)


def tiny_mars_adamw() -> MarsTrainer.Config:
    """MARS-AdamW."""
    return _tiny("tiny_mars_adamw", "mars-adamw", 6e-3, weight_decay=0.01)


def tiny_mars_adamw_gamma0() -> MarsTrainer.Config:
    """MARS-AdamW that corrects nothing: AdamW with the per-tensor clip."""
    return _tiny(
        "tiny_mars_adamw_gamma0", "mars-adamw", 6e-3, weight_decay=0.01, gamma=0.0
    )


def tiny_mars_adamw_exact() -> MarsTrainer.Config:
    """Exact MARS-AdamW: twice the gradients a step."""
    return _tiny(
        "tiny_mars_adamw_exact", "mars-adamw", 6e-3, weight_decay=0.01, exact=True
    )


def tiny_mars_lion() -> MarsTrainer.Config:
    """MARS-Lion."""
    return _tiny("tiny_mars_lion", "mars-lion", 1e-3, weight_decay=0.01)


def tiny_mars_shampoo() -> MarsTrainer.Config:
    """MARS-Shampoo, which orthogonalizes the embeddings' step too."""
    return _tiny("tiny_mars_shampoo", "mars-shampoo", 3e-2, weight_decay=0.01)


def tiny_mars_m() -> MarsTrainer.Config:
    """MARS-M."""
    return _tiny("tiny_mars_m", "mars-m", 6e-3, weight_decay=0.01)
