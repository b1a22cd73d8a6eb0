"""Recipes: functions that return a complete training configuration.

The name of a function is what --config takes.
"""

from configs.gpt2 import (
    large_mars_shampoo,
    small_mars_adamw,
    small_mars_shampoo,
    xl_mars_shampoo,
)
from configs.tiny import (
    tiny_adamw,
    tiny_lion,
    tiny_mars_adamw,
    tiny_mars_adamw_exact,
    tiny_mars_adamw_gamma0,
    tiny_mars_lion,
    tiny_mars_m,
    tiny_mars_shampoo,
    tiny_moonlight,
    tiny_muon,
)

__all__ = [
    "large_mars_shampoo",
    "small_mars_adamw",
    "small_mars_shampoo",
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
    "xl_mars_shampoo",
]
