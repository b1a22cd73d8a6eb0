"""ShardGroup: Newton-Schulz of matrices that one mesh axis cuts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh

from marsopt import NewtonSchulz

from .exchange import Exchange, unflatten
from .planner import Matrix, plan


class ShardGroup:
    """The matrices of one axis, and what has been decided for them.

    Args:
        mesh: the mesh that they lie on.
        axis: the axis that cuts them.
        matrices: shapes and cut dims.
        ns: how they are orthogonalized.
        has_replicas: whether another axis of the mesh has the same matrices (HSDP).
        options: of ``planner.plan``.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axis: int,
        matrices: Sequence[Matrix],
        ns: NewtonSchulz,
        *,
        has_replicas: bool,
        **options,
    ) -> None:
        self.matrices, self._ns = matrices, ns
        self._group, self._rank = mesh.get_group(axis), mesh.get_local_rank(axis)
        others = [a for a in range(mesh.ndim) if a != axis]
        # one replicate axis beside the shard axis is HSDP
        copies = mesh.size(others[0]) if has_replicas and len(others) == 1 else 1
        self.plan = plan(matrices, mesh.size(axis), ns, replicas=copies, **options)
        self._shapes = [m.shards(self.plan.num_ranks) for m in matrices]
        # the replica axis where replicas share the owners' work, and who is who there
        self._replicas, self._replica = None, 0
        if self.plan.replicas > 1 and self.plan.num_buckets:
            self._replicas = mesh.get_group(others[0])
            self._replica = mesh.get_local_rank(others[0])
        self._exchanges = [
            self.plan.exchanges(replica) for replica in range(self.plan.replicas)
        ]

    def orthogonalize(self, local: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return shards of the factors of what is not to be gathered, by index, from
        shards of all matrices.
        """
        found = self._by_owners(local)
        if self._replicas is not None:
            found = self._shared(found, local)
        return found | self._by_gram(local)

    def _by_owners(self, local: Sequence[Tensor]) -> dict[int, Tensor]:
        """Send shards to owners and back: two all-to-all per bucket.

        All shards are under way before the first bucket is iterated, and a bucket's
        factors travel back while the next one is iterated.
        """
        ns, ranks, there, back = self._ns, range(self.plan.num_ranks), [], []
        exchanges = self._exchanges[self._replica]
        for owned in exchanges:
            with record_function("marsopt: exchange"):
                sent = [[local[i] for i in part] for part in owned]
                dtypes = (x.dtype for part in sent for x in part)
                widest = ns.payload(reduce(torch.promote_types, dtypes))
                pieces = [
                    [self._shapes[i][r] for i in owned[self._rank]] for r in ranks
                ]
                like = local[0].new_empty(0, dtype=widest)
                there.append(Exchange(sent, pieces, like, self._group))
        for owned, arriving in zip(exchanges, there, strict=True):
            by_rank, mine = arriving.wait(), owned[self._rank]
            with record_function("marsopt: newton-schulz on the owner"):
                factors = ns.many(
                    [
                        torch.cat(
                            [pieces[k] for pieces in by_rank], self.matrices[i].dim
                        )
                        for k, i in enumerate(mine)
                    ]
                )
            with record_function("marsopt: exchange"):
                cuts = [
                    o.split(
                        [shape[self.matrices[i].dim] for shape in self._shapes[i]],
                        self.matrices[i].dim,
                    )
                    for i, o in zip(mine, factors, strict=True)
                ]
                sent = [[cut[r] for cut in cuts] for r in ranks]
                shards = [[self._shapes[i][self._rank] for i in part] for part in owned]
                like = local[0].new_empty(0, dtype=ns.dtype)
                back.append(Exchange(sent, shards, like, self._group))
        return {
            i: shard.to(local[i].dtype)
            for owned, arriving in zip(exchanges, back, strict=True)
            for part, shards in zip(owned, arriving.wait(), strict=True)
            for i, shard in zip(part, shards, strict=True)
        }

    def _shared(
        self, mine: dict[int, Tensor], local: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """Give this replica's factors to all replicas: one all-gather, padded."""
        shares = [
            [i for owned in exchanges for part in owned for i in part]
            for exchanges in self._exchanges
        ]
        shapes = [[local[i].shape for i in share] for share in shares]
        widest = max(sum(s.numel() for s in part) for part in shapes)
        flat = torch.zeros(widest, dtype=self._ns.dtype, device=local[0].device)
        if mine:
            own = torch.cat([mine[i].reshape(-1) for i in shares[self._replica]])
            flat[: len(own)] = own
        everyone = flat.new_empty(len(shapes) * widest)
        dist.all_gather_into_tensor(everyone, flat, group=self._replicas)
        rows = everyone.view(len(shapes), widest)
        return {
            i: piece.to(local[i].dtype)
            for share, row, part in zip(shares, rows, shapes, strict=True)
            for i, piece in zip(share, unflatten(row, part), strict=True)
        }

    def _by_gram(self, local: Sequence[Tensor]) -> dict[int, Tensor]:
        """Use Gram matrices of short sides: one all-reduce of all, in float32."""
        members = self.plan.members("gram")
        if not members:
            return {}
        wide = torch.float64 if self._ns.dtype == torch.float64 else torch.float32
        wide = reduce(torch.promote_types, (local[i].dtype for i in members), wide)

        def tall(x: Tensor, i: int) -> Tensor:
            return x if self.matrices[i].dim == 0 else x.mT

        # TF32 would lose what a Gram matrix, formed once, cannot do without
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            x = [tall(local[i].to(wide), i) for i in members]
            grams = [piece.mT @ piece for piece in x]
            flat = torch.cat([gram.reshape(-1) for gram in grams])
            dist.all_reduce(flat, group=self._group)
            summed = unflatten(flat, [gram.shape for gram in grams])
            return {
                i: tall((piece @ self._ns.from_gram(gram)).to(local[i].dtype), i)
                for i, piece, gram in zip(members, x, summed, strict=True)
            }
        finally:
            torch.set_float32_matmul_precision(before)
