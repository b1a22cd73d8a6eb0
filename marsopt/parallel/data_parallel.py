"""In place of MeshCollectives, under plain DDP: ranks share Newton-Schulz."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from marsopt.parallel.agreement import check_equal
from marsopt.parallel.exchange import Gather, TensorSpec
from marsopt.parallel.planner import Plan, assign_buckets
from marsopt.parallel.shard_group import widest
from marsopt.rules.preconditioner import MatrixCost, MatrixOutput
from marsopt.step.owners import (
    LocalCollectives,
    Request,
    Tensors,
    batches_of,
    joined,
    precondition_leaves,
    precondition_matrices,
)

Shapes = tuple[tuple[int, ...], ...]


class DataParallel(LocalCollectives):
    """``marsopt.Collectives`` for plain data parallelism: every rank has all parameters
    and, after DistributedDataParallel's backward pass, equal gradients.

    Each rank does the work of owners for its share of the matrices, balanced by FLOPs;
    all-gathers bring the results to all ranks, bucket by bucket, while the next bucket
    is worked on. Every rank does the rest itself: ``state_dict()`` is complete on each,
    and rank 0 may save it by itself. Owners' buffers travel with the results. If they
    outweigh these (SOAP), each rank does all the work.

    ``for_model`` takes it by itself for a model in DistributedDataParallel. All ranks
    have to call ``step``.

    Args:
        process_group: the ranks, as ``DistributedDataParallel.process_group``; None =
            all.

    Raises:
        ValueError: None, and ``torch.distributed`` is not initialized.

    Example:
        >>> import torch.distributed as dist
        >>> from marsopt.parallel import DataParallel
        >>> single = dict(store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.init_process_group("gloo", **single)
        >>> model = torch.nn.Linear(4, 2)
        >>> ddp = torch.nn.parallel.DistributedDataParallel(model)
        >>> collectives = DataParallel(ddp.process_group)
        >>> optimizer = marsopt.MARS(
        ...     ddp.parameters(), mars_type="muon", collectives=collectives
        ... )
        >>> ddp(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise ValueError(
                "got no process group, expected one of the ranks that share "
                "parameters: call torch.distributed.init_process_group() before"
            )
        self._group = group

    def __reduce__(self) -> str:
        raise TypeError(
            "got a pickle of an optimizer with collectives=DataParallel, whose process "
            "group belongs to this process, expected its state_dict(): pickle that"
        )

    def __deepcopy__(self, memo: Any) -> DataParallel:
        return self

    def __repr__(self) -> str:
        return f"DataParallel({self._group.size()} ranks)"

    def agree(
        self, values: Mapping[str, object], params: Sequence[tuple[Tensor, str]]
    ) -> None:
        """Raise unless all ranks have equal ``values``, and equal bits in ``params``:
        results of a rank would else be written into other parameters.

        Raises:
            RuntimeError: on every rank, if they differ.
        """
        trained = [(p.detach(), name) for p, name in params if p.requires_grad]
        if trained:
            sums = torch.stack([_sum_of_bits(p) for p, _ in trained])
            names = (f"the sum of the bits of {name}" for _, name in trained)
            bits = dict(zip(names, sums.tolist(), strict=True))
            check_equal({**values, **bits}, [self._group], sums.device.type)

    def on_owners(self, requests: Sequence[Request]) -> list[MatrixOutput]:
        """Precondition this rank's share of the matrices, and gather the results of all
        ranks. All take a result as its owner has sent it, so that ranks stay equal.
        """
        if self._group.size() == 1 or any(r.input.is_outweighed for r in requests):
            return precondition_leaves(requests)
        by_leaf = [[*_single(request)] for request in requests]
        singles = [single for leaf in by_leaf for single in leaf]
        rest = iter(self._gathered(singles) if singles else [])
        return [
            joined(request, [next(rest) for _ in leaf])
            for request, leaf in zip(requests, by_leaf, strict=True)
        ]

    def _gathered(self, requests: Sequence[Request]) -> list[MatrixOutput]:
        """Return the owners' results for requests of one matrix each."""
        first = requests[0].input.matrix
        cost = requests[0].preconditioner.cost.on(first.device.type)
        words, rank = cost.returned(widest(requests)), self._group.rank()
        shapes = tuple(tuple(r.input.matrix.shape) for r in requests)
        exchanges = planned(cost, shapes, self._group.size())
        like = first.new_empty(0, dtype=words)
        arriving: list[Gather] = []
        for owned in exchanges:
            mine, sent = [requests[i] for i in owned[rank]], list[Tensor]()
            with record_function("marsopt: whole matrices at their owner"):
                results = precondition_matrices(mine)
            for request, result in zip(mine, results, strict=True):
                # None: the step has written into the buffers
                new = request.input.owned if result.owned is None else result.owned
                tensors = result.matrix, *cast(Tensors, new)
                pairs = zip(tensors, _specs(request, words), strict=True)
                sent += [x.to(spec.dtype) for x, spec in pairs]
            specs = [
                [x for i in part for x in _specs(requests[i], words)] for part in owned
            ]
            with record_function("marsopt: exchange"):
                arriving.append(Gather(sent, specs, like, self._group))
        found: dict[int, MatrixOutput] = {}
        for owned in exchanges:
            for part, arrived in zip(owned, arriving.pop(0).wait(), strict=True):
                rest = iter(arrived)
                for i in part:
                    matrix = next(rest).to(requests[i].factor_dtype)
                    buffers = tuple(next(rest) for _ in requests[i].input.owned)
                    found[i] = requests[i].kept(MatrixOutput(matrix, buffers))
        return [found[i] for i in range(len(requests))]


@lru_cache
def planned(cost: MatrixCost, shapes: Shapes, num_ranks: int) -> list[list[list[int]]]:
    """Return the matrices that each rank owns, bucket by bucket."""
    nbytes = cost.returned().itemsize * sum(rows * cols for rows, cols in shapes)
    flops = [cost.num_flops(rows, cols) for rows, cols in shapes]
    owners, buckets = assign_buckets(flops, num_ranks, None, nbytes)
    return Plan(num_ranks, 1, tuple(owners), tuple(buckets)).exchanges(0)


def _single(request: Request) -> Iterator[Request]:
    """Yield a request for each matrix of a leaf, in order."""
    for batch in batches_of(request):
        if batch.matrix.ndim == 2:
            yield request._replace(input=batch)
            continue
        for matrix, *owned in zip(batch.matrix, *batch.owned, strict=True):
            yield request._replace(
                input=batch._replace(matrix=matrix, owned=tuple(owned))
            )


def _specs(request: Request, words: torch.dtype) -> list[TensorSpec]:
    """Return the shapes and dtypes of a matrix's result as it travels."""
    specs = [TensorSpec(request.input.matrix.shape, words)]
    for buffer in request.input.owned:
        wide = torch.promote_types(buffer.dtype, words)
        specs.append(TensorSpec(buffer.shape, wide))
    return specs


def _sum_of_bits(x: Tensor) -> Tensor:
    """Return a sum that is equal for equal values whatever the order of additions."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(words[x.itemsize]).sum(dtype=torch.int64)
