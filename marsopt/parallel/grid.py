"""In place of cut, under FSDP with tensor parallelism: matrices that two axes cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from marsopt.parallel.cut import Cut, MatrixSpec
from marsopt.parallel.placement import Placement, shard_sizes
from marsopt.parallel.planner import Matrix, Plan, assign_buckets
from marsopt.parallel.shard_group import ShardGroup
from marsopt.rules.preconditioner import MatrixCost, MatrixInput, MatrixOutput
from marsopt.step.owners import Request, precondition_matrices

InOut = TypeVar("InOut", MatrixInput, MatrixOutput)


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
        """Return how the second axis cuts the strip that lies here."""
        axis = self.axes[1]
        rank = self.mesh.get_local_rank(axis)
        return Cut(self.mesh, axis, False, 1, (self.strip,), rank)

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


def grid_of(leaf: Tensor, place: Placement, way: MatrixSpec) -> Grid | None:
    """Return how two axes cut a leaf. None if the leaf is several matrices, or the axes
    cut it in another way than a ``Grid``.
    """
    is_single = leaf.ndim == 2 and way.matrices.num_in(leaf.shape) == 1
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


def group_over(
    grids: Sequence[Grid], cost: MatrixCost, *, max_buckets: int | None
) -> ShardGroup:
    """Return matrices that two axes cut as a group of the second axis. Its owners work
    by exchanging their strips along the first: at most four all-to-all a bucket.
    """
    mesh, (first, second) = grids[0].mesh, grids[0].axes
    num, parts = mesh.size(first), mesh.size(second)
    flops = [cost.num_flops(grid.whole.rows, grid.whole.cols) for grid in grids]
    numel = sum(grid.whole.rows * grid.whole.cols for grid in grids)
    sent = cost.payload().itemsize * numel / (num * parts)
    owners, buckets = assign_buckets(flops, num * parts, max_buckets, sent)
    across = Plan(parts, 1, tuple(o % parts for o in owners), tuple(buckets))
    inner, owns = [], list[int]()
    for owned in across.exchanges(0):
        numbers = owned[mesh.get_local_rank(second)]
        strips = [grids[i] for i in numbers]
        ranks = [owners[i] // parts for i in numbers]
        at = mesh.get_local_rank(first)
        here = [i for i, rank in zip(numbers, ranks, strict=True) if rank == at]
        owns += here
        group = ShardGroup(
            mesh,
            first,
            [grid.whole for grid in strips],
            cost,
            planned=Plan(num, 1, tuple(ranks), (0,) * len(ranks)),
            work=partial(_precondition_strips, [grids[i] for i in here]),
        )
        inner.append(group)

    def along_first(number: int, requests: list[Request]) -> list[MatrixOutput]:
        results = inner[number].on_owners(requests) if requests else {}
        return [results[i] for i in range(len(requests))]

    matrices = [grid.strip for grid in grids]
    group = ShardGroup(mesh, second, matrices, cost, planned=across, work=along_first)
    group.owns = owns  # the strips that become whole matrices here
    return group


def _precondition_strips(
    grids: Sequence[Grid], bucket: int, requests: Sequence[Request]
) -> list[MatrixOutput]:
    """Precondition whole matrices, with rows in the order of their strips."""
    pairs = zip(requests, grids, strict=True)
    ordered = [
        request._replace(input=grid.in_order(request.input)) for request, grid in pairs
    ]
    results = zip(precondition_matrices(ordered), grids, strict=True)
    return [grid.in_order(result, back=True) for result, grid in results]
