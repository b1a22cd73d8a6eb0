"""Recipes on OpenWebText. A docstring names the authors' script (AGI-Arena/MARS), or
says why the recipe is ours.
"""

from __future__ import annotations

from configs.gpt2 import recipe
from train.engine.trainer import MarsTrainer


def small_adamw() -> MarsTrainer.Config:
    """124M, AdamW: scripts/run_adamw_small.sh."""
    return recipe("small", "adamw")


def medium_adamw() -> MarsTrainer.Config:
    """355M, AdamW: scripts/run_adamw_medium.sh."""
    return recipe("medium", "adamw")


def large_adamw() -> MarsTrainer.Config:
    """774M, AdamW: scripts/run_adamw_large.sh."""
    return recipe("large", "adamw")


def small_mars_adamw() -> MarsTrainer.Config:
    """124M, MARS-AdamW: scripts/run_mars_small.sh."""
    return recipe("small", "mars_adamw")


def medium_mars_adamw() -> MarsTrainer.Config:
    """355M, MARS-AdamW: scripts/run_mars_medium.sh."""
    return recipe("medium", "mars_adamw")


def large_mars_adamw() -> MarsTrainer.Config:
    """774M, MARS-AdamW: scripts/run_mars_large.sh."""
    return recipe("large", "mars_adamw")


def small_muon() -> MarsTrainer.Config:
    """124M, Muon: scripts/run_muon_small.sh."""
    return recipe("small", "muon")


def medium_muon() -> MarsTrainer.Config:
    """355M, Muon: scripts/run_muon_medium.sh."""
    return recipe("medium", "muon")


def large_muon() -> MarsTrainer.Config:
    """774M, Muon: scripts/run_muon_large.sh."""
    return recipe("large", "muon")


def small_moonlight() -> MarsTrainer.Config:
    """124M, Moonlight: MARS_M/scripts/run_moonlight_small.sh."""
    return recipe("small", "moonlight")


def medium_moonlight() -> MarsTrainer.Config:
    """355M, Moonlight: MARS_M/scripts/run_moonlight_medium.sh."""
    return recipe("medium", "moonlight")


def large_moonlight() -> MarsTrainer.Config:
    """774M, Moonlight: MARS_M/scripts/run_moonlight_large.sh."""
    return recipe("large", "moonlight")


def large_moonlight_4_bytes() -> MarsTrainer.Config:
    """774M, large_moonlight's numbers: weights of 24 bits, averages of 8; ours, never
    trained.
    """
    config = recipe("large", "moonlight", "_4_bytes")
    config.training.dtype = "bfloat16"
    config.optimizer.master_weight_bits, config.optimizer.state_dtype = 24, "int8"
    return config


def xl_moonlight() -> MarsTrainer.Config:
    """1.56B, Moonlight: ours, xl_moonlight_fw's numbers; never trained."""
    return recipe("xl", "moonlight")


def small_mars_m() -> MarsTrainer.Config:
    """124M, MARS-M: MARS_M/scripts/run_mars_m_small.sh."""
    return recipe("small", "mars_m")


def medium_mars_m() -> MarsTrainer.Config:
    """355M, MARS-M: MARS_M/scripts/run_mars_m_medium.sh."""
    return recipe("medium", "mars_m")


def large_mars_m() -> MarsTrainer.Config:
    """774M, MARS-M: MARS_M/scripts/run_mars_m_large.sh."""
    return recipe("large", "mars_m")


def small_lion() -> MarsTrainer.Config:
    """124M, Lion: ours, from AdamW's rates."""
    return recipe("small", "lion")


def medium_lion() -> MarsTrainer.Config:
    """355M, Lion: ours, from AdamW's rates."""
    return recipe("medium", "lion")


def large_lion() -> MarsTrainer.Config:
    """774M, Lion: ours, from AdamW's rates."""
    return recipe("large", "lion")


def small_mars_lion() -> MarsTrainer.Config:
    """124M, MARS-Lion: ours, at Lion's rates."""
    return recipe("small", "mars_lion")


def medium_mars_lion() -> MarsTrainer.Config:
    """355M, MARS-Lion: ours, at Lion's rates."""
    return recipe("medium", "mars_lion")


def large_mars_lion() -> MarsTrainer.Config:
    """774M, MARS-Lion: ours, at Lion's rates."""
    return recipe("large", "mars_lion")


def small_mars_shampoo() -> MarsTrainer.Config:
    """124M, MARS-Shampoo: ours, at Muon's rates."""
    return recipe("small", "mars_shampoo")


def medium_mars_shampoo() -> MarsTrainer.Config:
    """355M, MARS-Shampoo: ours, at Muon's rates."""
    return recipe("medium", "mars_shampoo")


def large_mars_shampoo() -> MarsTrainer.Config:
    """774M, MARS-Shampoo: ours, at Muon's rates."""
    return recipe("large", "mars_shampoo")


def xl_mars_shampoo() -> MarsTrainer.Config:
    """1.56B, MARS-Shampoo: ours, at large's rates; planned, never trained."""
    return recipe("xl", "mars_shampoo")
