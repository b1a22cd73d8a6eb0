"""Recipes: functions that return a complete training configuration.

The name of a function is what --config takes. A recipe's file, and torchtitan with it,
is imported when the recipe is asked for: its numbers (published.py) need neither.
"""

import importlib
from collections.abc import Callable

HOMES = {
    "fineweb": (
        "large_moonlight_fw",
        "small_adamw_fw",
        "small_mars_adamw_fw",
        "small_mars_m_fw",
        "small_moonlight_fw",
        "xl_adamw_fw",
        "xl_mars_adamw_fw",
        "xl_mars_m_fw",
        "xl_moonlight_fw",
    ),
    "openwebtext": (
        "large_adamw",
        "large_lion",
        "large_mars_adamw",
        "large_mars_lion",
        "large_mars_m",
        "large_mars_shampoo",
        "large_moonlight",
        "large_moonlight_4_bytes",
        "large_muon",
        "medium_adamw",
        "medium_lion",
        "medium_mars_adamw",
        "medium_mars_lion",
        "medium_mars_m",
        "medium_mars_shampoo",
        "medium_moonlight",
        "medium_muon",
        "small_adamw",
        "small_lion",
        "small_mars_adamw",
        "small_mars_lion",
        "small_mars_m",
        "small_mars_shampoo",
        "small_moonlight",
        "small_muon",
        "xl_mars_shampoo",
        "xl_moonlight",
    ),
    "tiny": (
        "tiny_adamw",
        "tiny_lion",
        "tiny_mars_adamw",
        "tiny_mars_adamw_exact",
        "tiny_mars_adamw_gamma0",
        "tiny_mars_lion",
        "tiny_mars_m",
        "tiny_mars_shampoo",
        "tiny_moonlight",
        "tiny_muon",
        "tiny_nadamw",
        "tiny_soap",
        "tiny_soap_muon",
    ),
}  # the file of each recipe

__all__ = sorted(name for names in HOMES.values() for name in names)  # noqa: PLE0605


def __getattr__(name: str) -> Callable:
    for home, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"configs.{home}"), name)
    raise AttributeError(f"module 'configs' has no attribute {name!r}")
