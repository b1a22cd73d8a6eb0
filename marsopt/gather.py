"""This step's stacks: parameters and gradients as they lie, or copied where they do not
lie in stacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from marsopt.lanes import Lane
from marsopt.stacks import adjacent
from marsopt.step import Stack


class Gather:
    """Scratch for what has to be copied, and the copies of one step, in two calls.

    Copied are gradients of stacks of several leaves (autograd and FSDP leave them
    apart), unless they lie in one buffer (``MARS.join_gradients``), and
    parameters that could not move into a stack: FSDP's shards.
    """

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, str], Tensor] = {}
        self._out: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._moved: list[Tensor] = []

    def stacks(self, lanes: Sequence[Lane]) -> tuple[list[Stack], list[Tensor] | None]:
        """The stacks of one step, and per stack which leaves have a gradient (None: all
        have). One without gets zeros, so that the graph stays the same.
        """
        copies: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._out = ([], [])
        found, live = [], []
        for number, lane in enumerate(lanes):
            pieces = lane.pieces()
            x = lane.settle_in(pieces)
            if x is not None and x is lane.home:
                self._moved.extend(lane.params)
            if x is None:
                x = self._rows(number, "x", pieces, copies)
                self._out[0].extend(pieces)
                self._out[1].extend(x.unbind())
            g, real = self._gradients(number, lane, pieces, copies)
            found.append(lane.stack(x, g))
            live.append(real)
        if copies[0]:
            torch._foreach_copy_(*copies)
        if all(all(real) for real in live):
            return found, None
        device = lanes[0].t.device
        # one transfer, which the host does not wait for
        flags = torch.tensor([has for real in live for has in real])
        flags = flags.to(device, non_blocking=True)
        return found, list(flags.split([len(real) for real in live]))

    def _gradients(
        self, number: int, lane: Lane, pieces: list[Tensor], copies
    ) -> tuple[Tensor, list[bool]]:
        local = lane.collectives.local
        real = [p.grad is not None for p in lane.params]
        grads = [local(p.grad) for p in lane.params if p.grad is not None]
        strides = pieces[0].stride()
        if all(real) and all(g.stride() == strides for g in grads):
            g = adjacent(grads)
            if g is not None:
                return g, real
        rest = iter(grads)
        dtype = reduce(torch.promote_types, (g.dtype for g in grads or pieces))
        zero = torch.zeros((), dtype=dtype, device=pieces[0].device)
        like = [
            next(rest) if has else zero.expand_as(x)
            for x, has in zip(pieces, real, strict=True)
        ]
        return self._rows(number, "g", like, copies, strides, dtype), real

    def _rows(
        self, number: int, role: str, leaves, copies, strides=None, dtype=None
    ) -> Tensor:
        """A scratch stack, with the leaves noted down to be copied into it."""
        first, dtype = leaves[0], dtype or leaves[0].dtype
        scratch = self._scratch.get((number, role))
        if scratch is None or scratch.dtype != dtype:
            made = dict(dtype=dtype, device=first.device)
            if strides is not None and len(leaves) == 1:
                scratch = torch.empty_strided(first.shape, strides, **made)[None]
            else:
                scratch = torch.empty(len(leaves), *first.shape, **made)
            self._scratch[number, role] = scratch
        copies[0].extend(scratch.unbind())
        copies[1].extend(leaves)
        return scratch

    def scatter(self) -> None:
        """Copy parameters that were copied in back to where they live.

        The version of parameters that moved with their stack is counted up, so that
        autograd finds out about a graph from before the step.

        Scratch on a GPU goes back to the caching allocator, where the next forward pass
        finds it; on a CPU fresh pages cost more than the copies.
        """
        if self._out[0]:
            torch._foreach_copy_(*self._out)
        torch.autograd.graph.increment_version(self._moved)
        self._out, self._moved = ([], []), []
        for key in [k for k, s in self._scratch.items() if s.device.type != "cpu"]:
            del self._scratch[key]
