"""Each step, as planned: matrices that one mesh axis cuts go to owners and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh

from marsopt.functional.collectives import Request, precondition_matrices
from marsopt.parallel.exchange import Exchange, Gather, Shape, TensorSpec
from marsopt.parallel.planner import Matrix, Plan, plan
from marsopt.rules.preconditioner import MatrixCost, MatrixOutput


class ShardGroup:
    """The matrices that one mesh axis cuts, their plan, and its execution.

    Args:
        mesh: the mesh that they lie on.
        axis: the axis that cuts them.
        matrices: their shapes, and the dim that is cut.
        cost: of preconditioning a matrix.
        has_replicas: whether another axis of the mesh holds copies (HSDP).
        planned: a plan; None = ``planner.plan``'s.
        work: makes results of a bucket's whole matrices: a function of its number and
            requests.
        options: of ``planner.plan``.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axis: int,
        matrices: Sequence[Matrix],
        cost: MatrixCost,
        *,
        has_replicas: bool = False,
        planned: Plan | None = None,
        work: Callable[[int, list[Request]], list[MatrixOutput]] = lambda _, x: (
            precondition_matrices(x)
        ),
        **options: Any,
    ) -> None:
        self.matrices, self._cost = matrices, cost
        self._group, self._rank = mesh.get_group(axis), mesh.get_local_rank(axis)
        others = [a for a in range(mesh.ndim) if a != axis]
        # one replicate axis beside the shard axis is HSDP
        copies = mesh.size(others[0]) if has_replicas and len(others) == 1 else 1
        self._work = work
        self.plan = planned or plan(
            matrices, mesh.size(axis), cost, replicas=copies, **options
        )
        shapes = {m: m.shards(self.plan.num_ranks) for m in set(matrices)}
        self._shapes = [shapes[m] for m in matrices]
        # where replicas share the owners' work: their axis, and this replica's number
        self._replicas, self._replica = None, 0
        if self.plan.replicas > 1 and self.plan.num_buckets:
            self._replicas = mesh.get_group(others[0])
            self._replica = mesh.get_local_rank(others[0])
        self._exchanges = [
            self.plan.exchanges(replica) for replica in range(self.plan.replicas)
        ]
        this_owner = self._replica * self.plan.num_ranks + self._rank
        # which matrices have their owner here: without sharing, one in every replica
        self.owns = [i for i, o in enumerate(self.plan.owners) if o == this_owner]

    def on_owners(self, requests: Sequence[Request]) -> dict[int, MatrixOutput]:
        """Return the results of all matrices as this rank's shards, by number, from its
        shards of all matrices; with buffers of owners where the owner is this rank.
        """
        results = self._by_owners(requests)
        if self._replicas is not None:
            results = self._shared(results, requests)
        return results

    def _by_owners(self, requests: Sequence[Request]) -> dict[int, MatrixOutput]:
        """Send shards to owners and results back: two all-to-all a bucket.

        The shards of all buckets are under way before an owner works on the first, and
        the results of a bucket travel back while it works on the next.
        """
        ranks, to_owners, back = range(self.plan.num_ranks), [], []
        exchanges = self._exchanges[self._replica]
        kept: dict[int, tuple[Tensor | None, ...] | None] = {}
        wides = [
            widest([requests[i] for part in owned for i in part]) for owned in exchanges
        ]
        for owned, wide in zip(exchanges, wides, strict=True):
            with record_function("marsopt: exchange"):
                words = self._cost.payload(wide)
                sent = [
                    [x for i in part for x in self._to_owner(i, requests[i], words)]
                    for part in owned
                ]
                specs = [
                    [
                        spec
                        for i in owned[self._rank]
                        for spec in self._from(r, i, requests[i], words)
                    ]
                    for r in ranks
                ]
                like = requests[0].input.matrix.new_empty(0, dtype=words)
                to_owners.append(Exchange(sent, specs, like, self._group))
                del sent  # it has copies in ``words``
        columns = zip(exchanges, wides, to_owners, strict=True)
        for number, (owned, wide, arriving) in enumerate(columns):
            by_rank, members = arriving.wait(), owned[self._rank]
            with record_function("marsopt: whole matrices at their owner"):
                results = self._work(number, self._whole(members, requests, by_rank))
            del by_rank
            with record_function("marsopt: exchange"):
                words = self._cost.returned(wide)
                cuts = [
                    self._cuts(i, requests[i], whole, words)
                    for i, whole in zip(members, results, strict=True)
                ]
                kept |= {i: w.owned for i, w in zip(members, results, strict=True)}
                del results
                sent = [[x for cut in cuts for x in cut[r]] for r in ranks]
                specs = [
                    [x for i in part for x in self._back(i, requests[i], words)]
                    for part in owned
                ]
                like = requests[0].input.matrix.new_empty(0, dtype=words)
                back.append(Exchange(sent, specs, like, self._group))
                del cuts, sent  # which are the factors
        shards = {}
        for owned, arriving in zip(exchanges, back, strict=True):
            for part, tensors in zip(owned, arriving.wait(), strict=True):
                found = results_in(tensors, [requests[i] for i in part])
                for i, shard in zip(part, found, strict=True):
                    shards[i] = shard._replace(owned=kept.get(i, ()))
        return shards

    # ---- what travels: a matrix, and numbers of its rows where these are cut ---------

    def _to_owner(self, i: int, request: Request, words: torch.dtype) -> list[Tensor]:
        shard, wide = request.input, row_dtype(request, words)
        rows = shard.rows if self.matrices[i].dim == 0 else ()
        return [shard.matrix.to(words), *(r.to(wide) for r in rows)]

    def _from(
        self, rank: int, i: int, request: Request, words: torch.dtype
    ) -> list[TensorSpec]:
        """Return the shapes and dtypes that a rank sends of a matrix to its owner."""
        shape, wide = self._shapes[i][rank], row_dtype(request, words)
        rows = request.input.rows if self.matrices[i].dim == 0 else ()
        return [TensorSpec(shape, words), *(TensorSpec(shape[:1], wide) for _ in rows)]

    def _whole(
        self,
        members: Sequence[int],
        requests: Sequence[Request],
        by_rank: Sequence[Sequence[Tensor]],
    ) -> list[Request]:
        """Return this owner's matrices, from what every rank has sent."""
        wholes, from_ranks = [], [iter(tensors) for tensors in by_rank]
        for i in members:
            dim, shard = self.matrices[i].dim, requests[i].input
            matrix = torch.cat([next(tensors) for tensors in from_ranks], dim)
            rows = shard.rows  # of whole columns: here already
            if dim == 0:
                rows = tuple(
                    torch.cat([next(tensors) for tensors in from_ranks]) for _ in rows
                )
            whole = shard._replace(matrix=matrix, rows=rows)
            wholes.append(requests[i]._replace(input=whole))
        return wholes

    def _cuts(
        self, i: int, request: Request, whole: MatrixOutput, words: torch.dtype
    ) -> list[list[Tensor]]:
        """Return the parts of its result that a matrix's owner sends to each rank."""
        dim, wide = self.matrices[i].dim, row_dtype(request, words)
        sizes = [shape[dim] for shape in self._shapes[i]]
        parts = [[part] for part in whole.matrix.to(words).split(sizes, dim)]
        for r in whole.rows:
            row_parts = (
                r.to(wide).split(sizes) if dim == 0 else [r.to(wide)] * len(sizes)
            )
            for part, numbers in zip(parts, row_parts, strict=True):
                part.append(numbers)
        return parts

    def _back(self, i: int, request: Request, words: torch.dtype) -> list[TensorSpec]:
        """Return the shapes and dtypes that the owner of a matrix sends here."""
        return result_specs(request, self._shapes[i][self._rank], words)

    # ---- replicas --------------------------------------------------------------------

    def _shared(
        self, results: dict[int, MatrixOutput], requests: Sequence[Request]
    ) -> dict[int, MatrixOutput]:
        """Send the results of this replica's owners to all replicas: one padded
        all-gather.
        """
        words = self._cost.returned(widest(requests))
        shares = [
            [i for owned in exchanges for part in owned for i in part]
            for exchanges in self._exchanges
        ]
        specs = [
            [spec for i in share for spec in self._back(i, requests[i], words)]
            for share in shares
        ]
        like = requests[0].input.matrix.new_empty(0, dtype=words)
        mine = [
            x
            for i in (shares[self._replica] if results else [])
            for x in (results[i].matrix.to(words), *results[i].rows)
        ]
        assert self._replicas is not None
        everyone = Gather(mine, specs, like, self._replicas).wait()
        shards = {}
        for share, tensors in zip(shares, everyone, strict=True):
            found = results_in(tensors, [requests[i] for i in share])
            for i, shard in zip(share, found, strict=True):
                owned = results[i].owned if i in results else ()
                shards[i] = shard._replace(owned=owned)
        return shards


def widest(requests: Sequence[Request]) -> torch.dtype:
    """Return the dtype that holds the matrices of all requests."""
    dtypes = (r.input.matrix.dtype for r in requests)
    return reduce(torch.promote_types, dtypes)


def row_dtype(request: Request, words: torch.dtype) -> torch.dtype:
    """Return the dtype of numbers of rows on their way, in which they are exact."""
    return torch.promote_types(request.factor_dtype, words)


def result_specs(
    request: Request, shape: Shape, words: torch.dtype
) -> list[TensorSpec]:
    """Return the shapes and dtypes in which a result of this shape travels."""
    rows = TensorSpec(shape[:1], row_dtype(request, words))
    num_rows = len(request.preconditioner.row_outputs)
    return [TensorSpec(shape, words), *[rows] * num_rows]


def results_in(
    tensors: Sequence[Tensor], requests: Sequence[Request]
) -> list[MatrixOutput]:
    """Return the results of requests, without owners' buffers, from the tensors that
    have traveled.
    """
    rest, results = iter(tensors), []
    for request in requests:
        matrix = next(rest).to(request.factor_dtype)
        rows = tuple(next(rest) for _ in request.preconditioner.row_outputs)
        results.append(MatrixOutput(matrix, rows))
    return results
