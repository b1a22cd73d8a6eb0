"""Recipes: every public function returns a complete training configuration; its name is
what --config takes.
"""

from configs.gpt2_small import small_mars_adamw
from configs.tiny import tiny_mars_adamw

__all__ = ["small_mars_adamw", "tiny_mars_adamw"]
