"""What no step of MARS can go below: the bytes that it must read and write once, from
the buffers of its algorithms, and the products of Newton-Schulz at their own rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from marsopt.functional.stacks import adjacent
from marsopt.optim.buckets import BucketGroup, ParameterBucket
from marsopt.profile.machine import typical
from marsopt.rules.newton_schulz import NewtonSchulz


class Floor(NamedTuple):
    """Bytes of one step."""

    norms: int  # g, and h where the gradient is corrected, read for their norms
    update: int  # everything, read once and written once
    packed: int  # gradients copied into stacks before: read and written

    @property
    def num_bytes(self) -> int:
        """Return those of the compiled graphs, which do not pack."""
        return self.norms + self.update


def floor(buckets: Sequence[ParameterBucket]) -> Floor:
    """Return that of one step on the gradients that are there."""
    return Floor(*(sum(column) for column in zip(*map(_floor, buckets), strict=True)))


def _floor(bucket: ParameterBucket) -> Floor:
    algorithm, grads = bucket.algorithm, [p.grad for p in bucket.params]
    g = sum(grad.nbytes for grad in grads)
    x = sum(p.nbytes for p in bucket.params)
    h = bucket.state["h"].nbytes if algorithm.reads_h else 0
    # h is read already; what has fewer dims than x is no pass over it
    whole = [s for s, dims in algorithm.preconditioner.buffers.items() if dims is None]
    buffers = sum(bucket.state[symbol].nbytes for symbol in whole)
    update = g + h + 2 * buffers + (h if algorithm.keeps_h else 0)
    # of a matrix rule the update leaves x; applying reads x and the factors, writes x
    update += 3 * x if algorithm.matrix_only else 2 * x
    update += x if algorithm.makes_matrix else 0
    return Floor(g + h, update, 0 if adjacent(grads) is not None else 2 * g)


@dataclass(frozen=True)
class Orthogonal:
    """Newton-Schulz of every matrix of one step, apart from the step."""

    num_matrices: int
    num_flops: int
    seconds: float
    matmul_rate: float  # FLOP/s of the same products alone, batched by shape
    dtype: str

    @property
    def rate(self) -> float:
        """Return FLOP/s."""
        return self.num_flops / self.seconds


def orthogonal(groups: Sequence[BucketGroup], device: str) -> Orthogonal | None:
    """Measure it on the momentum; return None where no algorithm orthogonalizes."""
    chosen = [group for group in groups if group.hyper.algorithm.matrix_only]
    if not chosen:
        return None
    ns = chosen[0].hyper.algorithm.preconditioner.ns
    matrices = [m for group in chosen for b in group.buckets for m in b.state["m"]]
    return Orthogonal(
        num_matrices=len(matrices),
        num_flops=sum(ns.num_flops(*m.shape) for m in matrices),
        seconds=typical(lambda: ns.many(matrices), device),
        matmul_rate=_matmul_rate([tuple(m.shape) for m in matrices], ns, device),
        dtype=str(ns.dtype).removeprefix("torch."),
    )


def _matmul_rate(
    shapes: Sequence[tuple[int, int]], ns: NewtonSchulz, device: str
) -> float:
    """Return that of X X^T, G G and P X, the products of one iteration, over batches of
    X.
    """
    flops, seconds = 0, 0.0
    for (short, long), count in Counter(tuple(sorted(s)) for s in shapes).items():
        x = torch.randn(count, short, long, device=device).to(ns.dtype)
        gram = torch.randn(count, short, short, device=device).to(ns.dtype)
        wide, square = torch.empty_like(x), torch.empty_like(gram)
        flops += count * ns.num_flops(short, long) // ns.steps

        def products(x=x, gram=gram, wide=wide, square=square) -> None:
            torch.bmm(x, x.mT, out=square)
            torch.bmm(gram, gram, out=square)
            torch.bmm(gram, x, out=wide)

        seconds += typical(products, device)
    return flops / seconds
