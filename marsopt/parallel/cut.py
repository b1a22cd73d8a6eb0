"""After placement: how one mesh axis cuts the matrices of one leaf."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, cast

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from marsopt.parallel.placement import Placement, shard_sizes
from marsopt.parallel.planner import Matrix
from marsopt.rules.matrices import Matrices


class MatrixSpec(NamedTuple):
    """How a leaf is made of matrices, and whether their owners keep buffers."""

    matrices: Matrices
    keeps: bool  # whether their owners keep buffers


@dataclass(frozen=True)
class Cut:
    """How one mesh axis cuts the matrices of a leaf.

    Other axes may cut its batch of matrices: they decide which matrices lie here.
    """

    mesh: DeviceMesh
    axis: int
    has_replicas: bool  # whether all other axes have the same matrices
    num_batches: int  # that lie here; a leaf that is one matrix is one batch
    blocks: tuple[Matrix, ...]  # of one batch, from its first row to its last
    rank: int  # along the axis

    @property
    def matrices(self) -> list[Matrix]:
        """Return the matrices of the batches that lie here, one after the other."""
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
    leaf: Tensor, place: Placement, way: MatrixSpec
) -> Cut | Literal["local", "strided"]:
    """Return how one axis cuts the matrices of a leaf. "local": each matrix lies on one
    rank. "strided": several axes cut a matrix, or an axis cuts it into pieces that are
    not consecutive.
    """
    matrices, keeps = way
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
        # have a factor in that order; buffers that are kept would be in it, too
        if keeps and dim > row_dim + 1:
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
    return Cut(
        mesh=place.mesh,
        axis=axis,
        has_replicas=len(place.axes) == 1,
        num_batches=cast(DTensor, leaf).to_local().shape[:row_dim].numel(),
        blocks=tuple(blocks),
        rank=place.mesh.get_local_rank(axis),
    )


def _overlaps(start: int, length: int, sizes: list[int]) -> tuple[int, ...]:
    """Return how much of [start, start + length) lies in each of consecutive pieces of
    these sizes.
    """
    overlaps, first = [], 0
    for size in sizes:
        overlap = min(first + size, start + length) - max(first, start)
        overlaps.append(max(0, overlap))
        first += size
    return tuple(overlaps)
