"""Attention as a GPU takes it: a torch without CUDA has no fused kernels to choose
from, and would write out all T x T weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)  # that FlashAttention takes


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention over (batch, heads, time, head width), by FlashAttention or, in
    float32, by the memory-efficient kernel.

    Raises:
        ValueError: a mask, or grouped heads, for which an H100 chooses otherwise.
    """
    if attn_mask is not None or enable_gqa:
        raise ValueError(
            "got attention with a mask or grouped heads, expected neither: only what "
            "GPT-2 needs is rehearsed"
        )
    qkv, aten = (query, key, value), torch.ops.aten
    if query.dtype in HALF:
        flash = aten._scaled_dot_product_flash_attention
        return flash(*qkv, dropout_p, is_causal, False, scale=scale)[0]
    efficient = aten._scaled_dot_product_efficient_attention
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in qkv)
    return efficient(*qkv, None, keep, dropout_p, is_causal, scale=scale)[0]


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Let ``scaled_dot_product_attention`` of CUDA tensors be what torch's order of
    preference gives on an H100. (cuDNN's kernel, which some releases prefer in half
    precision, keeps the same tensors for its backward pass.)
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        for key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", _fused, key)
        yield
