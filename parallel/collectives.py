"""MeshCollectives: marsopt's verbs over a device mesh."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from marsopt import NewtonSchulz

from . import exchange
from .exchange import Bucket
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
        # found once per list of leaves, which is kept so that its ids stay taken
        self._sums: dict[tuple, tuple[list[Tensor], list[Reduction]]] = {}
        self._divisions: dict[tuple, tuple[list[Tensor], Division]] = {}

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's piece, sharing storage.

        Raises:
            ValueError: a DTensor with pending (Partial) sums.
        """
        if not isinstance(tensor, DTensor):
            return tensor
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
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    # ---- sum -----------------------------------------------------------------------

    def sum(self, partial: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Sum ``partial`` (len(leaves), K) over the shards of each leaf.

        What is replicated counts once, and is taken from the first rank of an axis that
        is summed over anyway, so that all ranks go on with the same numbers.

        Raises:
            RuntimeError: at the first call, ranks that hold different lists of leaves.
        """
        for reduction in self._reductions(leaves):
            part = partial
            if reduction.rows is not None:
                part = partial[reduction.rows]
            if reduction.speaks is not None:
                part = torch.where(reduction.speaks[:, None], part, 0.0)
            part = part.contiguous()
            dist.all_reduce(part, group=reduction.group)
            if reduction.rows is None:
                partial = part
            else:
                partial = partial.index_copy(0, reduction.rows, part)
        return partial

    def _reductions(self, leaves: Sequence[Tensor]) -> list[Reduction]:
        """The all-reduces of one list of leaves, found once."""
        key = tuple(map(id, leaves))
        if key in self._sums:
            return self._sums[key][1]
        places = [Placement.of(leaf) for leaf in leaves]
        self._agree(leaves, places)
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
        self._sums[key] = (list(leaves), found)  # leaves, so that no id is used again
        return found

    def _agree(self, leaves: Sequence[Tensor], places: Sequence[Placement]) -> None:
        """Whether all ranks of the mesh hold the same leaves, and would plan alike.

        Collectives on different lists would hang, or add what does not belong together.
        """
        both = zip(leaves, places, strict=True)
        mine = repr(([(tuple(x.shape), p.axes, p.dim) for x, p in both], self._options))
        digest = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:6], "big")
        for axis in range(self.mesh.ndim):
            ends = torch.tensor([digest, -digest], device=self.mesh.device_type)
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
            if ends[0] != -ends[1]:
                raise RuntimeError(
                    f"got {len(leaves)} parameters on rank {dist.get_rank()}, expected "
                    "the same shapes, placements and options on every rank: build the "
                    "same model, param groups and MeshCollectives everywhere"
                )

    # ---- orthogonalize -------------------------------------------------------------

    def orthogonalize(
        self, matrices: Sequence[Tensor], ns: NewtonSchulz, leaves: Sequence[Tensor]
    ) -> list[Tensor]:
        """The orthogonal factor of each whole matrix, given and returned as pieces."""
        division = self._divide(ns, leaves)
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
        key = (ns, *map(id, leaves))
        if key in self._divisions:
            return self._divisions[key][1]
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
        division = Division(teams, alone, scattered)
        self._divisions[key] = (list(leaves), division)
        return division

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
        x = [
            local[i].float() if rows else local[i].float().mT
            for i, rows in zip(members, cut_rows, strict=True)
        ]
        flat = torch.cat([(piece.mT @ piece).reshape(-1) for piece in x])
        dist.all_reduce(flat, group=team.group)
        out, start = {}, 0
        for i, piece, rows in zip(members, x, cut_rows, strict=True):
            k = piece.shape[1]
            gram = flat[start : start + k * k].view(k, k)
            start += k * k
            o = (piece @ ns.from_gram(gram)).to(local[i].dtype)
            out[i] = o if rows else o.mT
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
