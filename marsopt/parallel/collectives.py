"""The step's entrance to the mesh: MeshCollectives, its methods over shards."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from marsopt.parallel.agreement import check_equal, names_in_modules
from marsopt.parallel.cut import Cut, MatrixSpec, cut_of
from marsopt.parallel.data_parallel import DataParallel
from marsopt.parallel.grid import Grid, grid_of, group_over
from marsopt.parallel.layout_cache import LayoutCache
from marsopt.parallel.placement import Placement, dim_of, piece_of
from marsopt.parallel.planner import Machine, Strategy, plan
from marsopt.parallel.published import entries, whole_buffers
from marsopt.parallel.reductions import Reduction, reductions_of
from marsopt.parallel.shard_group import ShardGroup
from marsopt.rules.newton_schulz import NewtonSchulz
from marsopt.rules.preconditioner import MatrixCost, MatrixOutput
from marsopt.step.owners import (
    LOCAL,
    Collectives,
    MatrixParam,
    OwnerBuffer,
    Request,
    joined,
    owned_views,
    precondition_leaves,
    rows_here,
)

log = logging.getLogger(__name__)


class Partition(NamedTuple):
    """The leaves of one call of ``on_owners``, by how their matrices become whole."""

    groups: list[tuple[ShardGroup, dict[int, Cut]]]
    local: list[int]  # each matrix is whole on its rank: in a batch, or replicated
    gathered: list[int]  # by all ranks: cut by several axes or in strides, "replicate"


class MeshCollectives:
    """``marsopt.Collectives`` for DTensors: FSDP2, HSDP, and both with TP.

    A step sums norms over all ranks of the mesh: one all-reduce, or an all-reduce for
    each axis if the mesh has several and leaves out ranks. Matrices go to their owners
    and back by all-to-all. Parameters on several meshes, replicated parameters and
    plain tensors may mix.

    A matrix that two axes cut (FSDP x TP) travels along one axis, then along the other.
    Every rank gathers a tensor of several matrices like these whole: that is exact, but
    slow.

    Args:
        mesh: the mesh that shards the parameters. Norms of parameters on another mesh
            are summed over that mesh.
        strategy: "owner": every matrix goes to an owner. "replicate": every rank
            gathers every matrix. "auto": as "owner"; but replicas (HSDP) share the
            owners' work only if the model of time says that this is faster.
        max_buckets: how many exchanges are in flight at most, so that communication
            overlaps computation; None: two, or more if a rank sends above 64 MB and its
            matrices are many.
        machine: the speeds of links and arithmetic that "auto" assumes.

    Raises:
        ValueError: an unknown ``strategy``, or ``max_buckets`` below 1.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> from marsopt.parallel import MeshCollectives
        >>> single = dict(store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.init_process_group("gloo", **single)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> rows = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        >>> w = torch.nn.Parameter(rows)
        >>> collectives = MeshCollectives(mesh)
        >>> optimizer = marsopt.MARS([w], collectives=collectives, compile=False)
        >>> w.square().sum().backward()
        >>> optimizer.step()
        >>> f"{optimizer.grad_norm:.4f}"        # of eight gradients of 2
        '5.6569'
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        strategy: Strategy = "auto",
        max_buckets: int | None = None,
        machine: Machine = Machine(),
    ) -> None:
        self._options: dict[str, Any] = dict(
            strategy=strategy, max_buckets=max_buckets, machine=machine
        )
        plan([], 1, NewtonSchulz(), **self._options)  # checks
        self.mesh = mesh
        self._reductions: LayoutCache[list[Reduction]] = LayoutCache()
        self._partitions: LayoutCache[Partition] = LayoutCache()

    def __repr__(self) -> str:
        return f"MeshCollectives({self.mesh})"

    def local(self, tensor: Tensor, like: Tensor | None = None) -> Tensor:
        """Return this rank's piece, sharing storage. A gradient with other placements
        than its parameter, ``like``, is redistributed, which is a collective: tensor
        parallelism leaves pending (Partial) sums, and only FSDP2 completes them.

        Raises:
            ValueError: without ``like``, a DTensor with pending sums.
        """
        if not isinstance(tensor, DTensor):
            return tensor
        if isinstance(like, DTensor):
            if tensor.placements != like.placements:
                tensor = tensor.redistribute(placements=like.placements)
        elif any(p.is_partial() for p in tensor.placements):
            raise ValueError(
                f"got a DTensor of shape {tuple(tensor.shape)} with placements "
                f"{tensor.placements}, expected shards or replicas: redistribute the "
                "partial sums first"
            )
        # in a step to_local would return the same piece, as one more view, which costs
        # host time tensor by tensor; nothing public returns the piece itself
        return tensor.to_local() if torch.is_grad_enabled() else tensor._local_tensor

    def wrap(self, local: Tensor, like: Tensor) -> Tensor:
        """Return a tensor laid out as ``like``; its piece on this rank is ``local``."""
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

    def cuts(self, tensor: Tensor) -> Mapping[int, Tensor]:
        """Return, for every dim of ``tensor`` that is cut, which of its indices lie
        here, in the order of the piece.
        """
        if not isinstance(tensor, DTensor):
            return {}
        indices, ndim = {}, tensor.ndim
        for dim in Placement.of(tensor).dims:
            mesh, shape = tensor.device_mesh, [1] * ndim
            shape[dim] = tensor.shape[dim]
            positions = torch.arange(shape[dim], device=mesh.device_type).view(shape)
            places = [
                p if not p.is_replicate() and dim_of(p) % ndim == dim else Replicate()
                for p in tensor.placements
            ]
            indices[dim] = piece_of(positions, mesh, places).flatten()
        return indices

    # ---- sum -----------------------------------------------------------------------

    def sum(self, partial: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Sum ``partial`` (len(leaves), K) over the shards of each leaf.

        The all-reduce spans replicas, too. The first replica contributes the numbers,
        so that all ranks go on with equal numbers; each other replica contributes NaN
        if its number is not finite, and else zero. Replicas are assumed to hold equal
        gradients, as FSDP2 leaves them.

        Raises:
            RuntimeError: ranks hold different leaves, which the first call with a list
                checks.
        """
        sums = partial
        for reduction in self._reductions.of(leaves, (), self._find_reductions):
            part = sums
            if reduction.rows is not None:
                part = sums[reduction.rows]
            if reduction.contributes is not None:
                # another rank contributes, but NaN on this rank still propagates
                silent = torch.where(torch.isfinite(part), 0.0, torch.nan)
                part = torch.where(reduction.contributes[:, None], part, silent)
            part = part.contiguous()
            dist.all_reduce(part, group=reduction.group)
            if reduction.rows is None:
                sums = part
            else:
                sums = sums.index_copy(0, reduction.rows, part)
        return sums

    def _find_reductions(self, leaves: Sequence[Tensor]) -> list[Reduction]:
        """Return the all-reduces of ``sum`` for one list of leaves."""
        places = self._places("sum", leaves)
        return reductions_of(places, self.mesh.device_type)

    # ---- agreement -----------------------------------------------------------------

    def _places(self, request: object, leaves: Sequence[Tensor]) -> list[Placement]:
        """Return the placements of leaves, after a check that ranks agree on them."""
        places = [Placement.of(leaf) for leaf in leaves]
        pairs = zip(leaves, places, strict=True)
        laid_out = {
            f"tensor {i}": (tuple(x.shape), x.dtype, place.common)
            for i, (x, place) in enumerate(pairs)
        }
        self.agree({"request": request, **laid_out})
        return places

    def agree(
        self, values: Mapping[str, object], params: Sequence[tuple[Tensor, str]] = ()
    ) -> None:
        """Raise unless ``values`` and the options of planning are equal on all ranks of
        the mesh. Collectives over different lists would hang, or add numbers of
        different tensors.

        Raises:
            RuntimeError: on every rank, if they differ.
        """
        own = {**self._options, "mesh": tuple(self.mesh.shape)}
        own |= names_in_modules(params)
        groups = self.mesh.get_all_groups()
        check_equal({**values, **own}, groups, self.mesh.device_type)

    # ---- whole matrices ------------------------------------------------------------

    def on_owners(self, requests: Sequence[Request]) -> list[MatrixOutput]:
        """Bring the matrices of each leaf to their owners, call their preconditioners'
        ``at_owner`` there, and return this rank's pieces of the results.
        """
        partition = self._partition([r.leaf for r in requests])
        out: dict[int, MatrixOutput] = {}
        for group, cuts in partition.groups:
            results = group.on_owners(_of_matrices(requests, group, cuts))
            rest = (results[n] for n in range(len(group.matrices)))
            for i, cut in cuts.items():
                matrices = [next(rest) for _ in cut.matrices]
                out[i] = joined(requests[i], matrices)
        local = [i for i in partition.local if requests[i].tensor.numel()]
        wholes = precondition_leaves([requests[i] for i in local])
        out |= zip(local, wholes, strict=True)
        for i in partition.local:  # an empty leaf has a piece of another shape
            out.setdefault(i, requests[i].empty_output)
        gathered = [requests[i] for i in partition.gathered]
        out |= zip(partition.gathered, self._by_gathering(gathered), strict=True)
        return [out[i] for i in range(len(requests))]

    def owns(self, leaves: Sequence[MatrixParam]) -> list[tuple[int, ...]]:
        """Return which matrices of each leaf have their owner here."""
        with unset_fake_temporarily():  # real numbers for a model without memory, too
            return self._owns(leaves) if leaves else []

    def _owns(self, leaves: Sequence[MatrixParam]) -> list[tuple[int, ...]]:
        partition = self._partition(leaves)
        out = {i: _numbers(leaves[i], {}) for i in partition.gathered}
        for i in partition.local:
            leaf = leaves[i].tensor
            cuts = self.cuts(leaf) if leaf.numel() else {}
            out[i] = _numbers(leaves[i], cuts)
        for group, group_cuts in partition.groups:
            owned, first = set(group.owns), 0
            for i, cut in group_cuts.items():
                shape, matrices = leaves[i].tensor.shape, leaves[i].matrices
                row_dim = matrices.column_dim(len(shape)) - 1
                cuts = self.cuts(leaves[i].tensor) if row_dim else {}
                batches = {dim: cuts[dim] for dim in cuts if dim < row_dim}
                positions = range(first, first + len(cut.matrices))
                pairs = zip(_numbers(leaves[i], batches), positions, strict=True)
                numbers = tuple(number for number, at in pairs if at in owned)
                out[i] = numbers
                first += len(cut.matrices)
        return [out[i] for i in range(len(leaves))]

    def publish_all(self, buffers: Sequence[OwnerBuffer]) -> Iterator[Tensor]:
        """Yield owners' buffers as DTensors (num, *shape) that are cut along the rows
        of their matrices, and flat DTensors, cut along their one dim. A collective of
        the leaves' meshes: an all-reduce of numbers, and another for each 32 MB of
        buffers.
        """
        on_meshes = [b for b in buffers if isinstance(b.leaf, DTensor)]
        published = whole_buffers(on_meshes, self.mesh.device_type)
        for buffer in buffers:
            on_mesh = isinstance(buffer.leaf, DTensor)
            yield next(published) if on_mesh else buffer.owned

    def claim(
        self, published: Tensor, owns: tuple[int, ...], sizes: Sequence[int]
    ) -> Tensor:
        """Return the part of a published buffer that has its owner here."""
        if isinstance(published, DTensor):
            published = published.full_tensor()
        return published[entries(owns, sizes).to(published.device)]

    def _by_gathering(self, requests: Sequence[Request]) -> list[MatrixOutput]:
        """Do the owners' work on every rank: reference and fallback."""
        gathered = []
        for request in requests:
            piece, leaf = request.input.matrix, request.tensor
            cost = request.preconditioner.cost.on(piece.device.type)
            travels = cost.payload(piece.dtype)
            whole = cast(DTensor, self.wrap(piece.to(travels), leaf)).full_tensor()
            gathered.append(
                request._replace(input=request.input._replace(matrix=whole))
            )
        results = []
        for request, output in zip(
            requests, precondition_leaves(gathered), strict=True
        ):
            leaf = cast(DTensor, request.tensor)
            matrix = piece_of(output.matrix, leaf.device_mesh, leaf.placements)
            results.append(output._replace(matrix=matrix.to(request.factor_dtype)))
        return results

    def _partition(self, leaves: Sequence[MatrixParam]) -> Partition:
        cost = leaves[0].preconditioner.cost
        ways = [MatrixSpec(x.matrices, bool(x.preconditioner.owned)) for x in leaves]
        find = partial(self._find_partition, cost, ways)
        key = (cost, *_distinct(ways))
        return self._partitions.of([leaf.tensor for leaf in leaves], key, find)

    def _find_partition(
        self,
        cost: MatrixCost,
        ways: Sequence[MatrixSpec],
        leaves: Sequence[Tensor],
    ) -> Partition:
        by_axis: dict[tuple[DeviceMesh, int, bool], dict[int, Cut]] = {}
        grids: dict[Hashable, dict[int, Grid]] = {}
        local, gathered = [], []
        cost = cost.on(leaves[0].device.type)  # equal on all ranks: machines differ
        places = self._places((cost, *ways), leaves)
        for i, leaf in enumerate(leaves):
            cut = cut_of(leaf, places[i], ways[i])
            if cut == "local":
                local.append(i)
            elif cut == "strided":
                grid = grid_of(leaf, places[i], ways[i])
                if grid is None or self._options["strategy"] == "replicate":
                    gathered.append(i)
                else:
                    grids.setdefault((grid.mesh, grid.axes), {})[i] = grid
            else:
                line = cut.mesh, cut.axis, cut.has_replicas
                by_axis.setdefault(line, {})[i] = cut
        if gathered:
            log.warning(
                "marsopt.parallel: every step gathers %d parameters whole, which is "
                "slow: several mesh axes (or strides, by tensor parallelism) cut them, "
                "and they hold several matrices",
                len(gathered),
            )
        groups: list[tuple[ShardGroup, dict[int, Cut]]] = []
        for (mesh, axis, copies), cuts in by_axis.items():
            if self._options["strategy"] == "replicate":
                gathered += cuts
                continue
            matrices = [matrix for cut in cuts.values() for matrix in cut.matrices]
            group = ShardGroup(
                mesh, axis, matrices, cost, has_replicas=copies, **self._options
            )
            groups.append((group, cuts))
        for alike in grids.values():
            most = self._options["max_buckets"]
            group = group_over([*alike.values()], cost, max_buckets=most)
            groups.append((group, {i: grid.cut for i, grid in alike.items()}))
        return Partition(groups, local, gathered)


def collectives_of(model: nn.Module) -> Collectives:
    """Return the collectives for a step of ``model``: over its mesh (FSDP2, HSDP, TP),
    over the ranks of DistributedDataParallel, or LOCAL if it has neither.

    After a forward pass without a backward pass FSDP's root holds its parameters whole.
    This makes them shards again, as an optimizer needs them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    called = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(called, DistributedDataParallel):
        return DataParallel(called.process_group)
    return over_meshes(model.parameters())


def over_meshes(params: Iterable[Tensor]) -> Collectives:
    """Return ``MeshCollectives`` over the largest mesh of ``params``, the first of
    equals; LOCAL if no tensor is a DTensor.
    """
    meshes = [p.device_mesh for p in params if isinstance(p, DTensor)]
    return MeshCollectives(max(meshes, key=DeviceMesh.size)) if meshes else LOCAL


def _of_matrices(
    requests: Sequence[Request], group: ShardGroup, cuts: dict[int, Cut]
) -> list[Request]:
    """Return one request for each matrix of the leaves, in order."""
    owns = set(group.owns)
    by_matrix: list[Request] = []
    for i, cut in cuts.items():
        piece, first = requests[i].input, len(by_matrix)
        here = [m for n, m in enumerate(cut.matrices, first) if n in owns]
        if requests[i].matrices.is_even(requests[i].tensor.shape):
            buffers = [[*buffer] for buffer in piece.owned]
        else:
            shapes = [torch.Size([m.rows, m.cols]) for m in here]
            buffers = owned_views(requests[i], shapes)
        owned = zip(*buffers, strict=True)
        for shard in cut.split(piece.matrix):
            whole = piece._replace(
                matrix=shard,
                owned=next(owned) if piece.owned and len(by_matrix) in owns else (),
            )
            by_matrix.append(requests[i]._replace(input=whole))
    return by_matrix


def _numbers(leaf: MatrixParam, cuts: Mapping[int, Tensor]) -> tuple[int, ...]:
    """Return the numbers of the matrices of a leaf that lie here, in the order of its
    piece. ``cuts`` of the leaf divide no matrix.
    """
    runs = rows_here(leaf.tensor.shape, cuts, leaf.matrices)
    return tuple(number for number, _ in runs)


def _distinct(ways: Sequence[Hashable]) -> Sequence[Hashable]:
    """Return a key that stands for all ways: the first, if all are equal."""
    alike = all(way is ways[0] or way == ways[0] for way in ways)
    return ways[:1] if alike else ways
