"""The step's entrance to the mesh: MeshCollectives, its methods over shards."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from marsopt.parallel.exchange import ShardGroup, all_reduce, group_over
from marsopt.parallel.layout import (
    Cut,
    Grid,
    MatrixSpec,
    Placement,
    cut_of,
    dim_of,
    grid_of,
    piece_of,
)
from marsopt.parallel.planner import (
    Reduction,
    check_equal,
    names_in_modules,
    reductions_of,
)
from marsopt.parallel.published import entries, whole_buffers
from marsopt.rules.component import MatrixCost, MatrixOutput
from marsopt.rules.formats import scales_shape
from marsopt.step.owners import (
    LOCAL,
    Collectives,
    MatrixParam,
    OwnerBuffer,
    Request,
    leaf_output,
    owned_views,
    precondition_leaves,
    rows_here,
)

log = logging.getLogger(__name__)


class Partition(NamedTuple):
    """The leaves of one call of ``on_owners``, by how their matrices become whole."""

    groups: list[tuple[ShardGroup, dict[int, Cut]]]
    local: list[int]  # each matrix is whole on its rank: in a batch, or replicated
    gathered: list[int]  # by all ranks: cut by several axes or in strides


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

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        # plans by the forms of their leaves: no reference to a leaf, not even a weak
        # one, for modules exchange DTensors by swap_tensors, which refuses these
        self._reductions: dict[Hashable, list[Reduction]] = {}
        self._partitions: dict[Hashable, Partition] = {}

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
        piece = tensor.to_local() if torch.is_grad_enabled() else tensor._local_tensor
        return piece.wait() if isinstance(piece, AsyncCollectiveTensor) else piece

    def wrap(self, local: Tensor, like: Tensor) -> Tensor:
        """Return a tensor laid out as ``like``; its piece on this rank is ``local``, or
        holds the scales of that piece.
        """
        if not isinstance(like, DTensor):
            return local
        shape, stride = like.shape, like.stride()
        if local.shape != like._local_tensor.shape:
            shape = scales_shape(shape)
            stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=shape,
            stride=stride,
        )

    def cuts(self, tensor: Tensor) -> Mapping[int, Tensor]:
        """Return, for every dim of ``tensor`` that is cut, the indices of this rank's
        piece, in its order.
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
        key = tuple(map(_form, leaves))
        if key not in self._reductions:
            places = self._places("sum", leaves)
            found = reductions_of(places, self.mesh.device_type)
            self._reductions[key] = found
        sums = partial
        for reduction in self._reductions[key]:
            part = sums if reduction.rows is None else sums[reduction.rows]
            part = all_reduce(part, reduction.contributes, reduction.group)
            if reduction.rows is None:
                sums = part
            else:
                sums = sums.index_copy(0, reduction.rows, part)
        return sums

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
        """Raise unless ``values`` are equal on all ranks of the mesh. Collectives over
        different lists would hang, or add numbers of different tensors.

        Raises:
            RuntimeError: on every rank, if they differ.
        """
        mesh = {"mesh": tuple(self.mesh.shape)}
        groups = self.mesh.get_all_groups()
        values = {**values, **mesh, **names_in_modules(params)}
        check_equal(values, groups, self.mesh.device_type)

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
                out[i] = leaf_output(requests[i], matrices)
        wholes = precondition_leaves([requests[i] for i in partition.local])
        out |= zip(partition.local, wholes, strict=True)
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
        specs = [MatrixSpec(x.matrices, bool(x.preconditioner.owned)) for x in leaves]
        tensors = [leaf.tensor for leaf in leaves]
        key = cost, *specs, *map(_form, tensors)
        if key not in self._partitions:
            self._partitions[key] = self._find_partition(cost, specs, tensors)
        return self._partitions[key]

    def _find_partition(
        self, cost: MatrixCost, specs: Sequence[MatrixSpec], leaves: Sequence[Tensor]
    ) -> Partition:
        by_axis: dict[tuple[DeviceMesh, int, int | None], dict[int, Cut]] = {}
        grids: dict[Hashable, dict[int, Grid]] = {}
        local, gathered = [], []
        cost = cost.on(leaves[0].device.type)  # equal on all ranks: machines differ
        places = self._places((cost, *specs), leaves)
        for i, leaf in enumerate(leaves):
            cut = cut_of(leaf, places[i], specs[i])
            if cut == "local":
                local.append(i)
            elif cut == "strided":
                grid = grid_of(leaf, places[i], specs[i])
                if grid is None:
                    gathered.append(i)
                else:
                    grids.setdefault((grid.mesh, grid.axes), {})[i] = grid
            else:
                line = cut.mesh, cut.axis, cut.copies
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
            matrices = [matrix for cut in cuts.values() for matrix in cut.matrices]
            group = ShardGroup(mesh, axis, matrices, cost, copies=copies)
            groups.append((group, cuts))
        for by_leaf in grids.values():
            group = group_over([*by_leaf.values()], cost)
            groups.append((group, {i: grid.cut for i, grid in by_leaf.items()}))
        return Partition(groups, local, gathered)


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
    """Return the numbers of a leaf's matrices on this rank, in the order of its piece.
    ``cuts`` of the leaf divide no matrix.
    """
    runs = rows_here(leaf.tensor.shape, cuts, leaf.matrices)
    return tuple(number for number, _ in runs)


def _form(x: Tensor) -> Hashable:
    """Return shape, dtype and placement. A DTensor has them in one object, ``_spec``,
    with its hash; to read its public parts costs host time, tensor by tensor.
    """
    return x._spec if isinstance(x, DTensor) else (x.shape, x.dtype)
