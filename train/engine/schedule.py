"""Learning rates: factors on the peak rate, linear from 0 in all, then each its own
way to ``floor``.

``step`` counts from 0; ``warmup`` and ``total`` are steps, ``floor`` a factor.
"""

import math


def cosine(step: int, *, warmup: int, total: int, floor: float) -> float:
    """Return half a cosine from 1 to ``floor`` at ``total`` (the authors' get_lr)."""
    if step < warmup:
        return step / warmup
    if step >= total:
        return floor
    progress = (step - warmup) / (total - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def linear(step: int, *, warmup: int, total: int, floor: float) -> float:
    """Return a straight line from 1 after the warm-up to ``floor`` at ``total``."""
    return wsd(step, warmup=warmup, total=total, decay=total - warmup, floor=floor)


def wsd(step: int, *, warmup: int, total: int, decay: int, floor: float) -> float:
    """Return warm-up, stable, decay: 1, but for a straight line to ``floor`` in the
    last ``decay`` steps (Hu et al., arXiv 2404.06395; the MARS-M scripts: a fifth).
    """
    if step < warmup:
        return step / warmup
    if step >= total:
        return floor
    return floor + (1 - floor) * min(1.0, (total - step) / decay)
