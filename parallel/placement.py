"""Where the pieces of one tensor lie, read once into a value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Placement:
    """Of a plain tensor all fields are empty."""

    mesh: DeviceMesh | None = None
    # mesh axes over which the pieces are spread
    axes: tuple[int, ...] = ()
    # the dim that is cut, where one axis cuts into consecutive pieces; else None
    dim: int | None = None

    @classmethod
    def of(cls, leaf: Tensor) -> Placement:
        """The placement of a parameter."""
        if not isinstance(leaf, DTensor):
            return cls()
        cuts = [(a, p) for a, p in enumerate(leaf.placements) if not p.is_replicate()]
        mesh, dim = leaf.device_mesh, None
        if len(cuts) == 1 and type(cuts[0][1]) is Shard:
            dim = cuts[0][1].dim % leaf.ndim
        return cls(mesh, tuple(axis for axis, _ in cuts), dim)


def shard_sizes(size: int, num_ranks: int) -> list[int]:
    """Lengths of the pieces that Shard cuts a dim into: as torch.chunk, then empty."""
    chunk = -(-size // num_ranks)
    return [max(0, min(chunk, size - r * chunk)) for r in range(num_ranks)]
