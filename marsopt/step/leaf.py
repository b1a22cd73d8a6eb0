"""Leaves: every tensor of a step is (P, n), and each of its P parts has one norm and
one row of scalars. A pack copies several tensors into a leaf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.rules.component import Algorithm
from marsopt.rules.numerics import hashed, scalar_dtype
from marsopt.step.owners import Collectives, OwnedTensors, rows_here

SMALL = 4096  # elements; a copy of fewer costs less than a call of a graph
WIDTH = 64  # elements of a row of small tensors, or a divisor: a cache line or more


class Parts(NamedTuple):
    """The parts of a tensor's elements that lie here: runs of one size in memory, in
    order, each of one matrix.
    """

    size: int  # elements of a part
    norms: tuple[int, ...]  # of each part, the number of its norm in the tensor
    matrices: tuple[int, ...]  # of each part, the number of its matrix in the tensor
    num_norms: int  # of the whole tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.norms), self.size


def parts_of(
    algorithm: Algorithm, shape: torch.Size, piece: Tensor, cuts: Mapping[int, Tensor]
) -> Parts:
    """Return the parts of a piece of a tensor.

    Args:
        algorithm: the algorithm that updates it.
        shape: of the whole tensor.
        piece: the elements that lie here.
        cuts: of the tensor, as ``Collectives.cuts`` returns them.
    """
    matrices, norms = algorithm.matrices, algorithm.num_norms(shape)
    if not has_several_parts(algorithm, shape) or not piece.numel():
        return Parts(piece.numel(), (0,), (0,), norms)
    runs = rows_here(shape, cuts, matrices)
    # runs of several sizes become parts of the largest size that divides all of them
    rows = math.gcd(*(length for _, length in runs))
    numbers = [number for number, length in runs for _ in range(length // rows)]
    return Parts(
        piece.numel() // len(numbers),
        tuple(number if norms > 1 else 0 for number in numbers),
        tuple(numbers),
        norms,
    )


def has_several_parts(algorithm: Algorithm, shape: torch.Size) -> bool:
    """Return whether a tensor of this shape has more than one norm, or matrices of
    several shapes.
    """
    if algorithm.matrix_only and not algorithm.matrices.is_even(shape):
        return True
    return algorithm.num_norms(shape) > 1


class Leaf(NamedTuple):
    """A tensor of a step, or several tensors one behind the other, without gradient:
    the pieces that lie here, as parts (P, n).
    """

    x: Tensor
    buffers: Mapping[str, Tensor]  # by symbol, those at home in shards, and h, like x
    params: Sequence[Tensor]  # as the user holds them: DTensors, too
    num_norms: Sequence[int]  # of each of the params
    norms: Sequence[int]  # (P,) of each part, the number of its norm in the leaf
    scales: Sequence[float] = ()  # (P,) of the learning rate, by shapes of matrices
    seeds: Sequence[int] = ()  # (P,) of the noise of stochastic rounding
    shape: torch.Size = torch.Size()  # of the piece of one of the params
    # (): the piece is contiguous, and the parts are views of it. Other strides: the
    # parts are its memory in that order. None: they are a copy, in row order.
    strides: tuple[int, ...] | None = None
    owned: Sequence[OwnedTensors] = ()  # of each param, the buffers at its owners

    @property
    def operands(self) -> dict[str, Tensor]:
        """Return x and all buffers by name."""
        return {"x": self.x, **self.buffers}

    def laid_out(self, piece: Tensor) -> Tensor:
        """Return a tensor whose memory has the order of this leaf's: a piece, or a copy
        of it if it has another layout.
        """
        is_laid = piece.stride() == self.strides
        if not self.strides:
            is_laid = piece.is_contiguous()
        if is_laid and not piece.is_neg():
            return piece
        memory = piece.new_empty(self.x.numel())
        laid = memory.view(self.shape)
        if self.strides:
            laid = memory.as_strided(self.shape, self.strides)
        return laid.copy_(piece)

    def as_parts(self, piece: Tensor) -> Tensor:
        """Return the memory of a piece that is laid out as this leaf, (P, n)."""
        if self.strides is None:
            return piece.reshape(self.x.shape)
        return memory_of(self.laid_out(piece), self.x.shape)

    def as_pieces(self, parts: Tensor) -> Sequence[Tensor]:
        """Return the piece of each of the params, from values (P, n)."""
        if len(self.params) > 1:
            return parts.view(len(self.params), *self.shape).unbind()
        if not self.strides:
            return [parts.view(self.shape)]
        start = parts.storage_offset()
        return [parts.as_strided(self.shape, self.strides, start)]


def memory_of(piece: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the memory of a dense tensor as (P, n). It is no view of ``piece``, whose
    dims Dynamo would guard: nothing counts writes into it.
    """
    parts = torch.empty(0, dtype=piece.dtype, device=piece.device)
    start, size = piece.storage_offset(), torch.Size(shape)
    return parts.set_(piece.untyped_storage(), start, size, (size[1], 1))


def common_dtype(tensors: Iterable[Tensor | None], default: torch.dtype) -> torch.dtype:
    """Return the dtype that holds all tensors, ``default`` if there are none."""
    dtypes = {x.dtype for x in tensors if x is not None}
    return reduce(torch.promote_types, dtypes) if dtypes else default


def is_dense(piece: Tensor, num_parts: int) -> bool:
    """Return whether the memory of a tensor has no gaps and no negated values, and
    whether parts are runs of it: several parts are, if elements lie in their order.
    """
    if piece.is_neg():
        return False
    if piece.is_contiguous():
        return True
    order = sorted(range(piece.ndim), key=piece.stride, reverse=True)
    return num_parts == 1 and piece.permute(order).is_contiguous()


def scales_of(
    algorithm: Algorithm, shape: torch.Size, matrices: Iterable[int]
) -> list[float]:
    """Return the factor of the learning rate of each part, by the shape of its whole
    matrix; nothing for an elementwise algorithm.
    """
    if not algorithm.matrix_only:
        return []
    preconditioner = algorithm.matrix_preconditioner
    shapes = algorithm.matrices.part_shapes(shape)
    scales = [preconditioner.scale(*matrix) for matrix in shapes]
    return [scales[matrix % len(scales)] for matrix in matrices]


def seeds_of(
    number: int, shape: torch.Size, cuts: Mapping[int, Tensor], num_parts: int
) -> list[int]:
    """Return the seed of each part of a piece: of its tensor's number, of the piece's
    first element in the whole tensor, which replicas share, and of its number.
    """
    strides = [*accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)][::-1]
    known = {dim: i for dim, i in cuts.items() if len(i) and not is_fake(i)}
    first = sum(int(i[0]) * strides[dim] for dim, i in known.items())
    return row_seeds(hashed(hashed(number) ^ first), num_parts)


def row_seeds(seed: int, num: int) -> list[int]:
    """Return the seeds of rows; the only row has this seed."""
    return [hashed(seed ^ row) if row else seed for row in range(num)]


# ---- which rows of tables belong together --------------------------------------------


class Index(NamedTuple):
    """Maps between the tensors of a formula, their N norms and their P parts. A map is
    None if it changes nothing: each norm has one part, each tensor one norm.
    """

    num_norms: int  # N
    norm_of_part: Tensor | None  # (P,) int64
    parts_of_norm: Tensor | None  # (N, most) int64, filled up with P
    tensor_of_norm: Tensor | None  # (N,) int64
    first_norm: Tensor | None  # of each tensor, int64
    scales: Tensor | None  # (P,) of the learning rate; None: elementwise
    seeds: Tensor | None  # (P,) int64, of the noise; None: nothing is rounded by it

    @property
    def is_identity(self) -> bool:
        """Whether each tensor has one norm, and each norm one part."""
        maps = self.norm_of_part, self.parts_of_norm, self.tensor_of_norm
        return all(x is None for x in maps)

    def sums(self, products: Tensor) -> Tensor:
        """Return the sums of norms (N, pairs), from the sums of parts (P, pairs)."""
        if self.parts_of_norm is None:
            return products
        return F.pad(products, (0, 0, 0, 1))[self.parts_of_norm].sum(1)

    def of_norms(self, values: Tensor) -> Tensor:
        """Return a value of each norm (N,), from one of each tensor."""
        return values if self.tensor_of_norm is None else values[self.tensor_of_norm]

    def of_parts(self, values: Tensor) -> Tensor:
        """Return a value of each part (P,), from one of each norm."""
        return values if self.norm_of_part is None else values[self.norm_of_part]

    def of_tensors(self, values: Tensor) -> Tensor:
        """Return a value of each tensor, from one of each norm: its first."""
        return values if self.first_norm is None else values[self.first_norm]


def index_of(leaves: Sequence[Leaf], has_noise: bool) -> Index:
    """Return the index of the leaves of one formula."""
    norms: list[int] = []  # Dynamo traces this, but no list[int]()
    tensors: list[int] = []
    firsts: list[int] = []
    for leaf in leaves:
        norms += [len(tensors) + number for number in leaf.norms]
        for num in leaf.num_norms:
            firsts.append(len(tensors))
            tensors += [len(firsts) - 1] * num
    x = leaves[0].x

    def table(numbers: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=x.device)

    norm_of_part = parts_of_norm = None
    if norms != list(range(len(tensors))):
        norm_of_part = table(norms)
        rows: list[list[int]] = [[] for _ in tensors]
        for part, norm in enumerate(norms):
            rows[norm].append(part)
        most = max(map(len, rows))
        parts_of_norm = table([r + [len(norms)] * (most - len(r)) for r in rows])
    is_each = firsts == tensors
    scales = [scale for leaf in leaves for scale in leaf.scales]
    seeds = [seed for leaf in leaves for seed in leaf.seeds]
    return Index(
        len(tensors),
        norm_of_part,
        parts_of_norm,
        None if is_each else table(tensors),
        None if is_each else table(firsts),
        table(scales, scalar_dtype(x.device)) if scales else None,
        table(seeds) if has_noise else None,
    )


def leaf_of(
    algorithm: Algorithm,
    shape: torch.Size,
    piece: Tensor,
    params: Sequence[Tensor],
    collectives: Collectives,
    number: int,
) -> tuple[Leaf, Parts]:
    """Return a leaf without its tensors, and the parts of the piece of each of its
    params.

    Args:
        algorithm: the algorithm that updates it.
        shape: of one whole parameter.
        piece: the elements of it that lie here.
        params: one, or several of this shape that lie one behind the other.
        collectives: of the ranks that hold the parameters.
        number: of the leaf among all leaves of a step, on every rank.
    """
    rounds = algorithm.has_noise
    asks = rounds or has_several_parts(algorithm, shape)
    cuts = collectives.cuts(params[0]) if asks else {}
    parts = parts_of(algorithm, shape, piece, cuts)
    num = parts.num_norms
    norms = [i * num + norm for i in range(len(params)) for norm in parts.norms]
    scales = scales_of(algorithm, shape, parts.matrices) * len(params)
    seeds = seeds_of(number, shape, cuts, len(norms)) if rounds else []
    none = piece.new_empty(len(norms), 0)
    nums = [num] * len(params)
    return Leaf(none, {}, params, nums, norms, scales, seeds, piece.shape), parts


# ---- small tensors of a CPU, and tensors with gaps in memory -------------------------


class Copy(NamedTuple):
    """Rows (R, n), and the tensors that a step copies in and out."""

    rows: Tensor
    views: list[Tensor]  # of the rows, shaped as the tensors
    held: list[Tensor]
    # the tensors' memory in 1-D, and zeros, that fill the rows: joining them takes a
    # third of the time of copying; None if a tensor is not contiguous
    lines: list[Tensor] | None = None


class Pack:
    """Tensors of one formula, one behind the other in rows (R, n): each row is a part.

    Args:
        num_columns: how many scalars a part has.
        leaves: a leaf without its tensors for each of the tensors.
        parts: the parts of each tensor.
        xs: the tensors' pieces.
        buffers: the buffers of each tensor, by symbol.
    """

    def __init__(
        self,
        num_columns: int,
        leaves: Sequence[Leaf],
        parts: Sequence[Parts],
        xs: Sequence[Tensor],
        buffers: Sequence[dict[str, Tensor]],
    ) -> None:
        several = [p.size for p in parts if len(p.norms) > 1]
        width = math.gcd(WIDTH, *several)
        if len(leaves) == 1:  # a tensor with gaps keeps its parts
            width = parts[0].size
        norms, self._starts, self._held = list[int](), list[int](), [*xs]
        scales, nums, seeds = list[float](), list[int](), list[int]()
        for leaf, (size, norms_of_parts, *_) in zip(leaves, parts, strict=True):
            self._starts.append(len(norms) * width)
            for norm in norms_of_parts:
                num_rows = -(-size // width) if width else 1
                norms += [sum(nums) + norm] * num_rows
            # replicas may lie behind other tensors on other ranks
            seeds += [row for seed in leaf.seeds for row in row_seeds(seed, num_rows)]
            nums += leaf.num_norms
            scales += leaf.scales
        # Dynamo specializes on 1, and compiles equal sizes as one symbol: R as one of
        # these would cost another graph
        while len(leaves) > 1 and len(norms) in (1, width, num_columns):
            norms.append(0)
            seeds.append(0)
        self._shape = len(norms), width
        symbols = list(buffers[0])
        columns = [[*xs], *([tensors[s] for tensors in buffers] for s in symbols)]
        self._copies = [self._copy(column) for column in columns]
        tensors = [copy.rows for copy in self._copies]
        first = leaves[0]
        self.leaf = Leaf(
            tensors[0],
            dict(zip(symbols, tensors[1:], strict=True)),
            [p for leaf in leaves for p in leaf.params],
            nums,
            norms,
            scales,
            seeds,
            first.shape,
            None,
            [tensors for leaf in leaves for tensors in leaf.owned],
        )
        self._g, self._gs = self._empty(xs[0].dtype)
        self._zero = torch.zeros((), device=xs[0].device)

    def _empty(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return rows (R, n), and views of them shaped as the tensors."""
        rows = torch.zeros(self._shape, dtype=dtype, device=self._held[0].device)
        flat = rows.view(-1)
        pairs = zip(self._starts, self._held, strict=True)
        return rows, [flat[i : i + x.numel()].view(x.shape) for i, x in pairs]

    def _copy(self, held: list[Tensor]) -> Copy:
        """Return empty rows for tensors."""
        rows, views = self._empty(held[0].dtype)
        if not all(t.is_contiguous() and not t.is_neg() for t in held):
            return Copy(rows, views, held)
        lines = []
        slots = pairwise([*self._starts, rows.numel()])
        for (start, stop), tensor in zip(slots, held, strict=True):
            num = tensor.numel()
            # no views: torch.utils.swap_tensors refuses a tensor that has views
            lines += [
                memory_of(tensor, (1, num))[0],
                rows.new_zeros(stop - start - num),
            ]
        # a rank may have no element of all these tensors
        return Copy(rows, views, held, [x for x in lines if x.numel()] or None)

    def gather(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Copy x and the buffers in; return the gradients (R, n), with zeros for
        missing ones.
        """
        for copy in self._copies:
            if copy.lines is not None:
                torch.cat(copy.lines, out=copy.rows.view(-1))
            else:
                torch._foreach_copy_(copy.views, copy.held)
        dtype = common_dtype(grads, self._g.dtype)
        if dtype != self._g.dtype:
            self._g, self._gs = self._empty(dtype)
        zero, present = self._zero.to(self._g.dtype), list[Tensor]()
        for g, view in zip(grads, self._gs, strict=True):
            present.append(zero.expand_as(view) if g is None else g)
        torch._foreach_copy_(self._gs, present)
        return self._g

    def scatter(self) -> None:
        """Copy x and the buffers out."""
        for copy in self._copies:
            torch._foreach_copy_(copy.held, copy.views)
