"""Whole programs over fake CUDA tensors: models that move to the GPU, attention, and
parameters that move into stacks as on a real one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from benchmarks.gpu.rehearsal.attention import fused_attention
from benchmarks.gpu.rehearsal.device import h100
from benchmarks.gpu.rehearsal.lowering import Graph, Runner, lowering
from marsopt.functional import stacks
from marsopt.optim import buckets, layout

BYTES = 2**60  # more than any storage has


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


@contextlib.contextmanager
def fake_h100(
    run: Callable[[Graph, fx.GraphModule], Runner] | None = None,
    *,
    triton: bool = True,
    boxed: bool = False,
) -> Iterator[list[Graph]]:
    """Let everything within happen on the fake tensors of one H100.

    Args:
        run, boxed: of ``lowering``: what runs in place of a graph.
        triton: whether Triton is here; without it nothing compiles.

    Yields:
        The graphs that were compiled so far.
    """
    with (
        h100(triton=triton),
        lowering(run, boxed=boxed) if triton else _nothing() as graphs,
        fused_attention(),
        addresses(),
        mock.patch.object(nn.Module, "to", _to),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield graphs


@contextlib.contextmanager
def _nothing() -> Iterator[list[Any]]:
    yield []
