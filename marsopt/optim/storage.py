"""Whose memory is whose: flat buffers whose rows look like tensors of their own, and
parameters that move into them where that is safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.dlpack import to_dlpack


def own_rows(stack: Tensor) -> list[Tensor]:
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
    alike = (
        stack is not None
        and stack.shape == (len(leaves), *leaves[0].shape)
        and all(x.dtype == stack.dtype for x in leaves)
    )
    return stack if alike and are_rows(leaves, stack) else None


def are_rows(leaves: Sequence[Tensor], stack: Tensor) -> bool:
    """Whether ``leaves``, of the shape and dtype of its rows, lie where these do."""
    start, step = stack.data_ptr(), stack[0].nbytes
    return all(
        x.data_ptr() == start + i * step and x.stride() == stack.stride()[1:]
        for i, x in enumerate(leaves)
    )


def may_move(piece: Tensor, whole: Tensor) -> bool:
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


def move_in(params: Sequence[Tensor]) -> Tensor:
    """Return a flat buffer (L, *shape) of which ``params`` are from now on the rows."""
    first = params[0]
    flat = first.new_empty(len(params), *first.shape)
    rows = own_rows(flat)
    torch._foreach_copy_(rows, list(params))
    for p, row in zip(params, rows, strict=True):
        p.data = row
    return flat


def check_apart(labelled: Sequence[tuple[Tensor, str]]) -> None:
    """Raises ValueError where two parameters share memory: each would move it.

    Of those that are not contiguous (columns of one matrix, say) nothing is known.
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for p, label in labelled:
        if p.numel() and p.is_contiguous() and p.device.type != "meta":
            start = p.storage_offset() * p.itemsize
            storage = p.untyped_storage()._cdata
            spans.setdefault(storage, []).append((start, start + p.nbytes, label))
    for found in spans.values():
        found.sort()
        for (_, end, one), (start, _, other) in zip(found, found[1:], strict=False):
            if start < end:
                raise ValueError(
                    f"got {one} and {other} in the same memory, expected parameters of "
                    "their own: tie weights by using one Parameter twice, as GPT-2's "
                    "head and embedding do"
                )
