"""Parts: every tensor of a step is (P, n), and a part has one row of scalars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt.rules.algorithm import Algorithm
from marsopt.step.owners import rows_here


@dataclass(frozen=True)
class Parts:
    """The parts of a tensor's elements that lie here: runs in memory, in order, each of
    one matrix and with one norm.

    Args:
        sizes: elements of each part.
        norms: the number of each part's norm among the tensor's norms. A norm may have
            several parts, and parts on other ranks.
        matrices: the number of each part's matrix among all matrices of the tensor; 0
            if all have one shape.
        num_norms: norms of the whole tensor.
    """

    sizes: tuple[int, ...]
    norms: tuple[int, ...]
    matrices: tuple[int, ...]
    num_norms: int = 1

    @property
    def num(self) -> int:
        return len(self.sizes)

    def equal(self) -> Parts:
        """Return the same elements as parts of one size, so that they are (P, n)."""
        if len(set(self.sizes)) == 1:
            return self
        unit = math.gcd(*self.sizes)
        times = [size // unit for size in self.sizes]
        norms, matrices = (
            tuple(n for n, num in zip(numbers, times, strict=True) for _ in range(num))
            for numbers in (self.norms, self.matrices)
        )
        return Parts((unit,) * sum(times), norms, matrices, self.num_norms)

    def repeated(self, num: int) -> Parts:
        """Return the parts of ``num`` such tensors, one behind the other."""
        norms = [i * self.num_norms + n for i in range(num) for n in self.norms]
        sizes, matrices = self.sizes * num, self.matrices * num
        return Parts(sizes, tuple(norms), matrices, num * self.num_norms)


def dense_view(x: Tensor, parts: Parts) -> Tensor | None:
    """Return a tensor (P, n) over the memory of ``x``; None if that has gaps or negated
    values, or if the parts are no runs. It is no view of ``x``, whose dims Dynamo would
    guard: writes into it are counted by ``Graphs.finish``.
    """
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    if x.is_neg():
        return None
    if not x.is_contiguous() and (
        parts.num > 1 or not x.permute(order).is_contiguous()
    ):
        return None
    size = parts.num, parts.sizes[0]
    memory = torch.empty(0, dtype=x.dtype, device=x.device)
    return memory.set_(x.untyped_storage(), x.storage_offset(), size, (size[1], 1))


def laid_as(x: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of ``other`` in this dtype that lies in memory as ``x``."""
    return torch.empty_like(x, dtype=dtype).copy_(other.view_as(x))


def has_several_parts(algorithm: Algorithm, shape: torch.Size) -> bool:
    """Return whether a tensor of this shape has more than one norm, or matrices of
    several shapes.
    """
    if algorithm.matrix_only and not algorithm.matrices.is_even(shape):
        return True
    return algorithm.num_norms(shape) > 1


def parts_of(
    algorithm: Algorithm, shape: torch.Size, piece: Tensor, cuts: Mapping[int, Tensor]
) -> Parts:
    """Return the parts of a piece of a tensor.

    Args:
        algorithm: the algorithm that moves it.
        shape: of the whole tensor.
        piece: the elements that lie here.
        cuts: of the tensor, as ``Collectives.cuts`` returns them.
    """
    matrices, norms = algorithm.matrices, algorithm.num_norms(shape)
    needs_shapes = algorithm.matrix_only and not matrices.is_even(shape)
    size = piece.numel()
    if not has_several_parts(algorithm, shape):
        return Parts((size,), (0,), (0,))
    if not size:
        return Parts((0,), (0,), (0,), norms)
    runs = rows_here(shape, cuts, matrices)
    cols = size // sum(length for _, length in runs)
    return Parts(
        tuple(length * cols for _, length in runs),
        tuple(matrix if norms > 1 else 0 for matrix, _ in runs),
        tuple(matrix if needs_shapes else 0 for matrix, _ in runs),
        norms,
    )


def scales_of(algorithm: Algorithm, shape: torch.Size, parts: Parts) -> Iterator[float]:
    """Yield the factor of the learning rate of each part, by the shape of its whole
    matrix.
    """
    preconditioner = algorithm.matrix_preconditioner
    shapes = algorithm.matrices.part_shapes(shape)
    scales = [preconditioner.scale(*matrix) for matrix in shapes]
    return (scales[matrix % len(scales)] for matrix in parts.matrices)


class Position(NamedTuple):
    """The numbers of a piece's elements in the whole tensor: element i of a part has
    the number base + i // run * stride + i % run.
    """

    base: int
    run: int
    stride: int


def positions_of(
    shape: torch.Size, piece: torch.Size, cuts: Mapping[int, Tensor], parts: Parts
) -> list[Position] | None:
    """Return the positions of the parts of a piece; None: its numbers have no such
    form, and ``owners.flat_indices`` lists them.

    Args:
        shape: of the whole tensor.
        piece: shape of the piece that lies here.
        cuts: of the tensor, as ``Collectives.cuts`` returns them.
        parts: of the piece.
    """
    if not piece.numel():
        return [Position(0, 1, 0)] * parts.num
    strides = [*accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)][::-1]
    base, inner = 0, len(shape)
    for dim, indices in cuts.items():
        first = int(indices[0])
        if not torch.equal(
            indices.cpu(), torch.arange(first, first + len(indices), device="cpu")
        ):
            return None
        base += first * strides[dim]
        if dim > 0:
            if inner != len(shape):
                return None
            inner = dim
    starts = [*accumulate(parts.sizes, initial=0)][:-1]
    if inner == len(shape):
        return [Position(base + start, piece.numel(), 0) for start in starts]
    run, stride = piece[inner:].numel(), strides[inner - 1]
    if any(start % run for start in starts):
        return None
    return [Position(base + start // run * stride, run, stride) for start in starts]


def numbers_of_elements(positions: Tensor, shape: torch.Size) -> Tensor:
    """Return the numbers of the elements of parts (P, n) in whole tensors, int64, from
    ``Leaf.positions``: ``Position`` of each part (P, 3), or a number of each element.
    """
    if positions.ndim == 1:
        return positions.view(shape)
    i = torch.arange(shape[1], device=positions.device)
    base, run, stride = positions[:, :, None].unbind(1)
    return base + i // run * stride + i % run
