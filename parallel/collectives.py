"""MeshCollectives: marsopt's verbs over a device mesh."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from marsopt import Matrices, NewtonSchulz

from .agreement import Agreement
from .cut import Cut, cut_of
from .exchange import unflatten
from .layout_cache import LayoutCache
from .placement import Placement, onto_first
from .planner import Machine, Strategy, plan
from .shard_group import ShardGroup

log = logging.getLogger(__name__)


class Reduction(NamedTuple):
    """One all-reduce of ``sum``."""

    group: dist.ProcessGroup
    rows: Tensor | None  # which leaves take part; None: all
    # (rows,) bool: False where another rank contributes the number; None: all True
    contributes: Tensor | None


# one all-reduce of ``sum_along``, and which leaves take part
LineReduction = tuple[dist.ProcessGroup, list[int]]


class Partition(NamedTuple):
    """The leaves of one call of ``orthogonalize``, by how that is done."""

    groups: list[tuple[ShardGroup, dict[int, Cut]]]
    whole: list[int]  # each matrix lies on one rank: of a batch, or replicated
    gathered: list[int]  # cut by several axes or in stripes, or planned so


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
        self._options = dict(
            strategy=strategy, max_buckets=max_buckets, machine=machine
        )
        plan([], 1, NewtonSchulz(), **self._options)  # checks
        self.mesh = mesh
        self._reductions: LayoutCache[list[Reduction]] = LayoutCache()
        self._line_reductions: LayoutCache[list[LineReduction]] = LayoutCache()
        self._partitions: LayoutCache[Partition] = LayoutCache()
        self._agreement = Agreement()

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's piece, sharing storage.

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
        # without a graph to_local makes no more of it than a view, tensor by tensor
        return tensor.to_local() if torch.is_grad_enabled() else tensor._local_tensor

    def wrap(self, local: Tensor, like: Tensor) -> Tensor:
        """Return ``local`` as this rank's piece of a tensor laid out as ``like``; where
        it has fewer dims, of one that has only so many of its first dims: whole over
        axes that cut the others.
        """
        if not isinstance(like, DTensor):
            return local
        shape, stride, placements = like.shape, like.stride(), like.placements
        if local.ndim < like.ndim:
            shape = like.shape[: local.ndim]
            stride = torch.empty(shape, device="meta").stride()
            placements = [onto_first(p, like.ndim, local.ndim) for p in placements]
        return DTensor.from_local(
            local,
            like.device_mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=stride,
        )

    def rows(self, tensor: Tensor, matrices: Matrices) -> Tensor | None:
        """Return which rows of all ``matrices`` of ``tensor`` lie here: their numbers
        among all of them, in the order of the piece's; None = all.
        """
        first = matrices.column_dim(tensor.ndim)
        if all(dim >= first for dim in Placement.of(tensor).dims):
            return None
        shape, mesh = tensor.shape[:first], tensor.device_mesh
        numbers = torch.arange(shape.numel(), device=mesh.device_type).view(shape)
        places = [onto_first(p, tensor.ndim, first) for p in tensor.placements]
        return _piece(numbers, mesh, places).flatten()

    def placement(self, tensor: Tensor) -> Hashable:
        """Return mesh and placements; None for a plain tensor."""
        if not isinstance(tensor, DTensor):
            return None
        return tensor.device_mesh, tensor.placements

    def written(self) -> None:
        """Let every FSDP module of this process gather its parameters anew: a root
        keeps them after a forward pass without a backward one, as in validation.
        """
        # nothing public leads from a parameter to the module that gathered it
        for module in list(_composable_state._module_state_mapping):
            if isinstance(module, FSDPModule):
                module.reshard()

    # ---- sum -----------------------------------------------------------------------

    def sum(
        self, sums: Tensor, leaves: Sequence[Tensor], alike: str | None = None
    ) -> Tensor:
        """Sum ``sums`` (len(leaves), K) over the shards of each leaf.

        What is replicated counts once, and is taken from the first rank of an axis that
        is summed over anyway, so that all ranks go on with the same numbers. Replicas
        (HSDP) are taken to hold the same gradients, as FSDP2 leaves them.

        Where ranks that sum together differ in ``alike``, the sums are NaN, which voids
        a step. Replicas do not sum, so that of them each set of shards is compared by
        itself.

        Raises:
            RuntimeError: at the first call with a list, ranks that hold different ones;
                ``alike`` differs, on a GPU at one of the next calls.
        """
        reductions = self._reductions.of(leaves, (), self._find_reductions)
        told = None
        if alike is not None and reductions:
            self._agreement.check(alike)
            num_ranks = math.prod(r.group.size() for r in reductions)
            told = self._agreement.rows(alike, num_ranks, sums)
        for reduction in reductions:
            part = sums
            if reduction.rows is not None:
                part = sums[reduction.rows]
            if reduction.contributes is not None:
                # another rank contributes, but what is not finite here is heard
                silent = torch.where(torch.isfinite(part), 0.0, torch.nan)
                part = torch.where(reduction.contributes[:, None], part, silent)
            part = part.contiguous() if told is None else torch.cat([part, told])
            dist.all_reduce(part, group=reduction.group)
            if told is not None:
                part, told = part.split([len(part) - len(told), len(told)])
            if reduction.rows is None:
                sums = part
            else:
                sums = sums.index_copy(0, reduction.rows, part)
        if told is None:
            return sums
        return self._agreement.judged(sums, told, num_ranks, alike)

    def still_agree(self, alike: str) -> None:
        """Raise where a ``sum`` on a GPU is known to have found ranks that differ."""
        self._agreement.check(alike)

    def _find_reductions(self, leaves: Sequence[Tensor]) -> list[Reduction]:
        """Return the all-reduces of ``sum`` for one list of leaves."""
        places = self._places("sum", leaves)
        device = self.mesh.device_type
        spread = dict.fromkeys((p.mesh, axis) for p in places for axis in p.axes)
        found = []
        for number, (mesh, axis) in enumerate(spread):
            here = [p.mesh == mesh and axis in p.axes for p in places]
            # the first axis also takes what lies whole on every rank
            rows = [
                i for i, p in enumerate(places) if here[i] or not (number or p.axes)
            ]
            index = contributes = None
            if mesh.get_local_rank(axis) > 0 and not all(here[i] for i in rows):
                contributes = torch.tensor([here[i] for i in rows], device=device)
            if len(rows) < len(leaves):
                index = torch.tensor(rows, device=device)
            found.append(Reduction(mesh.get_group(axis), index, contributes))
        return found

    def sum_along(
        self,
        parts: Sequence[Tensor],
        leaves: Sequence[Tensor],
        matrices: Sequence[Matrices],
        lines: Literal["rows", "cols"],
    ) -> list[Tensor]:
        """Sum the part of each leaf over the shards that the "cols" or "rows" of its
        matrices are cut into: one all-reduce per mesh axis that does so for some leaf.

        Raises:
            RuntimeError: at the first call with a list, ranks that hold different ones.
        """
        out = list(parts)
        find = partial(self._find_line_reductions, lines, matrices)
        key = (lines, *_distinct(matrices))
        for group, members in self._line_reductions.of(leaves, key, find):
            flat = torch.cat([out[i].reshape(-1) for i in members])
            dist.all_reduce(flat, group=group)
            summed = unflatten(flat, [out[i].shape for i in members])
            for i, part in zip(members, summed, strict=True):
                out[i] = part.to(out[i].dtype)
        return out

    def _find_line_reductions(
        self, lines: str, matrices: Sequence[Matrices], leaves: Sequence[Tensor]
    ) -> list[LineReduction]:
        """Return the all-reduces of ``sum_along`` for one list of leaves."""
        found: dict[tuple[DeviceMesh | None, int], list[int]] = {}
        verb = f"sum_along {lines}", *_distinct(matrices)
        for i, place in enumerate(self._places(verb, leaves)):
            first = matrices[i].column_dim(leaves[i].ndim)
            for axis, cut in zip(place.axes, place.dims, strict=True):
                if (cut >= first) == (lines == "cols"):
                    found.setdefault((place.mesh, axis), []).append(i)
        return [(mesh.get_group(axis), ones) for (mesh, axis), ones in found.items()]

    # ---- agreement -----------------------------------------------------------------

    def _places(self, verb: object, leaves: Sequence[Tensor]) -> list[Placement]:
        """Return where leaves lie, once all ranks have been found to hold the same."""
        places = [Placement.of(leaf) for leaf in leaves]
        pairs = zip(leaves, places, strict=True)
        self.agree(repr((verb, [(*x.shape, x.dtype, p.common) for x, p in pairs])))
        return places

    def agree(self, what: str) -> None:
        """Raise unless all ranks of the mesh were given the same, and would plan alike.

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
        self,
        pieces: Sequence[Tensor],
        ns: NewtonSchulz,
        leaves: Sequence[Tensor],
        matrices: Sequence[Matrices],
    ) -> list[Tensor]:
        """Return the orthogonal factors of the whole matrices of each leaf; both are
        pieces of leaves.
        """
        key = (ns, *_distinct(matrices))
        find = partial(self._find_partition, ns, matrices)
        partition = self._partitions.of(leaves, key, find)
        out: dict[int, Tensor] = {}
        for group, cuts in partition.groups:
            parts = [part for i, cut in cuts.items() for part in cut.split(pieces[i])]
            found = group.orthogonalize(parts)
            rest = (found[n] for n in range(len(parts)))
            for i, cut in cuts.items():
                own = [next(rest) for _ in cut.matrices]
                out[i] = cut.join(own, pieces[i])
        alone = ns.many([matrices[i].unbound(pieces[i]) for i in partition.whole])
        for i, o in zip(partition.whole, alone, strict=True):
            out[i] = o.view_as(pieces[i])
        own = [(pieces[i], leaves[i], matrices[i]) for i in partition.gathered]
        out |= zip(partition.gathered, self._by_gathering(own, ns), strict=True)
        return [out[i] for i in range(len(pieces))]

    def _by_gathering(
        self, parts: Sequence[tuple[Tensor, Tensor, Matrices]], ns: NewtonSchulz
    ) -> list[Tensor]:
        """Orthogonalize (piece, leaf, matrices) on every rank: reference and
        fallback.
        """
        whole = [
            self.wrap(piece.to(ns.payload(piece.dtype)), leaf).full_tensor()
            for piece, leaf, _ in parts
        ]
        factors = ns.many(
            [m.unbound(x) for x, (_, _, m) in zip(whole, parts, strict=True)]
        )
        return [
            _piece(o.view(leaf.shape), leaf.device_mesh, leaf.placements).to(
                piece.dtype
            )
            for o, (piece, leaf, _) in zip(factors, parts, strict=True)
        ]

    def _find_partition(
        self, ns: NewtonSchulz, matrices: Sequence[Matrices], leaves: Sequence[Tensor]
    ) -> Partition:
        by_axis: dict[tuple, dict[int, Cut]] = {}
        whole, gathered = [], []
        places = self._places((ns, *matrices), leaves)
        for i, leaf in enumerate(leaves):
            cut = cut_of(leaf, places[i], matrices[i])
            if cut == "whole":
                whole.append(i)
            elif cut == "stripes":
                gathered.append(i)
            else:
                group = cut.mesh, cut.axis, cut.has_replicas
                by_axis.setdefault(group, {})[i] = cut
        if gathered:
            log.warning(
                "marsopt.parallel: %d parameters are cut by several mesh axes or in "
                "stripes (tensor parallelism); they are gathered whole for "
                "Newton-Schulz, which is slow",
                len(gathered),
            )
        groups = []
        for (mesh, axis, copies), cuts in by_axis.items():
            if self._options["strategy"] == "replicate":
                gathered += cuts
                continue
            every = [matrix for cut in cuts.values() for matrix in cut.matrices]
            group = ShardGroup(
                mesh, axis, every, ns, has_replicas=copies, **self._options
            )
            groups.append((group, cuts))
        return Partition(groups, whole, gathered)


def _distinct(matrices: Sequence[Matrices]) -> Sequence[Matrices]:
    """Return a key of them that is short where no parameter differs from the others."""
    alike = all(m is matrices[0] or m == matrices[0] for m in matrices)
    return matrices[:1] if alike else matrices


def _piece(whole: Tensor, mesh: DeviceMesh, placements: Sequence) -> Tensor:
    """Return this rank's piece of a tensor that every rank has whole."""
    # src_data_rank=None: nothing is sent
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
