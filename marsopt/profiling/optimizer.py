"""The report on a step of MARS: beside what any function gets, kernels per stack, bytes
a parameter beside what no step can go below, packed gradients, and what is done with
whole matrices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from marsopt.functional.collectives import Request, run_at_owner
from marsopt.functional.stacks import adjacent
from marsopt.optim.buckets import ParameterBucket
from marsopt.profiling.gpt2 import Subject
from marsopt.profiling.machine import typical
from marsopt.profiling.profiler import profile
from marsopt.profiling.table import Report, size
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.buffers import is_full
from marsopt.rules.dtypes import working, working_dtype
from marsopt.rules.newton_schulz import NewtonSchulz
from marsopt.rules.preconditioner import Whole


@dataclass(frozen=True)
class Floor:
    """Bytes of one step."""

    norms: int  # g, and h where the gradient is corrected, read for their norms
    update: int  # everything, read once and written once
    packed: int  # gradients copied into stacks before: read and written

    @property
    def num_bytes(self) -> int:
        """Return those of the compiled graphs, which do not pack."""
        return self.norms + self.update


def full_buffers(algorithm: Algorithm) -> list[str]:
    """Return the symbols of what a step passes over beside x, g and the
    operands of a correction: what has fewer dims than x is no pass over it.
    """
    kept = algorithm.preconditioner.buffers.items()
    return [symbol for symbol, buffer in kept if is_full(buffer)]


def passes(
    algorithm: Algorithm, *, g: int, x: int, h: int, made: int, o: int, buffers: int
) -> tuple[int, int]:
    """Return the least bytes of the norms and of the update, from the bytes of what
    they pass over; ``h`` is one operand of the correction, ``made`` what a matrix rule
    makes for owners where that is no buffer, ``o`` what those made.
    """
    operands = len(algorithm.operands) * h
    update = g + operands + 2 * buffers + len(algorithm.written) * h
    # of a matrix rule the update leaves x; applying reads x and the factors, writes x
    update += 2 * x + (o if algorithm.matrix_only else 0)
    if algorithm.is_ahead and not algorithm.num_behind:
        update += x  # which is in the state; y is written
    update += made if algorithm.makes_matrix else 0
    return g + operands, update


def _floor(bucket: ParameterBucket) -> tuple[int, int, int]:
    """Return the bytes of one bucket, with the gradients that are there."""
    algorithm, grads = bucket.algorithm, [p.grad for p in bucket.params]
    g = sum(grad.nbytes for grad in grads)
    norms, update = passes(
        algorithm,
        g=g,
        x=sum(p.nbytes for p in bucket.params),
        h=max((bucket.state[s].nbytes for s in algorithm.operands), default=0),
        made=sum(p.numel() * working_dtype(p).itemsize for p in bucket.params),
        o=_factor_bytes(algorithm, bucket.params),
        buffers=sum(bucket.state[s].nbytes for s in full_buffers(algorithm)),
    )
    return norms, update, 0 if adjacent(grads) is not None else 2 * g


def _factor_bytes(algorithm: Algorithm, params: Sequence[Tensor]) -> int:
    """Return those of what owners make of whole matrices that lie in one process."""
    if not algorithm.matrix_only:
        return 0
    dtype = algorithm.matrix_preconditioner.cost.on(params[0].device.type).returned()
    return sum(p.numel() for p in params) * dtype.itemsize


def floor_of(buckets: Sequence[ParameterBucket]) -> Floor:
    """Return the bytes of a step over these, with the gradients that are there."""
    return Floor(*map(sum, zip(*map(_floor, buckets), strict=True)))


@dataclass(frozen=True)
class WholeMatrices:
    """What is done with every whole matrix of one step, apart from the step; where
    steps differ, in the mean.
    """

    name: str
    num_matrices: int
    num_flops: int
    seconds: float
    matmul_rate: float  # FLOP/s of the same products alone, batched by shape
    dtype: str

    @property
    def rate(self) -> float:
        """Return FLOP/s."""
        return self.num_flops / self.seconds


def whole_matrices(
    buckets: Sequence[ParameterBucket], device: str
) -> WholeMatrices | None:
    """Measure it on the gradients; return None where no algorithm needs any."""
    chosen = [bucket for bucket in buckets if bucket.algorithm.matrix_only]
    if not chosen:
        return None
    preconditioner = chosen[0].algorithm.matrix_preconditioner
    cost, rounds = preconditioner.cost.on(device), preconditioner.every or 1
    shapes, requests = [], []
    for bucket in chosen:
        algorithm, members = bucket.algorithm, bucket.members
        for n, p in enumerate(members.leaves):
            row_inputs = algorithm.matrix_preconditioner.row_inputs
            rows = [bucket.state[s][n] for s in row_inputs]
            owned = members.owned[n] if members.owned else ()
            given = Whole(working(p.grad), tuple(map(working, rows)), owned)
            own = algorithm.matrices, algorithm.matrix_preconditioner
            requests.append(Request(given, p, *own))
            shapes += [
                algorithm.matrices.shape_in(p.shape)
            ] * algorithm.matrices.num_in(p.shape)

    def one_round() -> None:
        for count in range(1, rounds + 1):
            run_at_owner(
                [
                    one._replace(stage=one.preconditioner.stage(count, n))
                    for n, one in enumerate(requests)
                ]
            )

    dtype = torch.float32 if cost.is_float32 else cost.returned()
    is_ns = isinstance(cost, NewtonSchulz)
    return WholeMatrices(
        name="Newton-Schulz" if is_ns else type(preconditioner).__name__,
        num_matrices=len(shapes),
        num_flops=sum(cost.num_flops(*shape) for shape in shapes),
        seconds=typical(one_round, device) / rounds,
        matmul_rate=products_rate(shapes, dtype, device),
        dtype=str(dtype).removeprefix("torch."),
    )


def products_rate(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: str
) -> float:
    """Return the FLOP/s of X X^T, G G and P X, the products of an iteration of
    Newton-Schulz, over batches of X, one for each of these (rows, cols).
    """
    flops, seconds = 0, 0.0
    for (short, long), count in Counter(tuple(sorted(s)) for s in shapes).items():
        x = torch.randn(count, short, long, device=device).to(dtype)
        gram = torch.randn(count, short, short, device=device).to(dtype)
        wide, square = torch.empty_like(x), torch.empty_like(gram)
        flops += count * (4 * long * short**2 + 2 * short**3)

        def products(
            x: Tensor = x,
            gram: Tensor = gram,
            wide: Tensor = wide,
            square: Tensor = square,
        ) -> None:
            torch.bmm(x, x.mT, out=square)
            torch.bmm(gram, gram, out=square)
            torch.bmm(gram, x, out=wide)

        seconds += typical(products, device)
    return flops / seconds


@dataclass(frozen=True, kw_only=True)
class OptimizerReport(Report):
    """What a step of MARS costs. ``str(report)`` is a table."""

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
    whole_matrices: WholeMatrices | None

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
        """Return those of one step, on average."""
        return self.num_stack_kernels / self.num_stacks

    @property
    def bytes_per_param(self) -> float:
        """Return what the compiled graphs read and write, as inductor counts."""
        return self.num_bytes / self.num_params

    @property
    def allowed_seconds(self) -> float:
        """Return what bytes (packing included) and products take at this machine's
        rates.
        """
        seconds = (self.num_bytes + self.floor.packed) / self.copy_bandwidth
        if self.whole_matrices is not None:
            whole = self.whole_matrices
            seconds += whole.num_flops / whole.matmul_rate
        return seconds

    def to_dict(self) -> dict[str, Any]:
        """Return everything, in what JSON can hold."""
        found = super().to_dict()
        if self.whole_matrices is not None:
            found["whole_matrices"]["rate"] = self.whole_matrices.rate
        return found

    def __str__(self) -> str:
        return (
            f"{self.title}: {self.num_tensors} tensors in {self.num_stacks} stacks, "
            f"{self.num_params:,} parameters\n{super().__str__()}"
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the table, as name and text."""
        found = super().rows()
        if self.whole_matrices is not None:
            names = self.whole_matrices.name, ""
            found += zip(names, self._whole(self.whole_matrices), strict=True)
        return found

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
            f"and {least.packed / n:.2f} a parameter to pack gradients into stacks",
            *self._flagged(),
        ]

    def _flagged(self) -> list[str]:
        if not self.flagged_bytes:
            return []
        more = self.flagged_bytes / self.num_params
        return [f"and {more:.2f} a parameter read behind a mask, if a step is skipped"]

    def _rates(self) -> str:
        if self.whole_matrices is None:
            return super()._rates()
        rate = self.whole_matrices.matmul_rate / 1e9
        return f"{super()._rates()} and {rate:.0f} GFLOP/s of a matmul"

    def _whole(self, whole: WholeMatrices) -> list[str]:
        products = "its products" if whole.name == "Newton-Schulz" else "products"
        return [
            f"{whole.num_matrices} matrices, {whole.num_flops / 1e9:.3g} GFLOP in "
            f"{1e3 * whole.seconds:.0f} ms apart, {whole.dtype}: "
            f"{whole.rate / 1e9:.0f} GFLOP/s",
            f"{whole.rate / whole.matmul_rate:.0%} of the "
            f"{whole.matmul_rate / 1e9:.0f} GFLOP/s of {products} alone",
        ]


def profile_optimizer(
    subject: Subject, *, title: str, device: str = "cpu", **options: Any
) -> OptimizerReport:
    """Return ``profile`` of the next ``steps + 2`` steps, with these ``options`` of it,
    and what MARS alone can tell.
    """
    # the optimizer compiles its own
    report = profile(subject, compile=False, device=device, **options)
    buckets = subject.optimizer.describe().buckets
    return OptimizerReport(
        **vars(report),
        title=title,
        num_tensors=len(subject.params),
        num_params=sum(p.numel() for p in subject.params),
        stack_bytes=tuple(sum(p.grad.nbytes for p in b.params) for b in buckets),
        floor=floor_of(buckets),
        whole_matrices=whole_matrices(buckets, device),
    )
