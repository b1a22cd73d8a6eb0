"""Where the values of parameters lie: in a stack of their own where that is safe, else
where their owner put them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.stacks import own_rows


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
    """A stack (L, *shape) of which ``params`` are from now on the rows."""
    first = params[0]
    home = first.new_empty(len(params), *first.shape)
    rows = own_rows(home)
    torch._foreach_copy_(rows, list(params))
    for p, row in zip(params, rows, strict=True):
        p.data = row
    return home


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
