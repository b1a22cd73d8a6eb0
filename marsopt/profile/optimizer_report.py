"""The report on a step of MARS: beside what any function gets, kernels per stack, bytes
a parameter beside the floor, packed gradients, Newton-Schulz.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marsopt.profile.floor import Floor, floor
from marsopt.profile.gpt2 import Subject
from marsopt.profile.orthogonal import Orthogonal, orthogonal
from marsopt.profile.profiler import profile
from marsopt.profile.report import Report, size


@dataclass(frozen=True)
class OptimizerReport:
    """What a step of MARS costs. ``str(report)`` is a table."""

    title: str
    report: Report
    num_tensors: int
    num_params: int
    stack_bytes: tuple[int, ...]  # of each stack's gradients
    floor: Floor
    orthogonal: Orthogonal | None

    @property
    def num_stack_kernels(self) -> int:
        """Kernels of one step that pass over a stack; the others compute the scales,
        numbers per tensor.
        """
        return self.report.num_kernels_over(min(self.stack_bytes))

    @property
    def kernels_per_stack(self) -> float:
        """Of one step, on average."""
        return self.num_stack_kernels / len(self.stack_bytes)

    @property
    def bytes_per_param(self) -> float:
        """Read and written by the compiled graphs, as inductor counts."""
        return self.report.num_bytes / self.num_params

    @property
    def allowed_seconds(self) -> float:
        """What bytes (packing included) and products take at this machine's rates."""
        report = self.report
        seconds = (report.num_bytes + self.floor.packed) / report.copy_bandwidth
        if self.orthogonal is not None:
            seconds += self.orthogonal.num_flops / self.orthogonal.matmul_rate
        return seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything, in what JSON can hold."""
        return {
            "title": self.title,
            **self.report.to_dict(),
            "num_tensors": self.num_tensors,
            "num_params": self.num_params,
            "num_stacks": len(self.stack_bytes),
            "stack_bytes": self.stack_bytes,
            "num_stack_kernels": self.num_stack_kernels,
            "bytes_per_param": self.bytes_per_param,
            "floor": self.floor._asdict(),
            "allowed_seconds": self.allowed_seconds,
            "orthogonal": None
            if self.orthogonal is None
            else asdict(self.orthogonal) | {"rate": self.orthogonal.rate},
        }

    def __str__(self) -> str:
        own = {"kernels": self._kernels, "bytes": self._bytes, "time": self._time}
        lines = [
            f"{self.title}: {self.num_tensors} tensors in {len(self.stack_bytes)} "
            f"stacks, {self.num_params:,} parameters"
        ]
        for name, text in self.report.rows():
            texts = own[name]() if name in own else [text]
            names = [name, *[""] * (len(texts) - 1)]
            lines += [f"{n:14}{t}" for n, t in zip(names, texts, strict=True)]
        lines += [f"{n:14}{t}" for n, t in self._orthogonal()]
        return "\n".join(lines)

    def _kernels(self) -> list[str]:
        rest = self.report.num_kernels - self.num_stack_kernels
        return [
            f"{self.num_stack_kernels} a step over stacks, "
            f"{self.kernels_per_stack:.1f} a stack; {rest} more for numbers per tensor"
        ]

    def _bytes(self) -> list[str]:
        n, least = self.num_params, self.floor
        return [
            f"{self.bytes_per_param:.2f} a parameter, floor "
            f"{least.num_bytes / n:.2f}: norms {least.norms / n:.2f}, update "
            f"{least.update / n:.2f} ({size(self.report.num_bytes)} moved a step)",
            f"and {least.packed / n:.2f} a parameter to pack gradients into stacks",
        ]

    def _time(self) -> list[str]:
        report, allowed = self.report, self.allowed_seconds
        rates = f"{report.copy_bandwidth / 1e9:.1f} GB/s of a copy"
        if self.orthogonal is not None:
            rates += f" and {self.orthogonal.matmul_rate / 1e9:.0f} GFLOP/s of a matmul"
        return [
            f"{1e3 * report.seconds:.1f} ms a step (median of "
            f"{len(report.all_seconds)})",
            f"{1e3 * allowed:.1f} ms allowed by {rates}: "
            f"{report.seconds / allowed:.2f}x",
        ]

    def _orthogonal(self) -> list[tuple[str, str]]:
        found = self.orthogonal
        if found is None:
            return []
        return [
            (
                "Newton-Schulz",
                f"{found.num_matrices} matrices, {found.num_flops / 1e9:.3g} GFLOP in "
                f"{1e3 * found.seconds:.0f} ms apart, {found.dtype}: "
                f"{found.rate / 1e9:.0f} GFLOP/s",
            ),
            (
                "",
                f"{found.rate / found.matmul_rate:.0%} of the "
                f"{found.matmul_rate / 1e9:.0f} GFLOP/s of its products alone",
            ),
        ]


def profile_optimizer(
    subject: Subject,
    *,
    title: str,
    steps: int = 10,
    cold: bool = True,
    device: str = "cpu",
    trace: Path | None = None,
    compile_log: Path | None = None,
) -> OptimizerReport:
    """``profile`` of the next ``steps + 2`` steps, and what MARS alone can tell."""
    report = profile(
        subject,
        steps=steps,
        compile=False,  # the optimizer compiles its own
        cold=cold,
        device=device,
        trace=trace,
        compile_log=compile_log,
    )
    groups = subject.optimizer._layout.groups
    buckets = subject.optimizer._layout.buckets
    return OptimizerReport(
        title=title,
        report=report,
        num_tensors=len(subject.params),
        num_params=subject.num_params,
        stack_bytes=tuple(sum(p.grad.nbytes for p in b.params) for b in buckets),
        floor=floor(groups),
        orthogonal=orthogonal(groups, device),
    )
