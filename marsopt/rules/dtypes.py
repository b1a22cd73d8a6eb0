"""In which precision a step computes."""

from __future__ import annotations

import torch
from torch import Tensor


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32 for half precision, else its own."""
    return torch.promote_types(tensor.dtype, torch.float32)


def working(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in its working dtype."""
    return tensor.to(working_dtype(tensor))
