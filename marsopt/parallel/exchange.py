"""Innermost: one all-to-all, or one all-gather, of tensors as flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Shape = Sequence[int]

# torch 2.13 has another name for it, and warns of this name
all_gather = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor that arrives."""

    shape: Shape
    dtype: torch.dtype

    def num_words(self, words: torch.dtype) -> int:
        """Return how many elements of the dtype ``words`` it takes."""
        return prod(self.shape) * (self.dtype.itemsize // words.itemsize)


def to_words(x: Tensor, words: torch.dtype) -> Tensor:
    """Return the bits of ``x`` as a flat tensor of the dtype ``words``, which must not
    be wider than ``x``'s.
    """
    return x.reshape(-1).contiguous().view(words)


def from_words(flat: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Return the tensors at the start of ``flat``, their bits one after the other."""
    sizes = [spec.num_words(flat.dtype) for spec in specs]
    parts = flat[: sum(sizes)].split(sizes)
    return [
        # wider tensors need not begin at a multiple of their width
        (part if spec.dtype == flat.dtype else part.clone().view(spec.dtype)).view(
            tuple(spec.shape)
        )
        for part, spec in zip(parts, specs, strict=True)
    ]


class Exchange:
    """An asynchronous all-to-all, launched by the constructor.

    Tensors travel flat, ordered by destination, with exact sizes: they may be uneven or
    empty, and nothing is padded.

    Args:
        sent: the tensors that this rank sends to each rank.
        shapes: of the tensors that each rank sends to this rank.
        like: an empty tensor of their dtype, on their device.
        group: the ranks.
    """

    def __init__(
        self,
        sent: Sequence[Sequence[Tensor]],
        shapes: Sequence[Sequence[Shape]],
        like: Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        flat = [[x.reshape(-1) for x in part] for part in sent]
        sizes = [sum(map(len, part)) for part in flat]
        self._specs = [[TensorSpec(s, like.dtype) for s in part] for part in shapes]
        self._sizes = [sum(map(prod, part)) for part in shapes]
        tensors = [x for part in flat for x in part]
        self._leaving: Tensor | None = torch.cat(tensors) if tensors else like
        self._arriving = like.new_empty(sum(self._sizes))
        self._work = dist.all_to_all_single(
            self._arriving,
            self._leaving,
            self._sizes,
            sizes,
            group=group,
            async_op=True,
        )

    def wait(self) -> list[list[Tensor]]:
        """Wait, and return the tensors from each rank. May be called once."""
        self._work.wait()
        self._work = self._leaving = None  # gloo's work would keep it
        parts = self._arriving.split(self._sizes)
        return [from_words(p, s) for p, s in zip(parts, self._specs, strict=True)]


class Gather:
    """An asynchronous all-gather, launched by the constructor.

    Tensors travel flat, padded to the rank that sends most.

    Args:
        sent: the tensors that this rank sends to all.
        specs: of the tensors that each rank sends.
        words: an empty tensor on their device, of the narrowest dtype among them: bits
            travel as this dtype.
        group: the ranks.
    """

    def __init__(
        self,
        sent: Sequence[Tensor],
        specs: Sequence[Sequence[TensorSpec]],
        words: Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        self._specs = specs
        most = max(sum(s.num_words(words.dtype) for s in part) for part in specs)
        self._width = max(1, most)
        flat = [to_words(x, words.dtype) for x in sent]
        padding = words.new_zeros(self._width - sum(map(len, flat)))
        self._leaving: Tensor | None = torch.cat([*flat, padding])
        self._arriving = words.new_empty(len(specs) * self._width)
        self._work = all_gather(
            self._arriving, self._leaving, group=group, async_op=True
        )

    def wait(self) -> list[list[Tensor]]:
        """Wait, and return the tensors from each rank. May be called once."""
        self._work.wait()
        self._work = self._leaving = None
        parts = self._arriving.split(self._width)
        return [from_words(p, s) for p, s in zip(parts, self._specs, strict=True)]
