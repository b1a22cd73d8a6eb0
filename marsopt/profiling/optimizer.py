"""The report on a step of MARS: beside the report on any function, kernels per stack,
bytes a parameter beside the least possible, copies of small tensors, and the products
of whole matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from marsopt.functional.binding import owned_leaves
from marsopt.functional.collectives import LOCAL
from marsopt.optim.buckets import ParameterBucket
from marsopt.optim.portions import batch_dtype
from marsopt.profiling import machine
from marsopt.profiling.gpt2 import Subject
from marsopt.profiling.profiler import profile
from marsopt.profiling.table import Report, size
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.dtypes import working_dtype


@dataclass(frozen=True)
class Floor:
    """Bytes of one step."""

    norms: int  # g, and h where the gradient is corrected, read for their norms
    update: int  # everything, read once and written once
    copied: int  # small tensors copied into stacks and out again: read and written

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the compiled graphs, which do not copy."""
        return self.norms + self.update


def full_buffers(algorithm: Algorithm) -> list[str]:
    """Return the symbols of the buffers that a step passes over beside x, g and h: a
    buffer of fewer dims than x is no pass over it.
    """
    kept = algorithm.preconditioner.buffers.items()
    return [symbol for symbol, buffer in kept if buffer.home == "shard"]


def passes(
    algorithm: Algorithm, *, g: int, x: int, h: int, made: int, o: int, buffers: int
) -> tuple[int, int]:
    """Return the least bytes of the norms and of the update, from the bytes of the
    tensors that they pass over; ``h`` is 0 without a correction, ``made`` the matrices
    that ``update`` writes for their owners, ``o`` the owners' results.
    """
    written = h if algorithm.h_from == "step" else 0
    update = g + h + 2 * buffers + written + made
    # of a matrix rule the update leaves x; applying reads x and the factors, writes x
    update += 2 * x + (o if algorithm.matrix_only else 0)
    return g + h, update


def _floor(bucket: ParameterBucket) -> tuple[int, int, int]:
    """Return the bytes of one bucket, with the gradients that are there."""
    algorithm, state, local = bucket.algorithm, bucket.state, bucket.collectives.local
    g = sum(local(p.grad, p).nbytes for p in bucket.params)
    x = sum(piece.nbytes for piece in bucket.pieces)
    sizes = {
        symbol: sum(t.nbytes for t in tensors) for symbol, tensors in state.items()
    }
    norms, update = passes(
        algorithm,
        g=g,
        x=x,
        h=sizes.get("h", 0),
        made=_matrix_bytes(bucket),
        o=_factor_bytes(bucket),
        buffers=sum(sizes[s] for s in full_buffers(algorithm)),
    )
    # into stacks and, but for gradients, out again
    copied = 2 * g + 4 * (x + sum(sizes.values())) if bucket.is_copied else 0
    return norms, update, copied


def _matrix_bytes(bucket: ParameterBucket) -> int:
    """Return the bytes that ``update`` writes for Newton-Schulz: rows of a batch, or a
    tensor of its own.
    """
    algorithm, first = bucket.algorithm, bucket.pieces[0]
    num = sum(piece.numel() for piece in bucket.pieces)
    if bucket.batch is not None:
        return num * batch_dtype(algorithm, first, first.device.type).itemsize
    return num * working_dtype(first).itemsize if algorithm.makes_matrix else 0


def _factor_bytes(bucket: ParameterBucket) -> int:
    """Return the bytes of owners' results, as they are in this process."""
    algorithm, first = bucket.algorithm, bucket.pieces[0]
    if not algorithm.matrix_only:
        return 0
    dtype = working_dtype(first)  # of results from other ranks
    if bucket.collectives is LOCAL:
        dtype = algorithm.matrix_preconditioner.cost.on(first.device.type).returned()
    return sum(piece.numel() for piece in bucket.pieces) * dtype.itemsize


def floor_of(buckets: Sequence[ParameterBucket]) -> Floor:
    """Return the bytes of a step over these, with the gradients that are there."""
    return Floor(*map(sum, zip(*map(_floor, buckets), strict=True)))


def matrix_products(
    buckets: Sequence[ParameterBucket], device: str
) -> tuple[int, float]:
    """Return the FLOPs of a step with whole matrices (where steps differ, the mean),
    and the FLOP/s of a large product in their dtype.
    """
    flops, dtype = 0, torch.float32
    for bucket in buckets:
        algorithm = bucket.algorithm
        if algorithm.matrix_only:
            cost = algorithm.matrix_preconditioner.cost.on(device)
            dtype = torch.float32 if cost.is_float32 else cost.returned()
            for p in bucket.params:
                (leaf,) = owned_leaves(algorithm, [p])
                flops += leaf.num_flops(device)
    return flops, machine.matmul_rate(device, dtype)


@dataclass(frozen=True, kw_only=True)
class OptimizerReport(Report):
    """The cost of a step of MARS. ``str(report)`` is a table."""

    CALL: ClassVar[str] = "step"
    DERIVED: ClassVar[tuple[str, ...]] = (
        *Report.DERIVED,
        "num_stacks",
        "num_stack_kernels",
        "num_small_kernels",
        "bytes_per_param",
    )

    title: str
    num_tensors: int
    num_params: int
    stack_bytes: tuple[int, ...]  # of each stack's gradients
    floor: Floor
    num_flops: int  # with whole matrices, in one step
    matmul_rate: float  # FLOP/s of a large square product in their dtype

    @property
    def num_stacks(self) -> int:
        """Return the stacks that a step moves, over all calls of its graphs."""
        return len(self.stack_bytes)

    @property
    def num_stack_kernels(self) -> int:
        """Return the kernels of one step that pass over a stack."""
        return self.num_kernels_over(min(self.stack_bytes), inputs=True)

    @property
    def num_small_kernels(self) -> int:
        """Return the other kernels of one step: they compute numbers per tensor."""
        return self.num_kernels - self.num_stack_kernels

    @property
    def kernels_per_stack(self) -> float:
        """Return the kernels of one step a stack, on average."""
        return self.num_stack_kernels / self.num_stacks

    @property
    def bytes_per_param(self) -> float:
        """Return the bytes that compiled graphs read and write, as inductor counts."""
        return self.num_bytes / self.num_params

    @property
    def allowed_seconds(self) -> float:
        """Return what bytes (copies included) and products take at this machine's
        rates.
        """
        seconds = (self.num_bytes + self.floor.copied) / self.copy_bandwidth
        return seconds + self.num_flops / self.matmul_rate

    def __str__(self) -> str:
        return (
            f"{self.title}: {self.num_tensors} tensors in {self.num_stacks} stacks, "
            f"{self.num_params:,} parameters\n{super().__str__()}"
        )

    def _kernels(self) -> str:
        return (
            f"{self.num_stack_kernels} a step over stacks, "
            f"{self.kernels_per_stack:.1f} a stack; {self.num_small_kernels} small "
            "kernels for numbers per tensor"
        )

    def _bytes(self) -> list[str]:
        n, least = self.num_params, self.floor
        return [
            f"{self.bytes_per_param:.2f} a parameter, floor "
            f"{least.num_bytes / n:.2f}: norms {least.norms / n:.2f}, update "
            f"{least.update / n:.2f} ({size(self.num_bytes)} moved a step)",
            f"and {least.copied / n:.2f} a parameter to copy small tensors into stacks "
            "and out",
        ]

    def _rates(self) -> str:
        if not self.num_flops:
            return super()._rates()
        return (
            f"{super()._rates()} and {self.num_flops / 1e9:.3g} GFLOP at "
            f"{self.matmul_rate / 1e9:.0f} GFLOP/s of a matmul"
        )


def profile_optimizer(
    subject: Subject, *, title: str, device: str = "cpu", **options: Any
) -> OptimizerReport:
    """Return ``profile`` of the next ``steps + 2`` steps, with these ``options`` of it,
    and the numbers that only MARS has.
    """
    # the optimizer compiles its own
    report = profile(subject, compile=False, device=device, **options)
    buckets = subject.optimizer.describe().buckets
    num_flops, rate = matrix_products(buckets, device)
    return OptimizerReport(
        **vars(report),
        title=title,
        num_tensors=len(subject.params),
        num_params=sum(p.numel() for p in subject.params),
        stack_bytes=tuple(sum(p.grad.nbytes for p in b.params) for b in buckets),
        floor=floor_of(buckets),
        num_flops=num_flops,
        matmul_rate=rate,
    )
