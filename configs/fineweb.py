"""Recipes on FineWeb-Edu. A docstring names the authors' script (AGI-Arena/MARS)."""

from __future__ import annotations

from configs.gpt2 import recipe
from train.engine.trainer import MarsTrainer


def small_adamw_fw() -> MarsTrainer.Config:
    """124M, AdamW: scripts/run_adamw_small_fw.sh."""
    return recipe("small", "adamw", "_fw")


def xl_adamw_fw() -> MarsTrainer.Config:
    """1.56B, AdamW: scripts/run_adamw_xl_fw.sh."""
    return recipe("xl", "adamw", "_fw")


def small_mars_adamw_fw() -> MarsTrainer.Config:
    """124M, MARS-AdamW: scripts/run_mars_small_fw.sh."""
    return recipe("small", "mars_adamw", "_fw")


def xl_mars_adamw_fw() -> MarsTrainer.Config:
    """1.56B, MARS-AdamW: scripts/run_mars_xl_fw.sh."""
    return recipe("xl", "mars_adamw", "_fw")


def small_mars_m_fw() -> MarsTrainer.Config:
    """124M, MARS-M: MARS_M/scripts/run_mars_m_small_fw.sh."""
    return recipe("small", "mars_m", "_fw")


def xl_mars_m_fw() -> MarsTrainer.Config:
    """1.56B, MARS-M: MARS_M/scripts/run_mars_m_xl_fw.sh."""
    return recipe("xl", "mars_m", "_fw")


def small_moonlight_fw() -> MarsTrainer.Config:
    """124M, Moonlight: MARS_M/scripts/run_moonlight_small_fw.sh."""
    return recipe("small", "moonlight", "_fw")


def large_moonlight_fw() -> MarsTrainer.Config:
    """774M, Moonlight: MARS_M/scripts/run_moonlight_xl_fw.sh.

    That script names the configuration of GPT-2 large in spite of its own name.
    """
    return recipe("large", "moonlight", "_fw")


def xl_moonlight_fw() -> MarsTrainer.Config:
    """1.56B, Moonlight: config/train_gpt2_xl_moonlight.py, which no script names."""
    return recipe("xl", "moonlight", "_fw")
