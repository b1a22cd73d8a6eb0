"""What a lowered step is made of: launches, bytes, and what its kernels compile to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.rehearsal.binaries import Binary, compiled
from benchmarks.gpu.rehearsal.cases import Lowered
from benchmarks.gpu.rehearsal.device import h100
from benchmarks.gpu.rehearsal.lowering import launches
from benchmarks.gpu.rehearsal.traffic import Access, Traffic, accesses, traffic

NAME = "kernel"  # of all that are compiled: equal ones have other names elsewhere


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step.

    Args:
        name: inductor's, of which the end is its number in the graph.
        graph: the function whose graph it is in.
        runs: launches of it.
        sizes: of its first launch.
        over_stack: whether it goes over gradients, parameters or state.
        divides: whether a full-size index has a modulo or a quotient.
        traffic: of all its launches.
        accesses: of its first launch.
        source: Triton.
    """

    name: str
    graph: str
    runs: int
    sizes: tuple[int, ...]
    over_stack: bool
    divides: bool
    traffic: Traffic
    accesses: tuple[Access, ...]
    source: str


@dataclass(frozen=True)
class Step:
    """The kernels of one step of a case."""

    lowered: Lowered
    kernels: list[Kernel]

    @property
    def num_launches(self) -> int:
        """Return those of a step."""
        return sum(kernel.runs for kernel in self.kernels)

    @property
    def num_stack_launches(self) -> int:
        """Return those that go over stacks."""
        return sum(kernel.runs for kernel in self.kernels if kernel.over_stack)

    @property
    def traffic(self) -> Traffic:
        """Return that of a step."""
        return sum((kernel.traffic for kernel in self.kernels), Traffic())


def measure(lowered: Lowered) -> Step:
    """Return the kernels of a lowered step."""
    found = []
    smallest = min(lowered.stack_sizes)
    for graph in lowered.graphs:
        with h100():
            sources, log = launches(graph)
        for name, source in sources.items():
            runs = [run for run in log if run.kernel == name]
            mine = [accesses(source, run) for run in runs]
            full = [a for a in mine[0] if a.of_stack and a.num_elements >= smallest]
            found.append(
                Kernel(
                    name=name,
                    graph=graph.function,
                    runs=len(mine),
                    sizes=tuple(runs[0].sizes),
                    over_stack=bool(full),
                    divides=any(a.divides for a in full),
                    traffic=sum(map(traffic, mine), Traffic()),
                    accesses=tuple(mine[0]),
                    source=source,
                )
            )
    return Step(lowered, found)


class Compiler:
    """Binaries of kernels, each source compiled once for all cases."""

    def __init__(self) -> None:
        self._known: dict[str, list[Binary]] = {}

    def binaries(self, kernel: Kernel) -> list[Binary]:
        """Return a kernel in each configuration that inductor would try."""
        source = kernel.source.replace(kernel.name, NAME)
        if source not in self._known:
            with h100():
                self._known[source] = list(compiled(NAME, source))
        return self._known[source]


def to_dict(step: Step, compiler: Compiler | None) -> dict[str, Any]:
    """Return what JSON can hold.

    Args:
        step: what was measured.
        compiler: of the kernels over stacks; None: nothing is compiled.
    """
    lowered, n = step.lowered, step.lowered.num_params
    kernels = []
    for kernel in step.kernels:
        row = dict(
            name=kernel.name,
            graph=kernel.graph,
            runs=kernel.runs,
            sizes=kernel.sizes,
            over_stack=kernel.over_stack,
            divides=kernel.divides,
            **asdict(kernel.traffic),
        )
        if compiler is not None and kernel.over_stack:
            binaries = compiler.binaries(kernel)
            row["binaries"] = [
                {
                    **asdict(binary),
                    "widths": {f"{op}.{b}": k for (op, b), k in binary.widths.items()},
                    "full_size": binary.wanted(kernel.accesses).total(),
                    "narrow": binary.missing(kernel.accesses).total(),
                }
                for binary in binaries
            ]
        kernels.append(row)
    found = step.traffic
    return dict(
        **asdict(lowered.case),
        name=lowered.case.name,
        num_params=n,
        num_stacks=len(lowered.stack_sizes),
        graphs=[graph.function for graph in lowered.graphs],
        num_recompiled=lowered.num_recompiled,
        launches=step.num_launches,
        stack_launches=step.num_stack_launches,
        loaded=found.loaded / n,
        stored=found.stored / n,
        flagged=found.flagged / n,
        floor=lowered.floor / n,
        kernels=kernels,
    )
