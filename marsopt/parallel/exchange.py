"""Whole matrices there and back: tensors travel as flat buffers, matrices to owners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import chain, count, repeat
from math import prod
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh

from marsopt.parallel.layout import Grid, Matrix
from marsopt.parallel.planner import Members, plan
from marsopt.rules.component import MatrixCost, MatrixOutput
from marsopt.step.owners import OwnedTensors, Request, precondition_matrices

# torch 2.13 has another name for it, and warns of this name
_all_gather = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor that arrives."""

    shape: Sequence[int]
    dtype: torch.dtype

    def num_words(self, words: torch.dtype) -> int:
        """Return how many elements of the dtype ``words`` it takes."""
        return prod(self.shape) * (self.dtype.itemsize // words.itemsize)


Specs = Sequence[Sequence[TensorSpec]]  # of the tensors that each rank sends


def to_words(x: Tensor, words: torch.dtype) -> Tensor:
    """Return the bits of ``x`` as a flat tensor of the dtype ``words``, which must not
    be wider than ``x``'s.
    """
    return x.reshape(-1).contiguous().view(words)


def from_words(flat: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Return the tensors at the start of ``flat``, their bits one after the other."""
    sizes = [spec.num_words(flat.dtype) for spec in specs]
    parts = flat[: sum(sizes)].split(sizes)
    return [
        # wider tensors need not begin at a multiple of their width
        (part if spec.dtype == flat.dtype else part.clone().view(spec.dtype)).view(
            tuple(spec.shape)
        )
        for part, spec in zip(parts, specs, strict=True)
    ]


class Arrival:
    """Tensors of all ranks, on their way in one flat buffer."""

    def __init__(
        self, work: dist.Work, leaving: Tensor, arriving: Sequence[Tensor], specs: Specs
    ) -> None:
        self._work, self._leaving = work, leaving
        self._arriving, self._specs = arriving, specs

    def wait(self) -> list[list[Tensor]]:
        """Wait, and return the tensors from each rank. May be called once."""
        self._work.wait()
        del self._work, self._leaving  # gloo's work holds the buffer that leaves
        pairs = zip(self._arriving, self._specs, strict=True)
        return [from_words(flat, specs) for flat, specs in pairs]


def all_to_all(
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    words: Tensor,
    group: dist.ProcessGroup,
) -> Arrival:
    """Send tensors to each rank: flat, ordered by destination, with exact sizes. They
    may be uneven or empty, and nothing is padded.

    Args:
        sent: the tensors for each rank.
        shapes: of the tensors that each rank sends to this rank.
        words: an empty tensor of their dtype, on their device.
        group: the ranks.
    """
    flat = [[x.reshape(-1) for x in part] for part in sent]
    leaving = torch.cat([words, *chain(*flat)])
    leaving_sizes = [sum(map(len, part)) for part in flat]
    sizes = [sum(map(prod, part)) for part in shapes]
    arriving = words.new_empty(sum(sizes))
    work = dist.all_to_all_single(
        arriving, leaving, sizes, leaving_sizes, group=group, async_op=True
    )
    specs = [[TensorSpec(shape, words.dtype) for shape in part] for part in shapes]
    return Arrival(work, leaving, arriving.split(sizes), specs)


def all_gather(
    sent: Sequence[Tensor], specs: Specs, words: Tensor, group: dist.ProcessGroup
) -> Arrival:
    """Send tensors to all ranks: flat, padded to the rank that sends most.

    Args:
        sent: the tensors of this rank.
        specs: the tensors that each rank sends.
        words: an empty tensor on their device, of the narrowest dtype among them: bits
            travel as this dtype.
        group: the ranks.
    """
    sizes = [sum(spec.num_words(words.dtype) for spec in part) for part in specs]
    width = max(1, *sizes)
    flat = [to_words(x, words.dtype) for x in sent]
    padding = words.new_zeros(width - sum(map(len, flat)))
    leaving = torch.cat([*flat, padding])
    arriving = words.new_empty(len(specs) * width)
    work = _all_gather(arriving, leaving, group=group, async_op=True)
    return Arrival(work, leaving, arriving.split(width), specs)


def all_reduce(
    partial: Tensor, contributes: Tensor | None, group: dist.ProcessGroup
) -> Tensor:
    """Return the sum of ``partial`` (N, K) over a group, of the ranks that contribute
    (N, 1): a number that is not finite becomes NaN wherever it is.
    """
    if contributes is not None:
        silent = torch.where(torch.isfinite(partial), 0.0, torch.nan)
        partial = torch.where(contributes, partial, silent)
    sums = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(sums, group=group)
    return sums


# ---- one axis ------------------------------------------------------------------------


class ShardGroup:
    """The matrices that one mesh axis cuts, their plan, and its execution.

    Args:
        mesh: the mesh of the matrices.
        axis: the axis that cuts them.
        matrices: their shapes, and the dim that is cut.
        cost: of preconditioning a matrix.
        copies: the axis of replicas that share the owners' work (HSDP), if any.
        planned: the matrices of each rank of the axis, bucket by bucket; None: owners
            are all ranks of the axis and of replicas, balanced by FLOPs.
        work: makes results of a bucket's whole matrices: a function of its number and
            requests.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axis: int,
        matrices: Sequence[Matrix],
        cost: MatrixCost,
        *,
        copies: int | None = None,
        planned: Sequence[Members] | None = None,
        work: Callable[[int, list[Request]], list[MatrixOutput]] = lambda _, x: (
            precondition_matrices(x)
        ),
    ) -> None:
        self.matrices, self._cost, self._work = matrices, cost, work
        self._group, self._rank = mesh.get_group(axis), mesh.get_local_rank(axis)
        self._replicas, replica = None, 0
        num_owners = num_ranks = mesh.size(axis)
        if copies is not None:
            self._replicas = mesh.get_group(copies)
            replica = mesh.get_local_rank(copies)
            num_owners *= mesh.size(copies)
        if planned is None:
            sent = cost.payload().itemsize / num_owners
            planned = plan(cost, [m.shape for m in matrices], num_owners, sent)
        shapes = {m: m.shards(num_ranks) for m in set(matrices)}
        self._shapes = [shapes[m] for m in matrices]  # of shards, rank by rank
        # owners are numbered through the ranks of the first replica, of the second, ...
        starts = range(0, num_owners, num_ranks)
        buckets = [[b[i : i + num_ranks] for i in starts] for b in planned]
        self._shares = [[[*chain(*part)] for part in parts] for parts in buckets]
        self._exchanges = [parts[replica] for parts in buckets if any(parts[replica])]
        # the matrices that have their owner here
        self.owns = [i for owned in self._exchanges for i in owned[self._rank]]

    def on_owners(self, requests: Sequence[Request]) -> dict[int, MatrixOutput]:
        """Return the results of all matrices as this rank's shards, by number, from its
        shards of all matrices; with the owner's buffers if the owner is this rank.
        """
        results = self._by_owners(requests)
        if self._replicas is None:
            return results
        each = repeat(results, len(self._shares))
        return share(requests, self._shares, each, self._cost, self._replicas)

    def _by_owners(self, requests: Sequence[Request]) -> dict[int, MatrixOutput]:
        """Send shards to owners and results back: two all-to-all a bucket.

        The shards of all buckets are under way before an owner works on the first, and
        the results of a bucket travel back while it works on the next.
        """
        me, like = self._rank, requests[0].input.matrix
        to_owners, back = list[Arrival](), list[Arrival]()
        buffers: dict[int, tuple[Tensor | None, ...]] = {}
        wides = [_widest(requests, chain(*owned)) for owned in self._exchanges]
        for owned, wide in zip(self._exchanges, wides, strict=True):
            with record_function("marsopt: exchange"):
                words = like.new_empty(0, dtype=self._cost.payload(wide))
                sent = [
                    [requests[i].input.matrix.to(words.dtype) for i in part]
                    for part in owned
                ]
                ranks = range(len(owned))
                shapes = [[self._shapes[i][r] for i in owned[me]] for r in ranks]
                to_owners.append(all_to_all(sent, shapes, words, self._group))
                del sent  # it has copies in ``words``
        for number, owned in enumerate(self._exchanges):
            pieces = to_owners.pop(0).wait()
            with record_function("marsopt: whole matrices at their owner"):
                wholes = [
                    _with_matrix(requests[i], torch.cat(parts, self.matrices[i].dim))
                    for i, *parts in zip(owned[me], *pieces, strict=True)
                ]
                del pieces
                results = self._work(number, wholes)
            del wholes
            with record_function("marsopt: exchange"):
                words = like.new_empty(0, dtype=self._cost.returned(wides[number]))
                cuts = [
                    self._cut(i, result.matrix.to(words.dtype))
                    for i, result in zip(owned[me], results, strict=True)
                ]
                buffers |= zip(owned[me], [x.owned for x in results], strict=True)
                del results
                sent = [[cut[r] for cut in cuts] for r in range(len(owned))]
                shapes = [[self._shapes[i][me] for i in part] for part in owned]
                back.append(all_to_all(sent, shapes, words, self._group))
                del cuts, sent  # which are the factors
        found = {}
        for owned in self._exchanges:
            for part, tensors in zip(owned, back.pop(0).wait(), strict=True):
                for i, shard in zip(part, tensors, strict=True):
                    factor = shard.to(requests[i].factor_dtype)
                    found[i] = MatrixOutput(factor, buffers.get(i, ()))
        return found

    def _cut(self, i: int, whole: Tensor) -> Sequence[Tensor]:
        """Return the parts of its result that a matrix's owner sends to each rank."""
        dim = self.matrices[i].dim
        parts: Sequence[Tensor] = whole.split([x[dim] for x in self._shapes[i]], dim)
        return parts


def _with_matrix(request: Request, matrix: Tensor) -> Request:
    return request._replace(input=request.input._replace(matrix=matrix))


def _widest(requests: Sequence[Request], numbers: Iterable[int]) -> torch.dtype:
    """Return the dtype that holds the matrices of these requests."""
    dtypes = (requests[i].input.matrix.dtype for i in numbers)
    return reduce(torch.promote_types, dtypes)


# ---- replicas ------------------------------------------------------------------------


def share(
    requests: Sequence[Request],
    shares: Sequence[Members],
    results: Iterable[Mapping[int, MatrixOutput]],
    cost: MatrixCost,
    group: dist.ProcessGroup,
    *,
    with_buffers: bool = False,
) -> dict[int, MatrixOutput]:
    """Send the results of each rank's share to all ranks of a group: one padded
    all-gather a bucket, which travels while the next bucket is worked on. All ranks
    take a result as it was sent, so that they stay equal.

    Args:
        requests: of all matrices.
        shares: the matrices of each rank, bucket by bucket.
        results: of this rank's share, for each bucket.
        cost: of preconditioning a matrix.
        group: the ranks.
        with_buffers: whether every rank has the owners' buffers, which travel, too.
    """
    wide = cost.returned(_widest(requests, range(len(requests))))
    words = requests[0].input.matrix.new_empty(0, dtype=wide)
    specs = [_result_specs(request, wide, with_buffers) for request in requests]
    found: dict[int, MatrixOutput] = {}
    arriving: list[Arrival] = []
    for bucket, here in zip(shares, results, strict=True):
        sent = list[Tensor]()
        for i in bucket[group.rank()]:
            found[i] = here[i]
            new = cast(OwnedTensors, here[i].owned) if with_buffers else ()
            tensors = here[i].matrix, *new
            sent += [x.to(s.dtype) for x, s in zip(tensors, specs[i], strict=True)]
        with record_function("marsopt: exchange"):
            arrive = [[spec for i in part for spec in specs[i]] for part in bucket]
            arriving.append(all_gather(sent, arrive, words, group))
    for bucket in shares:
        for part, arrived in zip(bucket, arriving.pop(0).wait(), strict=True):
            rest = iter(arrived)
            for i in part:
                matrix, *buffers = (next(rest) for _ in specs[i])
                matrix = matrix.to(requests[i].factor_dtype)
                if with_buffers:
                    found[i] = requests[i].kept(MatrixOutput(matrix, tuple(buffers)))
                else:
                    owned = found[i].owned if i in found else ()
                    found[i] = MatrixOutput(matrix, owned)
    return found


def _result_specs(
    request: Request, words: torch.dtype, with_buffers: bool
) -> list[TensorSpec]:
    """Return a matrix's result, and its buffers, as they travel."""
    buffers = request.input.owned if with_buffers else ()
    wide = (torch.promote_types(buffer.dtype, words) for buffer in buffers)
    pairs = zip((buffer.shape for buffer in buffers), wide, strict=True)
    specs = [TensorSpec(*pair) for pair in pairs]
    return [TensorSpec(request.input.matrix.shape, words), *specs]


# ---- two axes ------------------------------------------------------------------------


def group_over(grids: Sequence[Grid], cost: MatrixCost) -> ShardGroup:
    """Return matrices that two axes cut as a group of the second axis. Its owners work
    by exchanging their strips along the first: at most four all-to-all a bucket.
    """
    mesh, (first, second) = grids[0].mesh, grids[0].axes
    num, parts = mesh.size(first), mesh.size(second)
    sent = cost.payload().itemsize / (num * parts)
    # an owner's number: its rank along ``first`` times ``parts``, plus the other
    buckets = plan(cost, [grid.whole.shape for grid in grids], num * parts, sent)
    inner, owns = [], list[int]()
    for bucket in buckets:
        line = bucket[mesh.get_local_rank(second) :: parts]
        positions = count()
        here = line[mesh.get_local_rank(first)]
        owns += here
        group = ShardGroup(
            mesh,
            first,
            [grids[i].whole for i in chain(*line)],
            cost,
            planned=[[[next(positions) for _ in owned] for owned in line]],
            work=partial(_precondition_strips, [grids[i] for i in here]),
        )
        inner.append(group)

    def along_first(number: int, requests: list[Request]) -> list[MatrixOutput]:
        results = inner[number].on_owners(requests) if requests else {}
        return [results[i] for i in range(len(requests))]

    strips = [grid.strip for grid in grids]
    across = [[[*chain(*bucket[i::parts])] for i in range(parts)] for bucket in buckets]
    group = ShardGroup(mesh, second, strips, cost, planned=across, work=along_first)
    group.owns = owns  # the strips that become whole matrices here
    return group


def _precondition_strips(
    grids: Sequence[Grid], bucket: int, requests: Sequence[Request]
) -> list[MatrixOutput]:
    """Precondition whole matrices, with rows in the order of their strips."""
    pairs = zip(requests, grids, strict=True)
    ordered = [
        request._replace(input=grid.in_order(request.input)) for request, grid in pairs
    ]
    results = zip(precondition_matrices(ordered), grids, strict=True)
    return [grid.in_order(result, back=True) for result, grid in results]
