"""Beside data parallelism: gradients that only the owners of their rows receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

LARGE = 2**16  # elements: smaller pieces of one owner travel in one copy

Lengths = tuple[int, ...]  # how many rows of a parameter each rank owns


class Reduction(NamedTuple):
    """One bucket under way."""

    works: list[dist.Work]
    # sums that arrive in a copy, and the views of the bucket where they belong
    sums: list[Tensor]
    views: list[Tensor]

    def pack(self, views: Sequence[Tensor], arrives: bool) -> Tensor:
        """Return a copy of tensors, end to end; ``arrives``: ``finish`` reads it."""
        flat = torch.cat([x.reshape(-1) for x in views])
        if arrives:
            parts = flat.split([x.numel() for x in views])
            self.sums.extend(s.view(x.shape) for s, x in zip(parts, views, strict=True))
            self.views.extend(views)
        return flat

    @property
    def has_arrived(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def finish(self) -> None:
        """Wait, and write the sums into the bucket."""
        for work in self.works:
            work.wait()
        if self.views:
            torch._foreach_copy_(self.views, self.sums)


class OwnerGradients:
    """A communication hook of DistributedDataParallel. It averages each row of a
    gradient on the rank that owns the row. Rows that another rank owns are undefined
    afterwards. Gradients without owners are averaged on all ranks.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank = group, group.rank()
        self._num_ranks = group.size()
        self.lengths: Mapping[Tensor, Lengths] = {}  # of the present plan
        # by parameter, the owners of the rows that its gradient now has
        self._averaged: dict[Tensor, Lengths] = {}
        self._nodes: list[Node] = []  # of autograd, one for each parameter

    def register(self, model: DistributedDataParallel) -> None:
        """Make this the communication hook of ``model``.

        Raises:
            TypeError: another model.
            ValueError: a model with another process group.
            RuntimeError: the model has a communication hook.
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"got a {type(model).__name__}, expected a DistributedDataParallel, "
                "which reduces gradients: wrap the model before"
            )
        ranks = dist.get_process_group_ranks(model.process_group)
        if ranks != dist.get_process_group_ranks(self._group):
            raise ValueError(
                f"got a model whose gradients are reduced over the ranks {ranks}, "
                "expected DataParallel's own: pass it model.process_group"
            )
        # a lambda: torch compares annotations with types, and ours are strings
        model.register_comm_hook(
            list[Reduction](), lambda state, bucket: self._reduce(state, bucket)
        )
        model.register_forward_pre_hook(_refuse_join)
        for p in filter(attrgetter("requires_grad"), model.parameters()):
            node = get_gradient_edge(p).node
            node.register_prehook(partial(self._before_accumulation, p))
            self._nodes.append(node)  # autograd itself keeps no node

    # ---- accumulation ----------------------------------------------------------------

    def _before_accumulation(self, p: Tensor, grads: tuple[Tensor, ...]) -> None:
        """Autograd is about to add to the gradient of ``p``."""
        lengths = self._averaged.pop(p, None)
        if lengths is not None and p.grad is not None:
            self._to_summand(p.grad, lengths)

    @torch.no_grad()
    def _to_summand(self, average: Tensor, lengths: Lengths) -> None:
        """Write a gradient of which each rank has rows, so that its mean over the ranks
        is their average.
        """
        for rank, rows in enumerate(average.split(lengths)):
            if rank == self._rank:
                rows.mul_(self._num_ranks)
            else:
                rows.zero_()

    def owners_of(self, p: Tensor) -> Lengths | None:
        """Return which rows of the present gradient each rank has; None: all."""
        return self._averaged.get(p)

    def forget(self, p: Tensor) -> None:
        """Every rank has the whole gradient of ``p``."""
        self._averaged.pop(p, None)

    # ---- the hook --------------------------------------------------------------------

    @torch.no_grad()
    def _reduce(
        self, under_way: list[Reduction], bucket: dist.GradBucket
    ) -> Future[Tensor]:
        if bucket.index() == 0:
            under_way.clear()  # of a backward pass that an exception has broken off
        buffer = bucket.buffer()
        gradients = [
            (p, _strided_as(p, x))
            for p, x in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        for p, gradient in gradients:
            lengths = self._averaged.pop(p, None)
            if lengths is not None:  # the backward pass added nothing to it here
                self._to_summand(gradient, lengths)
        buffer.mul_(1.0 / self._num_ranks)  # before the sum, as DDP does
        under_way.append(self._start(gradients, buffer.device))
        # a stream that is captured cannot be asked
        asks = not (buffer.is_cuda and torch.cuda.is_current_stream_capturing())
        while under_way and (bucket.is_last() or (asks and under_way[0].has_arrived)):
            under_way.pop(0).finish()
        # DDP reads the bucket after the last one's hook
        future: Future[Tensor] = Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future

    def _start(
        self, gradients: Sequence[tuple[Tensor, Tensor]], device: torch.device
    ) -> Reduction:
        whole: list[Tensor] = []
        pieces: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        for p, gradient in gradients:
            lengths = self.lengths.get(p)
            if lengths is None:
                whole.append(gradient)
                continue
            self._averaged[p] = lengths
            for rows, part in zip(pieces, gradient.split(lengths), strict=True):
                if part.numel():
                    rows.append(part)
        started = Reduction([], [], [])
        leaving: list[tuple[int, Tensor]] = []
        for owner, rows in enumerate(pieces):
            large, small = _by_size(rows)
            leaving += [(owner, x) for x in large]
            if small:
                leaving.append((owner, started.pack(small, owner == self._rank)))
        started.works.extend(self._send(leaving, device))
        large, small = _by_size(whole)
        for x in [*large, *([started.pack(small, True)] if small else [])]:
            work = dist.all_reduce(x, group=self._group, async_op=True)
            started.works.append(work)
        return started

    def _send(
        self, leaving: Sequence[tuple[int, Tensor]], device: torch.device
    ) -> list[dist.Work]:
        """Start to sum each tensor on its owner, in one launch where there is one."""
        reduce = partial(dist.reduce, group=self._group, async_op=True)
        if not self._group._get_backend(device).supports_coalescing:
            return [reduce(x, group_dst=owner) for owner, x in leaving]
        with dist._coalescing_manager(self._group, device, async_ops=True) as launch:
            for owner, x in leaving:
                reduce(x, group_dst=owner)
        works: list[dist.Work] = launch.works
        return works


def _strided_as(p: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient of a bucket in the memory format of its parameter, as DDP lays
    it out; ``GradBucket.gradients`` takes all for contiguous.
    """
    is_dense = torch.empty_like(p, device="meta").stride() == p.stride()
    return gradient.as_strided(p.shape, p.stride()) if is_dense else gradient


def _by_size(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return tensors that travel where they lie, and tensors that travel in a copy."""
    in_place = [x.numel() >= LARGE and x.is_contiguous() for x in tensors]
    pairs = [*zip(tensors, in_place, strict=True)]
    return [x for x, large in pairs if large], [x for x, large in pairs if not large]


def _refuse_join(model: DistributedDataParallel, args: Any) -> None:
    """Raise in a context of ``join``."""
    if model._join_config.enable:
        raise RuntimeError(
            "got a forward pass within join(), expected as many batches on every rank: "
            "optimizer.step() is a collective, which ranks without a batch do not call"
        )
