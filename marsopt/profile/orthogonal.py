"""Newton-Schulz apart from the step: its FLOP rate beside that of its bare products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from marsopt.optim.buckets import BucketGroup
from marsopt.profile.machine import typical
from marsopt.rules.newton_schulz import NewtonSchulz


@dataclass(frozen=True)
class Orthogonal:
    """Newton-Schulz of every matrix of one step."""

    num_matrices: int
    num_flops: int
    seconds: float
    matmul_rate: float  # FLOP/s of the same products alone, batched by shape
    dtype: str

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.num_flops / self.seconds


def orthogonal(groups: Sequence[BucketGroup], device: str) -> Orthogonal | None:
    """Measure it on the momentum; None where no algorithm orthogonalizes."""
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
    """Of X X^T, G G and P X, the products of one iteration, over batches of X."""
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
