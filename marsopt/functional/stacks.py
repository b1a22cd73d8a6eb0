"""Stacks: tensors of one shape as one tensor (L, *shape)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 64  # elements: a stack starts at a cache line in every dtype


def group_by(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the positions of equal keys, in the order of their first positions."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def empty_stacks(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[Tensor]:
    """Tensors of these shapes; tensors of one dtype lie one after the other in one
    buffer.
    """
    views: dict[int, Tensor] = {}
    for members in group_by(dtypes):
        sizes = [torch.Size(shapes[i]).numel() for i in members]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        buffer = torch.empty(sum(padded), dtype=dtypes[members[0]], device=device)
        starts = accumulate([0, *padded[:-1]])
        for i, start, size in zip(members, starts, sizes, strict=True):
            views[i] = buffer[start : start + size].view(shapes[i])
    return [views[i] for i in range(len(shapes))]


def check_overlap(labelled: Sequence[tuple[Tensor, str]]) -> None:
    """Raise ValueError if two parameters share memory: each would move it.

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
