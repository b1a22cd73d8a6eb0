"""Stacks: tensors of one shape next to each other in memory, so that (L, *shape) is a
view.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

ALIGNMENT = 64  # elements: a stack starts at a cache line in every dtype


def group_by(keys: Sequence[Hashable]) -> list[list[int]]:
    """Positions of equal keys, in the order in which each key came first."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def repeated(values: Sequence, times: int) -> Sequence:
    """``values``, each so many times in a row."""
    return values if times == 1 else [v for v in values for _ in range(times)]


def empty_stacks(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[Tensor]:
    """Tensors of these shapes, those of one dtype one after the other in one buffer."""
    found: dict[int, Tensor] = {}
    for members in group_by(dtypes):
        sizes = [torch.Size(shapes[i]).numel() for i in members]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        buffer = torch.empty(sum(padded), dtype=dtypes[members[0]], device=device)
        starts = accumulate([0, *padded[:-1]])
        for i, start, size in zip(members, starts, sizes, strict=True):
            found[i] = buffer[start : start + size].view(shapes[i])
    return [found[i] for i in range(len(shapes))]


def adjacent(leaves: Sequence[Tensor]) -> Tensor | None:
    """The stack (L, *shape) of which contiguous ``leaves`` are already the rows, as a
    view; None where they do not lie one after the other in one storage, or nowhere
    (fake tensors have no addresses).
    """
    first = leaves[0]
    if len(leaves) == 1:
        return first.unsqueeze(0)
    if is_fake(first) or not first.is_contiguous() or first.numel() == 0:
        return None
    start, size, step = first.data_ptr(), first.shape, first.nbytes
    for i, leaf in enumerate(leaves):
        if (
            leaf.data_ptr() != start + i * step
            or leaf.shape != size
            or leaf.dtype != first.dtype
            or not leaf.is_contiguous()
        ):
            return None
    # neighbours by chance, in storages of their own, are no stack
    end = first.storage_offset() * first.itemsize + len(leaves) * step
    if end > first.untyped_storage().nbytes():
        return None
    return first.as_strided(
        (len(leaves), *size), (first.numel(), *first.stride()), first.storage_offset()
    )


def where_or_unread(ok: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """torch.where(ok, new, old), whose compiled code reads ``old`` only where ``ok`` is
    false: a load behind a mask. Written in place it then costs a write alone.

    Args:
        ok: bool, broadcast over ``new``.
        new, old: of one shape and dtype.
    """
    if torch.compiler.is_compiling():
        axes = [
            torch.arange(n, device=old.device).view(-1, *[1] * (old.ndim - 1 - dim))
            for dim, n in enumerate(old.shape)
        ]
        hidden = ok.logical_not().expand(old.shape)
        old = torch.ops.aten._unsafe_masked_index(old, hidden, axes, 0)
    return torch.where(ok, new, old)


def stacked(leaves: Sequence[Tensor]) -> Tensor:
    """``leaves`` as (L, *shape): a view where they are adjacent, else a copy."""
    if torch.compiler.is_compiling():  # addresses mean nothing there
        return torch.stack(list(leaves))
    found = adjacent(leaves)
    return torch.stack(list(leaves)) if found is None else found
