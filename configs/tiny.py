"""A model that two CPU cores train in minutes, on bytes of the standard library's
source: one recipe for each optimizer.
"""

from __future__ import annotations

from configs.base import gpt2_recipe, training
from configs.gpt2 import optimizer
from train.engine.titan_optim import RateSchedule
from train.engine.trainer import MarsTrainer
from train.gpt2 import Shape


def _tiny(
    name: str, rule: str, lr: float, *, warmup_steps: int = 100, **options
) -> MarsTrainer.Config:
    """``rule`` at peak rate ``lr``, with the decay and betas of the published recipes.

    Rates are near the best of short sweeps, or guesses for what ``research.compare``
    sweeps; ``options`` are fields of ``MarsOptimizers.Config``.
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
        optimizer=optimizer(
            rule,
            lr,
            lr_1d=3e-3,
            ns_dtype="float32",  # bf16 products are slow on most CPUs
            # at this size compiling the step costs half a minute, saves a few seconds
            compile=False,
            **options,
        ),
        lr_scheduler=RateSchedule.Config(warmup_steps=warmup_steps, min_lr_factor=0.1),
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
    return _tiny("tiny_adamw", "adamw", lr=4e-3)


def tiny_nadamw() -> MarsTrainer.Config:
    """NAdamW: AdamW with Nesterov's momentum."""
    return _tiny("tiny_nadamw", "nadamw", lr=6e-3)


def tiny_lion() -> MarsTrainer.Config:
    """Lion."""
    return _tiny("tiny_lion", "lion", lr=1e-3)


def tiny_muon() -> MarsTrainer.Config:
    """Muon, which orthogonalizes the embeddings' step too."""
    return _tiny("tiny_muon", "muon", lr=2e-2)


def tiny_moonlight() -> MarsTrainer.Config:
    """Moonlight, as ``marsopt.for_model`` builds it: embeddings by AdamW."""
    return _tiny("tiny_moonlight", "moonlight", lr=1.3e-2, warmup_steps=0)


def tiny_soap() -> MarsTrainer.Config:
    """SOAP: embeddings by AdamW."""
    return _tiny("tiny_soap", "soap", lr=1.2e-2)


def tiny_soap_muon() -> MarsTrainer.Config:
    """SOAP-Muon, factors of the short sides alone."""
    return _tiny("tiny_soap_muon", "soap_muon", lr=1.2e-2, sides="short")


def tiny_mars_adamw() -> MarsTrainer.Config:
    """MARS-AdamW."""
    return _tiny("tiny_mars_adamw", "mars_adamw", lr=6e-3)


def tiny_mars_adamw_gamma0() -> MarsTrainer.Config:
    """MARS-AdamW that corrects nothing: AdamW with the per-tensor clip."""
    return _tiny("tiny_mars_adamw_gamma0", "mars_adamw", lr=6e-3, gamma=0.0)


def tiny_mars_adamw_exact() -> MarsTrainer.Config:
    """Exact MARS-AdamW: two gradients a step."""
    return _tiny("tiny_mars_adamw_exact", "mars_adamw", lr=6e-3, correction="exact")


def tiny_mars_lion() -> MarsTrainer.Config:
    """MARS-Lion."""
    return _tiny("tiny_mars_lion", "mars_lion", lr=1e-3)


def tiny_mars_shampoo() -> MarsTrainer.Config:
    """MARS-Shampoo, which orthogonalizes the embeddings' step too."""
    return _tiny("tiny_mars_shampoo", "mars_shampoo", lr=3e-2)


def tiny_mars_m() -> MarsTrainer.Config:
    """MARS-M: embeddings by AdamW."""
    return _tiny("tiny_mars_m", "mars_m", lr=6e-3)
