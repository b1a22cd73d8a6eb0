"""First of all plans: which mesh axes cut which dims of one tensor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as AxisPlacement


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
