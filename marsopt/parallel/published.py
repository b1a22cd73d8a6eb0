"""For a checkpoint: the buffers that owners keep of matrices, as DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from marsopt.parallel.exchange import TensorSpec, from_words, to_words
from marsopt.parallel.layout import AxisPlacement, Placement, groups_of, piece_of
from marsopt.step.owners import OwnerBuffer

MOST = 2**25  # bytes of buffers that ranks exchange at once, about


def whole_buffers(buffers: Sequence[OwnerBuffer], device: str) -> Iterator[Tensor]:
    """Yield buffers of leaves that are DTensors, (num, *shape), cut along the rows of
    their matrices, and flat DTensors, cut along their one dim. A collective: an
    all-reduce of numbers, and another for each ``MOST`` bytes.
    """
    if not buffers:
        return
    sources = _sources(buffers, device)
    for part in _portions(buffers):
        pairs = [(buffer, next(sources)) for buffer in part]
        for buffer, whole in zip(part, _summed_bits(pairs), strict=True):
            yield _cut_by_rows(whole, buffer)


def _mesh_of(buffer: OwnerBuffer) -> DeviceMesh:
    return cast(DTensor, buffer.leaf).device_mesh


def _spec(buffer: OwnerBuffer) -> TensorSpec:
    shape = (sum(buffer.sizes), *buffer.owned.shape[1:])
    return TensorSpec(shape, buffer.owned.dtype)


def _sources(buffers: Sequence[OwnerBuffer], device: str) -> Iterator[Tensor]:
    """Return the source rank of each matrix of each buffer: its owner, the lowest rank
    if every replica has one.
    """
    nums = [len(buffer.sizes) for buffer in buffers]
    owners = torch.full((sum(nums),), dist.get_world_size(), device="cpu")
    for buffer, part in zip(buffers, owners.split(nums), strict=True):
        part[list(buffer.owns)] = dist.get_rank()
    owners = owners.to(device)
    meshes = dict.fromkeys(map(_mesh_of, buffers))
    for group in dict.fromkeys(g for mesh in meshes for g, _ in groups_of(mesh)):
        dist.all_reduce(owners, dist.ReduceOp.MIN, group=group)
    return iter(owners.split(nums))


def _portions(buffers: Sequence[OwnerBuffer]) -> Iterator[list[OwnerBuffer]]:
    """Yield the buffers of one mesh that follow each other, about ``MOST`` bytes
    of all ranks at once.
    """
    part: list[OwnerBuffer] = []
    size = 0
    for buffer in buffers:
        nbytes = _spec(buffer).num_words(torch.uint8)
        is_other = part and _mesh_of(part[0]) != _mesh_of(buffer)
        if part and (is_other or size + nbytes > MOST):
            yield part
            part, size = [], 0
        part.append(buffer)
        size += nbytes
    if part:
        yield part


def _summed_bits(pairs: Sequence[tuple[OwnerBuffer, Tensor]]) -> list[Tensor]:
    """Return the whole buffers of one mesh. A matrix's source sends its numbers: other
    ranks send zeros, so that bits may be added.
    """
    parts, rank = [], dist.get_rank()
    for buffer, sources in pairs:
        owned, sizes = buffer.owned, buffer.sizes
        whole = owned.new_zeros(sum(sizes), *owned.shape[1:])
        index = entries(buffer.owns, sizes).to(owned.device)
        repeats = torch.tensor(sizes, device=sources.device)
        by_entry = sources.repeat_interleave(repeats, output_size=sum(sizes))
        is_source = (by_entry[index] == rank).view(-1, *[1] * (owned.ndim - 1))
        whole[index] = torch.where(is_source, owned, 0)
        parts.append(to_words(whole, torch.uint8))
    flat = torch.cat(parts)
    del parts
    for group, _ in groups_of(_mesh_of(pairs[0][0])):
        dist.all_reduce(flat, group=group)
    return from_words(flat, [_spec(buffer) for buffer, _ in pairs])


def entries(numbers: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return which entries of a buffer of all matrices of a leaf belong to the matrices
    of these numbers, int64; ``sizes`` are the entries of each matrix.
    """
    starts = [0, *accumulate(sizes)]
    ranges = [torch.arange(starts[n], starts[n + 1], device="cpu") for n in numbers]
    return torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *ranges])


def _cut_by_rows(whole: Tensor, buffer: OwnerBuffer) -> Tensor:
    leaf = cast(DTensor, buffer.leaf)
    mesh, cutting = leaf.device_mesh, Placement.of(leaf).axes
    places: list[AxisPlacement] = [Replicate()] * mesh.ndim
    is_flat = whole.ndim == 1 and len(whole) > len(buffer.sizes)
    if cutting and (whole.ndim > 1 or is_flat):
        places[cutting[0]] = Shard(0 if is_flat else 1)
    # a copy, so that the whole is let go of
    return DTensor.from_local(
        piece_of(whole, mesh, places).clone(),
        mesh,
        places,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
