"""Decided once and equally on every rank: which rank owns which matrix, and which
all-reduces complete the norms.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapreplace
from itertools import zip_longest
from math import ceil
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh

from marsopt.parallel.layout import Placement, groups_of
from marsopt.rules.component import MatrixCost

BUCKET = 2**25  # bytes that a rank sends to owners in one exchange, about

Members = list[list[int]]  # the numbers of the matrices of each owner

# ---- do all ranks mean the same? -----------------------------------------------------


def check_equal(
    values: Mapping[str, object], groups: Sequence[dist.ProcessGroup], device: str
) -> None:
    """Raise unless values have equal texts on all ranks that ``groups`` together span.
    A collective.

    Args:
        values: by their names in errors.
        groups: of ranks; of a mesh, a group for each axis.
        device: that carries tensors of the groups.

    Raises:
        RuntimeError: on every rank, if they differ, with the first difference.
    """
    texts = tuple(f"{name}={value}" for name, value in values.items())
    sha256 = hashlib.sha256(repr(texts).encode()).digest()
    digest = int.from_bytes(sha256[:6], "big")
    ends = torch.tensor([digest, -digest], device=device)
    for group in groups:  # so that no rank waits for ever
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    if ends[0] == -ends[1]:
        return
    by_texts = {texts: dist.get_rank()}  # the lowest rank that has them
    for group in groups:
        gathered: list[dict[tuple[str, ...], int]] = [{}] * group.size()
        dist.all_gather_object(gathered, by_texts, group=group)
        found = [(rank, held) for part in gathered for held, rank in part.items()]
        by_texts = {held: rank for rank, held in sorted(found, reverse=True)}
    (rank, first), (other_rank, other), *_ = sorted(
        (rank, held) for held, rank in by_texts.items()
    )
    pairs = zip_longest(first, other, fillvalue="nothing")
    a, b = next(pair for pair in pairs if pair[0] != pair[1])
    raise RuntimeError(
        "got models, gradients, param groups or options that differ between the ranks "
        f"({a} on rank {rank}, {b} on rank {other_rank}), expected the same "
        "everywhere: build and load them, and the collectives, from equal arguments on "
        "every rank; pass collectives=marsopt.LOCAL for steps by local gradients"
    )


def names_in_modules(params: Sequence[tuple[Tensor, str]]) -> dict[str, str]:
    """Return each parameter's name in the largest module that FSDP2 shards, and the
    module's number among these, by the parameter's label: unnamed parameters of one
    shape may have another order on a rank.
    """
    labels = {id(p): label for p, label in params}
    names = dict[str, tuple[str, int]]()
    for number, module in enumerate(list(_module_state_mapping)):
        for name, p in module.named_parameters():
            if label := labels.get(id(p)):
                named = names.get(label, ("", number)), (name, number)
                names[label] = max(named, key=lambda pair: len(pair[0]))
    # modules of other optimizers, which a rank may have freed, do not count
    numbers = sorted({number for _, number in names.values()})
    return {
        f"module of {label}": f"{names[label][0]} of sharded module "
        f"{numbers.index(names[label][1])}"
        for label in labels.values()
        if label in names
    }


# ---- owners --------------------------------------------------------------------------


def assign(flops: Sequence[int], num_owners: int) -> list[int]:
    """Return the owner of each matrix.

    The largest matrix that is left goes to the least loaded owner (longest processing
    time first). Ties go to the earlier matrix and the lower owner, so that all ranks
    agree.
    """
    owners = [0] * len(flops)
    least = [(0.0, owner) for owner in range(num_owners)]  # a heap
    for i in sorted(range(len(flops)), key=lambda i: (-flops[i], i)):
        load, owner = least[0]
        owners[i] = owner
        heapreplace(least, (load + flops[i], owner))
    return owners


def plan(
    cost: MatrixCost, shapes: Sequence[Sequence[int]], num_owners: int, sent: float
) -> list[Members]:
    """Return the matrices of each owner, bucket by bucket, both balanced by FLOPs over
    matrices of all shapes together.

    There are two buckets or more, of about ``BUCKET`` bytes of a rank, and of two
    matrices at least: an owner with three has its largest in the first, and the other
    two would wait for it.

    Args:
        cost: of preconditioning a matrix.
        shapes: of the matrices.
        num_owners: how many ranks share them.
        sent: the bytes that a rank sends for an element.
    """
    flops = [cost.num_flops(rows, cols) for rows, cols in shapes]
    owners = assign(flops, num_owners)
    most = max(Counter(owners).values(), default=0)
    nbytes = sent * sum(rows * cols for rows, cols in shapes)
    num_buckets = max(2, min(ceil(nbytes / BUCKET), most // 2))
    buckets: list[Members] = [
        [[] for _ in range(num_owners)] for _ in range(num_buckets)
    ]
    for owner in set(owners):
        members = [i for i, its_owner in enumerate(owners) if its_owner == owner]
        numbers = assign([flops[i] for i in members], num_buckets)
        for i, number in zip(members, numbers, strict=True):
            buckets[number][owner].append(i)
    return [bucket for bucket in buckets if any(bucket)]


# ---- norms ---------------------------------------------------------------------------


class Reduction(NamedTuple):
    """One all-reduce of ``sum``."""

    group: dist.ProcessGroup
    rows: Tensor | None  # which leaves take part; None: all
    # (rows, 1) bool: False if another rank contributes the number; None: all True
    contributes: Tensor | None


def reductions_of(places: Sequence[Placement], device: str) -> list[Reduction]:
    """Return the all-reduces of a sum over leaves with these placements."""
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


def _reduction(
    group: dist.ProcessGroup,
    spans: Mapping[DeviceMesh, tuple[int, ...]],
    places: Sequence[Placement],
    is_first: bool,
    device: str,
) -> Reduction:
    """Return the all-reduce over a group, which spans these axes of meshes. The first
    group also takes leaves that every rank has whole.
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
        None if all(contributes) else torch.tensor(contributes, device=device)[:, None],
    )
