"""How a mesh cuts a parameter: which axes cut which dims, and the matrices in it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as AxisPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from marsopt.rules.component import MatrixInput, MatrixOutput
from marsopt.rules.matrices import Matrices

InOut = TypeVar("InOut", MatrixInput, MatrixOutput)


@dataclass(frozen=True)
class Placement:
    """The axes of a mesh that cut a tensor, and the dims that they cut. A plain tensor
    has empty fields.
    """

    mesh: DeviceMesh | None = None
    # mesh axes that the pieces are spread over, and the dim that each of them cuts
    axes: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()
    consecutive: tuple[bool, ...] = ()  # whether each cuts into consecutive pieces

    @classmethod
    def of(cls, leaf: Tensor) -> Placement:
        """Return the placement of a parameter."""
        if not isinstance(leaf, DTensor):
            return cls()
        sizes = leaf.device_mesh.shape  # an axis of one rank cuts nothing
        cuts = {
            a: p
            for a, p in enumerate(leaf.placements)
            if sizes[a] > 1 and not p.is_replicate()
        }
        dims = tuple(dim_of(p) % leaf.ndim for p in cuts.values())
        consecutive = tuple(type(p) is Shard for p in cuts.values())
        return cls(leaf.device_mesh, tuple(cuts), dims, consecutive)

    @property
    def common(self) -> tuple[Hashable, ...]:
        """Return the part that is equal on all ranks: meshes are different objects."""
        extent = None if self.mesh is None else tuple(self.mesh.shape)
        return extent, self.axes, self.dims, self.consecutive


def dim_of(placement: AxisPlacement) -> int:
    """Return the dim that a placement cuts; it must not be Replicate."""
    return cast(Shard, placement).dim  # as strided shards have it too


def shard_sizes(size: int, num_ranks: int) -> list[int]:
    """Return the length of each rank's piece of a dim, as Shard cuts it: as
    torch.chunk, then empty.
    """
    chunk = max(1, -(-size // num_ranks))
    return [max(0, min(chunk, size - rank * chunk)) for rank in range(num_ranks)]


def piece_of(
    whole: Tensor, mesh: DeviceMesh, placements: Sequence[AxisPlacement]
) -> Tensor:
    """Return this rank's piece of a tensor that every rank has whole."""
    # src_data_rank=None: nothing is sent
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def groups_of(
    mesh: DeviceMesh,
) -> list[tuple[dist.ProcessGroup, tuple[int, ...]]]:
    """Return process groups that together span a mesh, each with the axes that it
    spans: the default group for all axes, if it has the same ranks.
    """
    axes = tuple(axis for axis in range(mesh.ndim) if mesh.size(axis) > 1)
    if len(axes) > 1 and mesh.size() == dist.get_world_size():
        world, first = dist.group.WORLD, mesh.get_group(axes[0])
        assert world is not None  # a mesh has initialized it
        # another backend need not carry the tensors of the mesh
        if dist.get_backend_config(world) == dist.get_backend_config(first):
            return [(world, axes)]
    return [(mesh.get_group(axis), (axis,)) for axis in axes]


# ---- one axis cuts a matrix ----------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A matrix that one mesh axis cuts along ``dim``.

    Args:
        rows, cols: of the whole matrix.
        dim: 0 if rows are cut, 1 if columns are.
        lengths: of the pieces along ``dim``, rank by rank; None = as Shard cuts. If a
            parameter has several matrices, each may begin and end on any rank.
    """

    rows: int
    cols: int
    dim: int
    lengths: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    def shards(self, num_ranks: int) -> list[tuple[int, int]]:
        """Return the shapes of the shards, rank by rank."""
        sizes = self.lengths or shard_sizes(self.shape[self.dim], num_ranks)
        if self.dim == 0:
            return [(size, self.cols) for size in sizes]
        return [(self.rows, size) for size in sizes]


class MatrixSpec(NamedTuple):
    """The matrices of a leaf, and whether their owners have buffers."""

    matrices: Matrices
    has_buffers: bool


@dataclass(frozen=True)
class Cut:
    """How one mesh axis cuts the matrices of a leaf.

    Other axes may cut its batch of matrices: they decide which matrices a rank has.
    """

    mesh: DeviceMesh
    axis: int
    copies: int | None  # the axis of replicas, if there is exactly one
    num_batches: int  # on this rank; a leaf of a single matrix is a batch
    blocks: tuple[Matrix, ...]  # a batch's matrices, from its first row to its last
    rank: int  # along the axis

    @property
    def matrices(self) -> list[Matrix]:
        """Return the matrices of this rank's batches, in order."""
        return [*self.blocks] * self.num_batches

    def split(self, piece: Tensor) -> list[Tensor]:
        """Return the piece of each matrix, from the leaf's piece."""
        if piece.ndim == 2 and len(self.blocks) == 1:
            return [piece]
        ranks = self.mesh.size(self.axis)
        shapes = [block.shards(ranks)[self.rank] for block in self.blocks]
        sizes, cols = [rows for rows, _ in shapes], shapes[0][1]
        batches = piece.reshape(self.num_batches, sum(sizes), cols)
        return [part for batch in batches.unbind() for part in batch.split(sizes)]


def cut_of(
    leaf: Tensor, place: Placement, spec: MatrixSpec
) -> Cut | Literal["local", "strided"]:
    """Return how one axis cuts the matrices of a leaf. "local": a rank has each matrix
    whole. "strided": several axes cut a matrix, or an axis cuts it into pieces that are
    not consecutive.
    """
    matrices, has_buffers = spec
    row_dim = matrices.column_dim(leaf.ndim) - 1
    inner = [i for i, dim in enumerate(place.dims) if dim >= row_dim]
    if not inner or leaf.numel() == 0:
        return "local"
    if len(inner) > 1 or not place.consecutive[inner[0]]:
        return "strided"
    assert place.mesh is not None  # some axis of it cuts
    axis, dim = place.axes[inner[0]], place.dims[inner[0]]
    sizes = shard_sizes(leaf.shape[dim], place.mesh.size(axis))
    parts, cols = matrices.part_rows(leaf.shape), leaf.shape[row_dim + 1 :].numel()
    if dim > row_dim:
        # pieces of a kernel are not consecutive columns, but columns in another order
        # have a factor in that order; owners' buffers would have it, too
        if has_buffers and dim > row_dim + 1:
            return "strided"
        lengths = tuple(size * (cols // leaf.shape[dim]) for size in sizes)
        blocks = [Matrix(rows, cols, 1, lengths) for rows in parts]
    elif len(parts) == 1:
        blocks = [Matrix(parts[0], cols, 0)]
    elif matrices.is_even(leaf.shape) and all(size % parts[0] == 0 for size in sizes):
        return "local"
    else:
        starts = accumulate([0, *parts[:-1]])
        blocks = [
            Matrix(rows, cols, 0, _overlaps(start, rows, sizes))
            for start, rows in zip(starts, parts, strict=True)
        ]
    others = [a for a in range(place.mesh.ndim) if a != axis and place.mesh.size(a) > 1]
    return Cut(
        mesh=place.mesh,
        axis=axis,
        copies=others[0] if len(place.axes) == len(others) == 1 else None,
        num_batches=cast(DTensor, leaf).to_local().shape[:row_dim].numel(),
        blocks=tuple(blocks),
        rank=place.mesh.get_local_rank(axis),
    )


def _overlaps(start: int, length: int, sizes: list[int]) -> tuple[int, ...]:
    """Return the overlap of [start, start + length) with each of consecutive pieces of
    these sizes.
    """
    overlaps, first = [], 0
    for size in sizes:
        overlap = min(first + size, start + length) - max(first, start)
        overlaps.append(max(0, overlap))
        first += size
    return tuple(overlaps)


# ---- two axes cut a matrix: FSDP with tensor parallelism -----------------------------


@dataclass(frozen=True)
class Grid:
    """How two axes cut a leaf that is one matrix. Pieces travel along the second axis,
    and join to a strip, as only the first axis would cut. Strips travel along the first
    axis, and join to the matrix.
    """

    mesh: DeviceMesh
    axes: tuple[int, int]
    whole: Matrix  # as the first axis cuts it into strips
    strip: Matrix  # this rank's strip, as the second axis cuts it
    # whether the second axis cuts before the first: rows of strips are out of order
    strided: bool

    @property
    def cut(self) -> Cut:
        """Return how the second axis cuts this rank's strip."""
        axis = self.axes[1]
        rank = self.mesh.get_local_rank(axis)
        return Cut(self.mesh, axis, None, 1, (self.strip,), rank)

    def in_order(self, whole: InOut, *, back: bool = False) -> InOut:
        """Return an owner's matrix with its rows (or columns) in their order; with
        ``back``, in the order of strips again.
        """
        if not self.strided:
            return whole
        dim, axes = self.whole.dim, self.axes[::-1] if back else self.axes
        sizes: list[int] = [self.mesh.size(axis) for axis in axes]
        strips: Tensor = whole.matrix.unflatten(dim, (*sizes, -1))
        matrix = strips.transpose(dim, dim + 1).flatten(dim, dim + 2)
        return whole._replace(matrix=matrix)


def grid_of(leaf: Tensor, place: Placement, spec: MatrixSpec) -> Grid | None:
    """Return how two axes cut a leaf. None if the leaf is several matrices, or the axes
    cut it in another way than a ``Grid``.
    """
    is_single = leaf.ndim == 2 and spec.matrices.num_in(leaf.shape) == 1
    if not is_single or len(place.axes) != 2 or not isinstance(leaf, DTensor):
        return None
    mesh, (first, second), (dim, other) = leaf.device_mesh, place.axes, place.dims
    num, parts, at = mesh.size(first), mesh.size(second), mesh.get_local_rank(first)
    (rows, cols), placement = leaf.shape, leaf.placements[first]
    strided = not place.consecutive[0]
    if isinstance(placement, _StridedShard):
        even = leaf.shape[dim] % (num * parts) == 0
        if not even or dim != other or placement.split_factor != parts:
            return None
    elif strided:
        return None
    if not place.consecutive[1]:
        return None
    lengths, pieces = shard_sizes(leaf.shape[dim], num), None
    if dim == other:
        pieces = tuple(shard_sizes(lengths[at], parts))
    strip = (lengths[at], cols) if dim == 0 else (rows, lengths[at])
    return Grid(
        mesh=mesh,
        axes=(first, second),
        whole=Matrix(rows, cols, dim, tuple(lengths)),
        strip=Matrix(strip[0], strip[1], other, pieces),
        strided=strided,
    )
