"""MeshCollectives: marsopt's verbs over a device mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from marsopt import NewtonSchulz


class MeshCollectives:
    """``marsopt.Collectives`` for parameters that are DTensors on ``mesh`` (FSDP2,
    HSDP); plain tensors may mix in.

    Norms are summed over the axes that shard, never over replicas: one all-reduce per
    such axis. Matrices are gathered whole on every rank for Newton-Schulz, and cut
    again.

    Args:
        mesh: the mesh that the parameters were sharded on.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's piece, sharing storage.

        Raises:
            ValueError: a DTensor on another mesh, or with pending (Partial) sums.
        """
        if not isinstance(tensor, DTensor):
            return tensor
        if tensor.device_mesh != self.mesh:
            raise ValueError(
                f"got a parameter on {tensor.device_mesh}, expected {self.mesh}: pass "
                "the mesh that fully_shard was given"
            )
        if any(p.is_partial() for p in tensor.placements):
            raise ValueError(
                f"got placements {tensor.placements}, expected shards or replicas: "
                "redistribute the partial sums first"
            )
        return tensor.to_local()

    def wrap(self, local: Tensor, like: Tensor) -> Tensor:
        """``local`` as this rank's piece of a tensor laid out as ``like``."""
        if not isinstance(like, DTensor):
            return local
        return DTensor.from_local(
            local,
            self.mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def sum(self, partial: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Sum ``partial`` (len(leaves), K) over the shards of each leaf; what is
        replicated counts once.
        """
        shards = [_shard_axes(leaf) for leaf in leaves]
        for axis in sorted(set().union(*shards)):
            if self.mesh.get_local_rank(axis) > 0 and not all(
                axis in mine for mine in shards
            ):
                here = torch.tensor(
                    [axis in mine for mine in shards], device=partial.device
                )
                partial = torch.where(
                    here[:, None], partial, 0.0
                )  # the first rank speaks for replicas
            partial = partial.contiguous()
            dist.all_reduce(partial, group=self.mesh.get_group(axis))
        return partial

    def orthogonalize(
        self, matrices: Sequence[Tensor], ns: NewtonSchulz, leaves: Sequence[Tensor]
    ) -> list[Tensor]:
        """The orthogonal factor of each whole matrix, given and returned as this rank's
        pieces.
        """
        whole = [
            self._gather(u, leaf) for u, leaf in zip(matrices, leaves, strict=True)
        ]
        return [
            self._cut(o, leaf) for o, leaf in zip(ns.many(whole), leaves, strict=True)
        ]

    def _gather(self, local: Tensor, like: Tensor) -> Tensor:
        wrapped = self.wrap(local, like)
        if not isinstance(wrapped, DTensor):
            return wrapped
        return wrapped.redistribute(
            placements=[Replicate()] * self.mesh.ndim
        ).to_local()

    def _cut(self, whole: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return whole
        # src_data_rank=None: every rank has the whole already, so that nothing is sent
        return distribute_tensor(
            whole, self.mesh, like.placements, src_data_rank=None
        ).to_local()


def _shard_axes(leaf: Tensor) -> set[int]:
    """Mesh axes over which the pieces of one tensor are spread (Shard and
    _StridedShard).
    """
    if not isinstance(leaf, DTensor):
        return set()
    return {
        axis
        for axis, placement in enumerate(leaf.placements)
        if not placement.is_replicate()
    }
