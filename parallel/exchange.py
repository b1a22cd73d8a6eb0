"""Tensors from every rank to every rank, as flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

Shape = Sequence[int]


class Exchange:
    """An asynchronous all-to-all, launched by the constructor.

    Tensors travel flat, ordered by destination, with exact sizes: they may be uneven or
    empty, and nothing is padded.

    Args:
        sent: what each rank is to have of this one.
        shapes: of what each rank sends to this one.
        like: a tensor of the dtype and device that all travel in.
        group: the ranks.
    """

    def __init__(
        self,
        sent: Sequence[Sequence[Tensor]],
        shapes: Sequence[Sequence[Shape]],
        like: Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        to = [sum(x.numel() for x in part) for part in sent]
        self._shapes, self._of = shapes, [sum(map(prod, part)) for part in shapes]
        parts = [x.reshape(-1).to(like.dtype) for part in sent for x in part]
        self._leaving = torch.cat(parts) if parts else like.new_empty(0)
        self._arriving = like.new_empty(sum(self._of))
        self._work = dist.all_to_all_single(
            self._arriving, self._leaving, self._of, to, group=group, async_op=True
        )

    def wait(self) -> list[list[Tensor]]:
        """Return what has come from each rank; once."""
        self._work.wait()
        self._work = self._leaving = None  # gloo's work would keep it
        parts = self._arriving.split(self._of)
        return [unflatten(p, s) for p, s in zip(parts, self._shapes, strict=True)]


def unflatten(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Return consecutive parts of ``flat`` in these shapes; it may be longer."""
    sizes = [prod(shape) for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
