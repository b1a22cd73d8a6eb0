"""MeshCollectives: marsopt's verbs over a device mesh."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)

from marsopt import NewtonSchulz

from . import exchange
from .exchange import Bucket
from .memory import Memory
from .placement import Placement
from .planner import Machine, Matrix, Plan, Strategy, plan

log = logging.getLogger(__name__)


class Reduction(NamedTuple):
    """One all-reduce of the rows of a list of leaves."""

    group: dist.ProcessGroup
    rows: Tensor | None  # None: all
    speaks: Tensor | None  # (rows,) bool: False where another rank speaks; None: all


class Team(NamedTuple):
    """Matrices that one mesh axis cuts, and what has been decided for them."""

    members: list[int]  # indices into the list that the verb was called with
    group: dist.ProcessGroup
    matrices: list[Matrix]
    plan: Plan
    buckets: list[Bucket]
    # over replicas that share the owners' work, and what each of them has; else None
    replicas: dist.ProcessGroup | None
    shares: list[list[int]]


class Division(NamedTuple):
    """All matrices of one call of ``orthogonalize``."""

    teams: list[Team]
    alone: list[int]  # whole on every rank
    scattered: list[int]  # cut by several axes, or in stripes


class MeshCollectives:
    """``marsopt.Collectives`` for DTensors: FSDP2, HSDP, and TP as a fallback.

    Norms are summed over the axes that shard, never over replicas: one all-reduce
    each. Matrices go to owners and back by all-to-all, or, where that is faster, are
    orthogonalized in place from their Gram matrix (``planner.plan``). Parameters of
    several meshes, replicated ones and plain tensors may mix. Tensors that several axes
    cut (FSDP x TP) are gathered whole, which is right and slow.

    Args:
        mesh: the mesh that the parameters were sharded on; parameters on others are
            reduced over theirs.
        strategy: "auto", or "owner", "gram" or "replicate" where a matrix allows it.
        max_buckets: exchanges in flight: communication overlaps iteration.
        machine: what "auto" assumes of links and arithmetic.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        strategy: Strategy | Literal["auto"] = "auto",
        max_buckets: int = 2,
        machine: Machine = Machine(),
    ) -> None:
        plan(
            [], 1, NewtonSchulz(), strategy=strategy, max_buckets=max_buckets
        )  # checks
        self.mesh = mesh
        self._options = dict(
            strategy=strategy, max_buckets=max_buckets, machine=machine
        )
        self._sums: Memory[list[Reduction]] = Memory()
        self._divisions: Memory[Division] = Memory()

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's piece, sharing storage.

        Raises:
            ValueError: a DTensor with pending (Partial) sums.
        """
        if not isinstance(tensor, DTensor):
            return tensor
        for placement in tensor.placements:  # a loop: this runs twice a tensor and step
            if placement.is_partial():
                raise ValueError(
                    f"got placements {tensor.placements}, expected shards or replicas: "
                    "redistribute the partial sums first"
                )
        return tensor.to_local()

    def wrap(
        self, local: Tensor, like: Tensor, dims: tuple[int, ...] | None = None
    ) -> Tensor:
        """Return ``local`` as this rank's piece of a tensor laid out as ``like``, or of
        one that has only these ``dims`` of it.
        """
        if not isinstance(like, DTensor):
            return local
        shape, stride, placements = like.shape, like.stride(), like.placements
        if dims is not None:
            shape = torch.Size([like.shape[dim] for dim in dims])
            stride = torch.empty(shape, device="meta").stride()
            placements = [
                Shard(dims.index(p.dim))
                if not p.is_replicate() and p.dim in dims
                else Replicate()
                for p in placements
            ]
        return DTensor.from_local(
            local,
            like.device_mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=stride,
        )

    def placement(self, tensor: Tensor) -> Hashable:
        """Mesh and placements; None for a plain tensor."""
        if not isinstance(tensor, DTensor):
            return None
        return tensor.device_mesh, tensor.placements

    # ---- sum -----------------------------------------------------------------------

    def sum(self, sums: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Sum ``sums`` (len(leaves), K) over the shards of each leaf.

        What is replicated counts once, and is taken from the first rank of an axis that
        is summed over anyway, so that all ranks go on with the same numbers. Replicas
        (HSDP) are taken to hold the same gradients, as FSDP2 leaves them.

        Raises:
            RuntimeError: at the first call with a list, ranks that hold different ones.
        """
        for reduction in self._sums.of(leaves, (), self._reductions):
            part = sums
            if reduction.rows is not None:
                part = sums[reduction.rows]
            if reduction.speaks is not None:
                # another rank speaks, but what is not finite here is heard
                silent = torch.where(torch.isfinite(part), 0.0, torch.nan)
                part = torch.where(reduction.speaks[:, None], part, silent)
            part = part.contiguous()
            dist.all_reduce(part, group=reduction.group)
            if reduction.rows is None:
                sums = part
            else:
                sums = sums.index_copy(0, reduction.rows, part)
        return sums

    def sum_along(
        self, parts: Sequence[Tensor], leaves: Sequence[Tensor], dim: int
    ) -> list[Tensor]:
        """Sum the part of each leaf over the shards that ``dim`` of it is cut into: one
        all-reduce per mesh axis that cuts one.
        """
        out = list(parts)
        cut: dict[tuple[DeviceMesh, int], list[int]] = {}
        for i, leaf in enumerate(leaves):
            for axis in Placement.of(leaf).axes:
                if leaf.placements[axis].dim % leaf.ndim == dim:
                    cut.setdefault((leaf.device_mesh, axis), []).append(i)
        for (mesh, axis), members in cut.items():
            flat = torch.cat([out[i].reshape(-1) for i in members])
            dist.all_reduce(flat, group=mesh.get_group(axis))
            sizes = [out[i].numel() for i in members]
            for i, part in zip(members, flat.split(sizes), strict=True):
                out[i] = part.view(out[i].shape)
        return out

    def _reductions(self, leaves: Sequence[Tensor]) -> list[Reduction]:
        """The all-reduces of one list of leaves."""
        places = [Placement.of(leaf) for leaf in leaves]
        self.agree(
            repr(
                [
                    (tuple(x.shape), x.dtype, p.axes, p.dim)
                    for x, p in zip(leaves, places, strict=True)
                ]
            )
        )
        device = self.mesh.device_type
        spread = dict.fromkeys((p.mesh, axis) for p in places for axis in p.axes)
        found = []
        for number, (mesh, axis) in enumerate(spread):
            here = [p.mesh == mesh and axis in p.axes for p in places]
            # the first axis also takes what lies whole on every rank
            rows = [
                i for i, p in enumerate(places) if here[i] or not (number or p.axes)
            ]
            speaks = None
            if mesh.get_local_rank(axis) > 0 and not all(here[i] for i in rows):
                speaks = torch.tensor([here[i] for i in rows], device=device)
            index = None
            if len(rows) < len(leaves):
                index = torch.tensor(rows, device=device)
            found.append(Reduction(mesh.get_group(axis), index, speaks))
        return found

    def agree(self, what: str) -> None:
        """Whether all ranks of the mesh were given the same, and would plan alike.

        Collectives on different lists would hang, or add what does not belong together.

        Raises:
            RuntimeError: on every rank, where they differ.
        """
        mine = repr((what, self._options, tuple(self.mesh.shape)))
        digest = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:6], "big")
        ends = torch.tensor([digest, -digest], device=self.mesh.device_type)
        for axis in range(self.mesh.ndim):  # all axes, so that nobody waits for ever
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
        if ends[0] != -ends[1]:
            short = what if len(what) < 200 else f"{what[:200]}..."
            raise RuntimeError(
                "got different things on the ranks of one mesh, expected the same "
                f"everywhere (rank {dist.get_rank()} has {short}): build the same "
                "model, param groups, options and MeshCollectives on every rank"
            )

    # ---- orthogonalize -------------------------------------------------------------

    def orthogonalize(
        self, matrices: Sequence[Tensor], ns: NewtonSchulz, leaves: Sequence[Tensor]
    ) -> list[Tensor]:
        """The orthogonal factor of each whole matrix, given and returned as pieces."""
        division = self._divisions.of(leaves, (ns,), partial(self._divide, ns))
        out: dict[int, Tensor] = {}
        for team in division.teams:
            local = [matrices[i] for i in team.members]
            found = exchange.orthogonalize(local, team.buckets, ns, team.group)
            if team.replicas is not None:
                found = exchange.share(found, team.shares, local, ns, team.replicas)
            found |= self._by_gram(local, team, ns)
            whole = team.plan.members("replicate")
            found |= self._gathered(
                {i: local[i] for i in whole},
                {i: leaves[team.members[i]] for i in whole},
                ns,
            )
            out |= {team.members[i]: o for i, o in found.items()}
        both = division.scattered
        out |= self._gathered(
            {i: matrices[i] for i in both}, {i: leaves[i] for i in both}, ns
        )
        alone = ns.many([matrices[i] for i in division.alone])
        out |= dict(zip(division.alone, alone, strict=True))
        return [out[i] for i in range(len(matrices))]

    def _divide(self, ns: NewtonSchulz, leaves: Sequence[Tensor]) -> Division:
        places = [Placement.of(leaf) for leaf in leaves]
        shapes = [tuple(leaf.shape) for leaf in leaves]
        by_axis: dict[tuple, list[int]] = {}
        alone, scattered = [], []
        for i, place in enumerate(places):
            if not place.axes:
                alone.append(i)
            elif place.dim is None:
                scattered.append(i)
            else:
                by_axis.setdefault((place.mesh, place.axes[0]), []).append(i)
        teams = []
        for (mesh, axis), members in by_axis.items():
            found = [Matrix(*shapes[i], places[i].dim) for i in members]
            teams.append(self._team(mesh, axis, members, found, ns))
        if scattered:
            log.warning(
                "marsopt.parallel: %d matrices are cut by several mesh axes or in "
                "stripes (tensor parallelism); they are gathered whole for "
                "Newton-Schulz, which is slow",
                len(scattered),
            )
        plans = [team.plan for team in teams]
        self.agree(repr((ns, shapes, [leaf.dtype for leaf in leaves], plans)))
        return Division(teams, alone, scattered)

    def _team(
        self,
        mesh: DeviceMesh,
        axis: int,
        members: list[int],
        matrices: list[Matrix],
        ns: NewtonSchulz,
    ) -> Team:
        """Plan for the matrices that ``axis`` of ``mesh`` cuts."""
        others = [a for a in range(mesh.ndim) if a != axis]
        # one replicate axis beside the shard axis is HSDP
        copies = mesh.size(others[0]) if len(others) == 1 else 1
        chosen = plan(matrices, mesh.size(axis), ns, replicas=copies, **self._options)
        replica = mesh.get_local_rank(others[0]) if chosen.replicas > 1 else 0
        shares: list[list[int]] = [[] for _ in range(chosen.replicas)]
        for bucket in range(chosen.num_buckets):
            for i in chosen.members("owner", bucket):
                shares[chosen.owners[i] // chosen.num_ranks].append(i)
        mine = set(shares[replica])
        buckets = [
            Bucket(
                matrices,
                chosen,
                [i for i in chosen.members("owner", b) if i in mine],
                mesh.get_local_rank(axis),
            )
            for b in range(chosen.num_buckets)
        ]
        return Team(
            members,
            mesh.get_group(axis),
            matrices,
            chosen,
            [b for b in buckets if b.members],
            mesh.get_group(others[0]) if chosen.replicas > 1 and any(shares) else None,
            shares,
        )

    def _by_gram(
        self, local: Sequence[Tensor], team: Team, ns: NewtonSchulz
    ) -> dict[int, Tensor]:
        """Shards of long sides: one all-reduce of all Gram matrices, in float32."""
        members = team.plan.members("gram")
        if not members:
            return {}
        cut_rows = [team.matrices[i].dim == 0 for i in members]
        wide = torch.float64 if ns.dtype == torch.float64 else torch.float32
        for i in members:
            wide = torch.promote_types(wide, local[i].dtype)
        x = [
            local[i].to(wide) if rows else local[i].to(wide).mT
            for i, rows in zip(members, cut_rows, strict=True)
        ]
        # TF32 would lose what a Gram matrix, formed once, cannot do without
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            flat = torch.cat([(piece.mT @ piece).reshape(-1) for piece in x])
            dist.all_reduce(flat, group=team.group)
            out, start = {}, 0
            for i, piece, rows in zip(members, x, cut_rows, strict=True):
                k = piece.shape[1]
                gram = flat[start : start + k * k].view(k, k)
                start += k * k
                o = (piece @ ns.from_gram(gram)).to(local[i].dtype)
                out[i] = o if rows else o.mT
        finally:
            torch.set_float32_matmul_precision(before)
        return out

    def _gathered(
        self, local: dict[int, Tensor], like: dict[int, Tensor], ns: NewtonSchulz
    ) -> dict[int, Tensor]:
        """Reference and fallback: whole matrices on every rank, any placement."""
        whole = []
        for i, piece in local.items():
            wrapped = self.wrap(piece.to(ns.payload(piece.dtype)), like[i])
            everywhere = [Replicate()] * like[i].device_mesh.ndim
            whole.append(wrapped.redistribute(placements=everywhere).to_local())
        out = {}
        for i, o in zip(local, ns.many(whole), strict=True):
            mesh, places = like[i].device_mesh, like[i].placements
            # src_data_rank=None: every rank has the whole already, nothing is sent
            mine = distribute_tensor(o, mesh, places, src_data_rank=None).to_local()
            out[i] = mine.to(local[i].dtype)
        return out
