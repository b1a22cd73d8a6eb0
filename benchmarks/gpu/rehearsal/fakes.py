"""Fake tensors that move into stacks as tensors of a GPU do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from marsopt.functional import stacks
from marsopt.optim import buckets, layout

BYTES = 2**60  # more than any storage has


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
