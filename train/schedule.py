"""The recipes' learning rate: linear from 0, then cosine to min_lr (the authors'
get_lr).
"""

from __future__ import annotations

import math


def cosine(step: int, *, warmup: int, total: int, floor: float) -> float:
    """Factor on the peak rate at 0-based ``step``: step/warmup, then cosine to
    ``floor`` at ``total``, then ``floor``.
    """
    if step < warmup:
        return step / warmup
    if step >= total:
        return floor
    progress = (step - warmup) / (total - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
