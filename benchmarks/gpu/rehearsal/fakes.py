"""Whole programs over fake CUDA tensors: models that move to the GPU, attention, and
parameters that move into stacks as on a real one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from benchmarks.gpu.rehearsal.device import h100
from benchmarks.gpu.rehearsal.lowering import Graph, Runner, lowering
from marsopt.functional import stacks
from marsopt.optim import buckets, layout

BYTES = 2**60  # more than any storage has
HALF = (torch.float16, torch.bfloat16)  # that FlashAttention takes


def _to(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Move a module; ``nn.Module.to`` itself cannot swap fake parameters."""
    for part in module.modules():
        for name, p in part.named_parameters(recurse=False):
            made = nn.Parameter(p.detach().to(device), p.requires_grad)
            part.register_parameter(name, made)
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    return module


def _address(tensor: Tensor) -> int:
    """Return a number that two fake tensors share where they begin at one element."""
    base = tensor.untyped_storage()._cdata * BYTES
    return base + tensor.storage_offset() * tensor.itemsize


def _rows(stack: Tensor) -> list[Tensor]:
    """Return the rows of a stack; fake ones have no storage of their own."""
    return [*stack.detach().unbind()]


@contextlib.contextmanager
def addresses() -> Iterator[None]:
    """Let parameters move into stacks, from which fake tensors are kept, since they
    have no addresses: here storages are told apart as if they had.
    """
    with contextlib.ExitStack() as patches:
        enter = patches.enter_context
        enter(mock.patch.object(FakeTensor, "data_ptr", _address, create=True))
        for module in (stacks, layout):
            enter(mock.patch.object(module, "is_fake", lambda tensor: False))
        for module in (stacks, buckets):
            enter(mock.patch.object(module, "separate_tensors", _rows))
        yield


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


@contextlib.contextmanager
def fake_h100(
    run: Callable[[Graph, fx.GraphModule], Runner] | None = None,
    *,
    boxed: bool = False,
) -> Iterator[list[Graph]]:
    """Let everything within happen on the fake tensors of one H100; yield the graphs
    that were compiled so far.

    Args:
        run, boxed: of ``lowering``: what runs in place of a graph.
    """
    with (
        h100(),
        lowering(run, boxed=boxed) as graphs,
        fused_attention(),
        addresses(),
        mock.patch.object(nn.Module, "to", _to),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield graphs
