"""The report on a step of MARS: beside what any function gets, kernels per stack, bytes
a parameter beside the floor, packed gradients, Newton-Schulz.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from marsopt.profile.gpt2 import Subject
from marsopt.profile.limits import Floor, Orthogonal, floor, orthogonal
from marsopt.profile.profiler import profile
from marsopt.profile.table import Report, size


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
    orthogonal: Orthogonal | None

    @property
    def num_stacks(self) -> int:
        """Return the stacks that a step moves, over all calls of its graphs."""
        return len(self.stack_bytes)

    @property
    def num_stack_kernels(self) -> int:
        """Return the kernels of one step that pass over a stack."""
        return self.num_kernels_over(min(self.stack_bytes))

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
        if self.orthogonal is not None:
            seconds += self.orthogonal.num_flops / self.orthogonal.matmul_rate
        return seconds

    def to_dict(self) -> dict[str, Any]:
        """Return everything, in what JSON can hold."""
        found = super().to_dict() | {"floor": self.floor._asdict()}
        if self.orthogonal is not None:
            found["orthogonal"]["rate"] = self.orthogonal.rate
        return found

    def __str__(self) -> str:
        return (
            f"{self.title}: {self.num_tensors} tensors in {self.num_stacks} stacks, "
            f"{self.num_params:,} parameters\n{super().__str__()}"
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the table, as name and text."""
        return [*super().rows(), *zip(("Newton-Schulz", ""), self._ns(), strict=False)]

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
        ]

    def _rates(self) -> str:
        if self.orthogonal is None:
            return super()._rates()
        rate = self.orthogonal.matmul_rate / 1e9
        return f"{super()._rates()} and {rate:.0f} GFLOP/s of a matmul"

    def _ns(self) -> list[str]:
        ns = self.orthogonal
        if ns is None:
            return []
        return [
            f"{ns.num_matrices} matrices, {ns.num_flops / 1e9:.3g} GFLOP in "
            f"{1e3 * ns.seconds:.0f} ms apart, {ns.dtype}: {ns.rate / 1e9:.0f} GFLOP/s",
            f"{ns.rate / ns.matmul_rate:.0%} of the {ns.matmul_rate / 1e9:.0f} GFLOP/s "
            "of its products alone",
        ]


def profile_optimizer(
    subject: Subject, *, title: str, device: str = "cpu", **options: Any
) -> OptimizerReport:
    """Return ``profile`` of the next ``steps + 2`` steps, with these ``options`` of it,
    and what MARS alone can tell.
    """
    # the optimizer compiles its own
    report = profile(subject, compile=False, device=device, **options)
    layout = subject.optimizer._layout
    return OptimizerReport(
        **vars(report),
        title=title,
        num_tensors=len(subject.params),
        num_params=subject.num_params,
        stack_bytes=tuple(sum(p.grad.nbytes for p in ps) for ps in layout.leaves),
        floor=floor(layout.buckets),
        orthogonal=orthogonal(layout.groups, device),
    )
