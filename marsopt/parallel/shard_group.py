"""Each step, as planned: matrices that one mesh axis cuts go to owners and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh

from marsopt.parallel.exchange import Exchange, Gather, TensorSpec
from marsopt.parallel.planner import Matrix, Plan, plan
from marsopt.rules.preconditioner import MatrixCost, MatrixOutput
from marsopt.step.owners import Request, precondition_matrices


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
        # if replicas share the owners' work: their axis, and this replica's number
        self._replicas, self._replica = None, 0
        if self.plan.replicas > 1 and self.plan.num_buckets:
            self._replicas = mesh.get_group(others[0])
            self._replica = mesh.get_local_rank(others[0])
        self._exchanges = [
            self.plan.exchanges(replica) for replica in range(self.plan.replicas)
        ]
        this_owner = self._replica * self.plan.num_ranks + self._rank
        # the matrices that have their owner here: without sharing, in every replica
        self.owns = [i for i, o in enumerate(self.plan.owners) if o == this_owner]

    def on_owners(self, requests: Sequence[Request]) -> dict[int, MatrixOutput]:
        """Return the results of all matrices as this rank's shards, by number, from its
        shards of all matrices; with the owner's buffers if the owner is this rank.
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
                    [requests[i].input.matrix.to(words) for i in part] for part in owned
                ]
                shapes = [
                    [self._shapes[i][r] for i in owned[self._rank]] for r in ranks
                ]
                like = requests[0].input.matrix.new_empty(0, dtype=words)
                to_owners.append(Exchange(sent, shapes, like, self._group))
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
                    self._cut(i, whole.matrix.to(words))
                    for i, whole in zip(members, results, strict=True)
                ]
                kept |= {i: w.owned for i, w in zip(members, results, strict=True)}
                del results
                sent = [[cut[r] for cut in cuts] for r in ranks]
                shapes = [[self._shapes[i][self._rank] for i in part] for part in owned]
                like = requests[0].input.matrix.new_empty(0, dtype=words)
                back.append(Exchange(sent, shapes, like, self._group))
                del cuts, sent  # which are the factors
        shards = {}
        for owned, arriving in zip(exchanges, back, strict=True):
            for part, tensors in zip(owned, arriving.wait(), strict=True):
                for i, shard in zip(part, tensors, strict=True):
                    factor = shard.to(requests[i].factor_dtype)
                    shards[i] = MatrixOutput(factor, kept.get(i, ()))
        return shards

    def _whole(
        self,
        members: Sequence[int],
        requests: Sequence[Request],
        by_rank: Sequence[Sequence[Tensor]],
    ) -> list[Request]:
        """Return this owner's matrices, from the pieces of every rank."""
        wholes = []
        for i, *pieces in zip(members, *by_rank, strict=True):
            matrix = torch.cat(pieces, self.matrices[i].dim)
            whole = requests[i].input._replace(matrix=matrix)
            wholes.append(requests[i]._replace(input=whole))
        return wholes

    def _cut(self, i: int, whole: Tensor) -> Sequence[Tensor]:
        """Return the parts of its result that a matrix's owner sends to each rank."""
        dim = self.matrices[i].dim
        sizes = [shape[dim] for shape in self._shapes[i]]
        parts: Sequence[Tensor] = whole.split(sizes, dim)
        return parts

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
            [TensorSpec(self._shapes[i][self._rank], words) for i in share]
            for share in shares
        ]
        like = requests[0].input.matrix.new_empty(0, dtype=words)
        mine = [
            results[i].matrix.to(words)
            for i in (shares[self._replica] if results else [])
        ]
        assert self._replicas is not None
        everyone = Gather(mine, specs, like, self._replicas).wait()
        shards = {}
        for share, tensors in zip(shares, everyone, strict=True):
            for i, shard in zip(share, tensors, strict=True):
                owned = results[i].owned if i in results else ()
                shards[i] = MatrixOutput(shard.to(requests[i].factor_dtype), owned)
        return shards


def widest(requests: Sequence[Request]) -> torch.dtype:
    """Return the dtype that holds the matrices of all requests."""
    dtypes = (r.input.matrix.dtype for r in requests)
    return reduce(torch.promote_types, dtypes)
