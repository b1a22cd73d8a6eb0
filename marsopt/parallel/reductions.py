"""Beside the sum: which all-reduces complete the numbers of all leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from marsopt.parallel.placement import Placement


class Reduction(NamedTuple):
    """One all-reduce of ``sum``."""

    group: dist.ProcessGroup
    rows: Tensor | None  # which leaves take part; None: all
    # (rows,) bool: False if another rank contributes the number; None: all True
    contributes: Tensor | None


def reductions_of(places: Sequence[Placement], device: str) -> list[Reduction]:
    """Return the all-reduces of a sum over leaves that lie like this."""
    spread = [p.mesh for p in places if p.mesh is not None and p.mesh.size() > 1]
    sharding = [p.mesh for p in places if p.mesh is not None and p.axes]
    spans: dict[dist.ProcessGroup, dict[DeviceMesh, tuple[int, ...]]] = {}
    for mesh in dict.fromkeys(sharding or spread[:1]):
        for group, axes in groups_of(mesh):
            spans.setdefault(group, {})[mesh] = axes
    first = next(iter(spans), None)
    return [
        _reduction(group, axes, places, group is first, device)
        for group, axes in spans.items()
    ]


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


def _reduction(
    group: dist.ProcessGroup,
    spans: Mapping[DeviceMesh, tuple[int, ...]],
    places: Sequence[Placement],
    is_first: bool,
    device: str,
) -> Reduction:
    """Return the all-reduce over a group, which spans these axes of meshes. The first
    group also takes leaves that lie whole on every rank.
    """
    rows, contributes = [], []
    for i, place in enumerate(places):
        mesh = place.mesh
        if place.axes and mesh is not None and mesh in spans:
            copies = [axis for axis in spans[mesh] if axis not in place.axes]
            rows.append(i)
            contributes.append(not any(map(mesh.get_local_rank, copies)))
        elif is_first and not place.axes:
            rows.append(i)
            contributes.append(dist.get_rank(group) == 0)
    return Reduction(
        group,
        torch.tensor(rows, device=device) if len(rows) < len(places) else None,
        None if all(contributes) else torch.tensor(contributes, device=device),
    )
