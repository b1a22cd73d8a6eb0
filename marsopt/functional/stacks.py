"""Stacks: tensors of one shape next to each other in memory, so that (L, *shape) is a
view; and whose memory that is: rows that look like tensors of their own, and parameters
that move into a stack where that is safe.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.dlpack import to_dlpack

ALIGNMENT = 64  # elements: a stack starts at a cache line in every dtype

Item = TypeVar("Item")


def group_by(keys: Sequence[Hashable]) -> list[list[int]]:
    """Positions of equal keys, in the order in which each key came first."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def repeated(values: Sequence[Item], times: int) -> Sequence[Item]:
    """``values``, each so many times in a row."""
    return values if times == 1 else [v for v in values for _ in range(times)]


def empty_stacks(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[Tensor]:
    """Tensors of these shapes, those of one dtype one after the other in one buffer."""
    views: dict[int, Tensor] = {}
    for members in group_by(dtypes):
        sizes = [torch.Size(shapes[i]).numel() for i in members]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        buffer = torch.empty(sum(padded), dtype=dtypes[members[0]], device=device)
        starts = accumulate([0, *padded[:-1]])
        for i, start, size in zip(members, starts, sizes, strict=True):
            views[i] = buffer[start : start + size].view(shapes[i])
    return [views[i] for i in range(len(shapes))]


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
    stack = adjacent(leaves)
    return torch.stack(list(leaves)) if stack is None else stack


# ---- whose memory --------------------------------------------------------------------


def separate_tensors(stack: Tensor) -> list[Tensor]:
    """The rows of ``stack`` as tensors of their own: same memory, but each with a
    storage that starts at its row and ends with it.

    Whoever saves, shares or counts tensors by their storage (torch.save, safetensors,
    accelerate) then meets one row, not the whole stack; a row keeps the stack alive.
    DLPack is how torch makes such a storage, on every device that computes.
    """
    rows = stack.detach().unbind()
    if is_fake(stack) or stack.device.type == "meta":
        return list(rows)  # they have no memory
    # by capsule: the protocol's Python side would take most of the time
    return [torch.from_dlpack(to_dlpack(row)) for row in rows]


def known_stack(leaves: Sequence[Tensor], known: Mapping[int, Tensor]) -> Tensor | None:
    """The stack among ``known`` (by address) of which ``leaves`` are the own rows."""
    if is_fake(leaves[0]) or leaves[0].numel() == 0:
        return None
    stack = known.get(leaves[0].data_ptr())
    if stack is None or stack.shape != (len(leaves), *leaves[0].shape):
        return None
    start, step, strides = stack.data_ptr(), stack[0].nbytes, stack.stride()[1:]
    are_rows = all(
        (x.data_ptr(), x.stride(), x.dtype) == (start + i * step, strides, stack.dtype)
        for i, x in enumerate(leaves)
    )
    return stack if are_rows else None


def can_relocate(piece: Tensor, whole: Tensor) -> bool:
    """Whether a parameter's values can change their address unnoticed.

    They must be all of a storage that nobody else looks into: tied weights by hand,
    flattened buffers, shared memory and FSDP's shards stay where they are.
    """
    if piece is not whole or not piece.is_contiguous() or piece.numel() == 0:
        return False
    if is_fake(piece):
        return False
    storage = piece.untyped_storage()
    if storage.nbytes() != piece.nbytes or piece.device.type == "meta":
        return False
    if piece.device.type == "cpu" and (piece.is_shared() or piece.is_pinned()):
        return False
    # one reference is the tensor's, one that of `storage` itself
    return torch._C._storage_Use_Count(storage._cdata) == 2


def flatten_into_stack(params: Sequence[Tensor]) -> Tensor:
    """Return a flat buffer (L, *shape) of which ``params`` are from now on the rows."""
    first = params[0]
    flat = first.new_empty(len(params), *first.shape)
    rows = separate_tensors(flat)
    torch._foreach_copy_(rows, list(params))
    for p, row in zip(params, rows, strict=True):
        p.data = row
    return flat


def check_overlap(labelled: Sequence[tuple[Tensor, str]]) -> None:
    """Raises ValueError where two parameters share memory: each would move it.

    Of those that are not contiguous (columns of one matrix, say) nothing is known.
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for p, label in labelled:
        if p.numel() and p.is_contiguous() and p.device.type != "meta":
            start = int(p.storage_offset()) * p.itemsize
            storage = p.untyped_storage()._cdata
            spans.setdefault(storage, []).append((start, start + p.nbytes, label))
    for intervals in spans.values():
        intervals.sort()
        for (_, end, label), (start, _, other) in zip(
            intervals, intervals[1:], strict=False
        ):
            if start < end:
                raise ValueError(
                    f"got {label} and {other} in the same memory, expected parameters "
                    "of their own: tie weights by using one Parameter twice, as "
                    "GPT-2's head and embedding do"
                )
