"""Small tensors of a CPU, and tensors with gaps in memory: a step copies them into a
leaf of dense memory, and out again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from marsopt.rules.component import Algorithm
from marsopt.step.decide import num_columns
from marsopt.step.leaf import Leaf, Parts, common_dtype, memory_of

SMALL = 4096  # elements; a copy of fewer costs less than a call of a graph
WIDTH = 64  # elements of a row of small tensors, or a divisor: a cache line or more


class Copy(NamedTuple):
    """Rows (R, n), and the tensors that a step copies in and out."""

    rows: Tensor
    views: list[Tensor]  # of the rows, shaped as the tensors
    held: list[Tensor]
    # the tensors' memory in 1-D, and zeros, that fill the rows: joining them takes a
    # third of the time of copying; None if a tensor is not contiguous
    lines: list[Tensor] | None = None


class Pack:
    """Tensors of one formula, one behind the other in rows (R, n): each row is a part.

    Args:
        algorithm: the algorithm of all of them.
        leaves: of each tensor, without its parts.
        parts: of each tensor.
        xs: the tensors' pieces.
        buffers: of each tensor, by symbol.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        leaves: Sequence[Leaf],
        parts: Sequence[Parts],
        xs: Sequence[Tensor],
        buffers: Sequence[dict[str, Tensor]],
    ) -> None:
        several = [p.size for p in parts if len(p.norms) > 1]
        width = math.gcd(WIDTH, *several)
        if len(leaves) == 1:  # a tensor with gaps keeps its parts
            width = parts[0].size
        norms, self._starts, self._held = list[int](), list[int](), [*xs]
        scales, nums = list[float](), list[int]()
        for leaf, of_leaf in zip(leaves, parts, strict=True):
            self._starts.append(len(norms) * width)
            for norm in of_leaf.norms:
                num_rows = -(-of_leaf.size // width) if width else 1
                norms += [sum(nums) + norm] * num_rows
            nums += leaf.num_norms
            scales += leaf.scales
        # Dynamo makes a graph of its own for 1, and takes equal sizes for one size
        while len(leaves) > 1 and len(norms) in (1, width, num_columns(algorithm)):
            norms.append(0)
        self._shape = len(norms), width
        symbols = list(buffers[0])
        columns = [[*xs], *([of_x[s] for of_x in buffers] for s in symbols)]
        self._copies = [self._copy(column) for column in columns]
        tensors = [copy.rows for copy in self._copies]
        first = leaves[0]
        self.leaf = Leaf(
            tensors[0],
            dict(zip(symbols, tensors[1:], strict=True)),
            [p for leaf in leaves for p in leaf.params],
            nums,
            norms,
            scales,
            first.seed,
            first.shape,
            None,
            [each for leaf in leaves for each in leaf.owned],
        )
        self._g, self._gs = self._empty(xs[0].dtype)
        self._zero = torch.zeros((), device=xs[0].device)

    def _empty(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return rows (R, n), and views of them shaped as the tensors."""
        rows = torch.zeros(self._shape, dtype=dtype, device=self._held[0].device)
        flat = rows.view(-1)
        pairs = zip(self._starts, self._held, strict=True)
        return rows, [flat[i : i + x.numel()].view(x.shape) for i, x in pairs]

    def _copy(self, held: list[Tensor]) -> Copy:
        """Return empty rows for tensors."""
        rows, views = self._empty(held[0].dtype)
        if not all(t.is_contiguous() and not t.is_neg() for t in held):
            return Copy(rows, views, held)
        lines = []
        slots = pairwise([*self._starts, rows.numel()])
        for (start, stop), tensor in zip(slots, held, strict=True):
            num = tensor.numel()
            # no views: torch.utils.swap_tensors refuses a tensor that has views
            lines += [
                memory_of(tensor, (1, num))[0],
                rows.new_zeros(stop - start - num),
            ]
        # a rank may have no element of all these tensors
        return Copy(rows, views, held, [x for x in lines if x.numel()] or None)

    def gather(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Copy x and the buffers in; return the gradients (R, n), with zeros for
        missing ones.
        """
        for copy in self._copies:
            if copy.lines is not None:
                torch.cat(copy.lines, out=copy.rows.view(-1))
            else:
                torch._foreach_copy_(copy.views, copy.held)
        dtype = common_dtype(grads, self._g.dtype)
        if dtype != self._g.dtype:
            self._g, self._gs = self._empty(dtype)
        zero, found = self._zero.to(self._g.dtype), list[Tensor]()
        for g, view in zip(grads, self._gs, strict=True):
            found.append(zero.expand_as(view) if g is None else g)
        torch._foreach_copy_(self._gs, found)
        return self._g

    def scatter(self) -> None:
        """Copy x and the buffers out."""
        for copy in self._copies:
            torch._foreach_copy_(copy.held, copy.views)
