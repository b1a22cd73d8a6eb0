"""The report on a step of MARS: beside the report on any function, printed kernels,
bytes a parameter beside the least possible, copies of small tensors, and the products
of whole matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from marsopt.optim.binding import BoundFormula, Member, takes_batches
from marsopt.profiling import machine
from marsopt.profiling.gpt2 import Subject
from marsopt.profiling.profiler import profile
from marsopt.profiling.table import Report, size
from marsopt.rules.formats import LOW_BITS
from marsopt.rules.numerics import working_dtype
from marsopt.step.graphs import Graphs
from marsopt.step.kernel_runner import Kernels
from marsopt.step.step import REFERENCE


@dataclass(frozen=True)
class Floor:
    """Bytes of one step."""

    norms: int  # g, and h where the gradient is corrected, read for their norms
    update: int  # everything, read once and written once
    copied: int  # small tensors copied into rows, and out: read and written

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the compiled graphs, which do not copy."""
        return self.norms + self.update


def floor_of(groups: Sequence[BoundFormula], *, is_local: bool = True) -> Floor:
    """Return the bytes of a step, with the gradients that are there.

    Args:
        groups: the parameters of each formula.
        is_local: whether one process has everything.
    """
    floors = [
        _floor(member, is_local, member in group.copied)
        for group in groups
        for member in group.members
    ]
    return Floor(*map(sum, zip(*floors, strict=True)))


def _floor(member: Member, is_local: bool, is_copied: bool) -> tuple[int, int, int]:
    """Return the bytes of one parameter."""
    algorithm, piece = member.algorithm, member.piece
    grad, num, x = member.p.grad, piece.numel(), piece.nbytes
    g = 0 if grad is None else num * grad.dtype.itemsize
    sizes = {symbol: tensor.nbytes for symbol, tensor in member.state.items()}
    h = sum(sizes.pop(symbol, 0) for symbol in REFERENCE)
    x += sum(sizes.pop(symbol, 0) for symbol in LOW_BITS)
    moments = sum(sizes.values())
    update = g + h + 2 * (x + moments) + (h if algorithm.h_from == "step" else 0)
    if algorithm.matrix_only:  # applying reads x and the directions, and writes x
        update += num * sum(d.itemsize for d in _dtypes_of_matrices(member, is_local))
    # into rows and, but for gradients, out again
    copied = 2 * g + 4 * (x + h + moments) if is_copied else 0
    return g + h, update, copied


def _dtypes_of_matrices(member: Member, is_local: bool) -> list[torch.dtype]:
    """Return the dtypes of the matrices that an update writes for their owners, if it
    writes any, and of the owners' results.
    """
    algorithm, piece = member.algorithm, member.piece
    dtype = working_dtype(piece)  # of results from other ranks
    is_made = algorithm.makes_matrix or takes_batches(piece.device, is_local)
    cost = algorithm.cost_on(piece.device)
    made = [cost.payload(dtype)] if is_made else []
    return [*made, cost.returned(dtype) if is_local else dtype]


def matrix_products(members: Sequence[Member], device: str) -> tuple[int, float]:
    """Return the FLOPs of a step with whole matrices (where steps differ, the mean),
    and the FLOP/s of a large product in their dtype.
    """
    flops, dtype = 0, torch.float32
    for member in members:
        algorithm = member.algorithm
        if algorithm.matrix_only:
            cost = algorithm.matrix_preconditioner.cost.on(device)
            dtype = torch.float32 if cost.is_float32 else cost.returned()
            shapes = algorithm.matrices.shapes_in(member.p.shape)
            flops += sum(num * cost.num_flops(*shape) for num, shape in shapes)
    return flops, machine.matmul_rate(device, dtype)


@dataclass(frozen=True)
class PrintedKernel:
    """A printed kernel over the tensors of one formula."""

    name: str
    num_launches: int  # in a step; of sums a second one adds the blocks of each part
    num_bytes: int  # read and written in a step, by its loads and stores
    source: str  # for Triton

    def __str__(self) -> str:
        launches = f"{self.num_launches} launch{'es' * (self.num_launches != 1)}"
        return f"{self.name}: {launches}, {size(self.num_bytes)} moved"


@dataclass(frozen=True, kw_only=True)
class OptimizerReport(Report):
    """The cost of a step of MARS. ``str(report)`` is a table."""

    CALL: ClassVar[str] = "step"
    DERIVED: ClassVar[tuple[str, ...]] = (*Report.DERIVED, "bytes_per_param")

    title: str
    num_tensors: int
    num_params: int
    printed: list[PrintedKernel]
    floor: Floor
    num_flops: int  # with whole matrices, in one step
    matmul_rate: float  # FLOP/s of a large square product in their dtype

    @property
    def num_kernels(self) -> int:
        """Return the kernels of all graphs, and launches of printed ones, in a step."""
        return (super().num_kernels or 0) + sum(k.num_launches for k in self.printed)

    @property
    def num_bytes(self) -> int:
        """Return what graphs read and write in a step, as inductor counts, and printed
        kernels by their source.
        """
        return (super().num_bytes or 0) + sum(k.num_bytes for k in self.printed)

    @property
    def bytes_per_param(self) -> float:
        """Return ``num_bytes`` a parameter."""
        return self.num_bytes / self.num_params

    @property
    def allowed_seconds(self) -> float:
        """Return what bytes (copies included) and products take at this machine's
        rates.
        """
        seconds = (self.num_bytes + self.floor.copied) / self.copy_bandwidth
        return seconds + self.num_flops / self.matmul_rate

    @property
    def source(self) -> str:
        """Return the source of every printed kernel; without one, inductor's code of
        every graph.
        """
        if self.printed:
            return "\n\n".join(dict.fromkeys(k.source for k in self.printed))
        codes = [f"# {g.compile_id}, {g.name}\n{g.source}" for g in self.graphs]
        return "\n\n".join([NONE_PRINTED, *codes])

    def __str__(self) -> str:
        return (
            f"{self.title}: {self.num_tensors} tensors, {self.num_params:,} "
            f"parameters\n{super().__str__()}"
        )

    def _printed(self) -> dict[str, list[str]]:
        rows = {"printed": [f"{len(self.printed)}"] if self.printed else []}
        return rows | {f"  {i}": [str(k)] for i, k in enumerate(self.printed, 1)}

    def _kernels(self) -> str:
        printed = sum(kernel.num_launches for kernel in self.printed)
        runs = sum(graph.num_runs for graph in self.graphs)
        return (
            f"{self.num_kernels} a step: {printed} launches of printed ones, "
            f"{self.num_kernels - printed} of {runs} runs of graphs"
        )

    def _bytes(self) -> list[str]:
        n, least = self.num_params, self.floor
        return [
            f"{self.bytes_per_param:.2f} a parameter, floor "
            f"{least.num_bytes / n:.2f}: norms {least.norms / n:.2f}, update "
            f"{least.update / n:.2f} ({size(self.num_bytes)} moved a step)",
            f"and {least.copied / n:.2f} a parameter to copy small tensors into rows, "
            "and out",
        ]

    def _rates(self) -> str:
        if not self.num_flops:
            return super()._rates()
        return (
            f"{super()._rates()} and {self.num_flops / 1e9:.3g} GFLOP at "
            f"{self.matmul_rate / 1e9:.0f} GFLOP/s of a matmul"
        )


NONE_PRINTED = (
    "# no kernel is printed here, as on a GPU, or on a CPU by Triton with "
    "TRITON_INTERPRET=1: this is inductor's code"
)


def profile_optimizer(
    subject: Subject, *, title: str, device: str = "cpu", **options: Any
) -> OptimizerReport:
    """Return ``profile`` of the next ``steps + 2`` steps, with these ``options`` of it,
    and the numbers that only MARS has.
    """
    # the optimizer compiles its own
    report = profile(subject, compile=False, device=device, **options)
    found = subject.optimizer.describe()
    assert found.runner is not None
    num_flops, rate = matrix_products(found.members, device)
    return OptimizerReport(
        **vars(report),
        title=title,
        num_tensors=len(subject.params),
        num_params=sum(p.numel() for p in subject.params),
        printed=printed_kernels(found.runner),
        floor=floor_of(found.binding.groups),
        num_flops=num_flops,
        matmul_rate=rate,
    )


def printed_kernels(runner: Graphs | Kernels) -> list[PrintedKernel]:
    """Return the printed kernels that a step launches."""
    if not isinstance(runner, Kernels):
        return []
    return [
        PrintedKernel(
            name=kernel.printed.name,
            num_launches=2 if kernel.printed.num_terms else 1,
            num_bytes=round(
                num_elements
                * (kernel.printed.bytes_read + kernel.printed.bytes_written)
            ),
            source=kernel.printed.source,
        )
        for kernel, num_elements in runner.kernels
    ]
