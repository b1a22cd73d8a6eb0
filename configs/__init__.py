"""Recipes: functions that return a complete training configuration.

The name of a function is what --config takes.
"""

from configs.gpt2 import (
    large_mars_shampoo,
    small_mars_adamw,
    small_mars_shampoo,
    xl_mars_shampoo,
)
from configs.tiny import tiny_mars_adamw, tiny_mars_shampoo

__all__ = [
    "large_mars_shampoo",
    "small_mars_adamw",
    "small_mars_shampoo",
    "tiny_mars_adamw",
    "tiny_mars_shampoo",
    "xl_mars_shampoo",
]
