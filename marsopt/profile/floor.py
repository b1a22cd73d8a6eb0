"""The floor: bytes that a step must read and write once, from the buffers of its
algorithms and not from a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from marsopt.functional.stacks import adjacent
from marsopt.optim.buckets import BucketGroup, ParameterBucket


class Floor(NamedTuple):
    """Bytes of one step."""

    norms: int  # g, and h where the gradient is corrected, read for their norms
    update: int  # everything, read once and written once
    packed: int  # gradients copied into stacks before: read and written

    @property
    def num_bytes(self) -> int:
        """Of the compiled graphs, which do not pack."""
        return self.norms + self.update


def floor(groups: Sequence[BucketGroup]) -> Floor:
    """Return that of one step on the gradients that are there."""
    parts = [_bucket_floor(bucket) for group in groups for bucket in group.buckets]
    return Floor(*(sum(column) for column in zip(*parts, strict=True)))


def _bucket_floor(bucket: ParameterBucket) -> Floor:
    algorithm, grads = bucket.algorithm, [p.grad for p in bucket.params]
    g = sum(grad.nbytes for grad in grads)
    x = sum(p.nbytes for p in bucket.params)
    h = bucket.state["h"].nbytes if algorithm.reads_h else 0
    # h is read already; what has fewer dims than x is no pass over it
    whole = [s for s, dims in algorithm.preconditioner.buffers.items() if dims is None]
    buffers = sum(bucket.state[symbol].nbytes for symbol in whole)
    update = g + h + 2 * buffers + (h if algorithm.keeps_h else 0)
    if algorithm.matrix_only:
        # the update leaves x; applying reads x and the factors, and writes x
        update += 3 * x + (x if algorithm.makes_matrix else 0)
    else:
        update += 2 * x
    return Floor(g + h, update, 0 if adjacent(grads) is not None else 2 * g)
