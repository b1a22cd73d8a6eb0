"""In place of MeshCollectives, under plain DDP: ranks share Newton-Schulz."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from marsopt.parallel.exchange import all_reduce, share
from marsopt.parallel.mesh import over_meshes
from marsopt.parallel.planner import Members, check_equal, plan
from marsopt.rules.component import MatrixOutput
from marsopt.step.owners import (
    Collectives,
    LocalCollectives,
    Request,
    batches_of,
    leaf_output,
    precondition_leaves,
    precondition_matrices,
)


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
        self._plans: dict[Hashable, list[Members]] = {}  # by cost and shapes

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
        """Raise unless all ranks have equal ``values``, and equal bits in ``params``
        and in their gradients: results of a rank would else be written into other
        parameters, or replace the step of another gradient.

        Raises:
            RuntimeError: on every rank, if they differ.
        """
        held = dict[str, Tensor]()
        for p, name in params:
            if p.requires_grad:
                held[f"the sum of the bits of {name}"] = p.detach()
                if p.grad is not None and p.grad.layout == torch.strided:
                    held[f"the sum of the bits of the gradient of {name}"] = p.grad
        sums = [_sum_of_bits(x) for x in held.values()]
        bits = torch.stack(sums).tolist() if sums else []
        devices = [x.device.type for x in sums] + [p.device.type for p, _ in params]
        # a rank that trains nothing takes part: the all-reduce waits for it
        named = zip(held, bits, strict=True)
        check_equal({**values, **dict(named)}, [self._group], devices[0])

    def sum(self, partial: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Return the first rank's numbers, or NaN if any rank has a number that is not
        finite: a step is skipped by all ranks, which share results, or by none.
        """
        shape, is_first = (len(partial), 1), self._group.rank() == 0
        contributes = torch.full(shape, is_first, device=partial.device)
        return all_reduce(partial, contributes, self._group)

    def on_owners(self, requests: Sequence[Request]) -> list[MatrixOutput]:
        """Precondition this rank's share of the matrices, and gather the results of all
        ranks.
        """
        if self._group.size() == 1 or any(r.input.is_outweighed for r in requests):
            return precondition_leaves(requests)
        by_leaf = [[*_single(request)] for request in requests]
        singles = [single for leaf in by_leaf for single in leaf]
        found = self._shared(singles) if singles else {}
        rest = (found[i] for i in range(len(singles)))
        return [
            leaf_output(request, [next(rest) for _ in leaf])
            for request, leaf in zip(requests, by_leaf, strict=True)
        ]

    def _shared(self, requests: Sequence[Request]) -> dict[int, MatrixOutput]:
        """Return the results of all ranks for requests of one matrix each."""
        cost, first = requests[0].preconditioner.cost, requests[0].input.matrix
        cost = cost.on(first.device.type)
        shapes = [request.input.matrix.shape for request in requests]
        key = cost, *shapes
        if key not in self._plans:
            sent = cost.returned().itemsize
            self._plans[key] = plan(cost, shapes, self._group.size(), sent)
        buckets = self._plans[key]

        def results() -> Iterator[dict[int, MatrixOutput]]:
            for bucket in buckets:
                here = bucket[self._group.rank()]
                with record_function("marsopt: whole matrices at their owner"):
                    outputs = precondition_matrices([requests[i] for i in here])
                yield dict(zip(here, outputs, strict=True))

        each = results()
        return share(requests, buckets, each, cost, self._group, with_buffers=True)


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


def _sum_of_bits(x: Tensor) -> Tensor:
    """Return the sum of each element's bits times its number, from 1: integers, so that
    the order of additions does not matter.
    """
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = x.view(words[x.itemsize])
    total, stride = bits.sum(dtype=torch.int64), 1
    for dim in reversed(range(x.ndim)):  # sums along all other dims: no large temporary
        others = [other for other in range(x.ndim) if other != dim]
        sums = bits.sum(others, dtype=torch.int64) if others else bits
        total += (sums * torch.arange(len(sums), device=x.device)).sum() * stride
        stride *= len(sums)
    return total
