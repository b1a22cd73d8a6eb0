"""What a port of MARS does otherwise than the authors' class, in words.

Tensors are looked at by their number of dims: first matrices, on which the correction
acts, then vectors, then kernels. For each the smallest set of named deviations is
searched that gives the parameters of the port, in all cases and after all steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from tests.conformance.deviations import DEVIATIONS
from tests.conformance.model import Deviation, cases, simulate
from tests.conformance.recordings import TYPES, Arrays, Case

Deviations = frozenset[Deviation]
Pairs = Sequence[tuple[Case, Sequence[Arrays]]]  # a case, and the port's parameters

AT_MOST = 4  # deviations of tensors with the same number of dims
KINDS = {
    2: "matrices (2 dims)",
    1: "vectors (1 dim)",
    4: "kernels of convolutions (4 dims)",
}


class Difference(NamedTuple):
    """How far a tensor is from another after a step."""

    case: str
    step: int
    name: str
    size: float  # of its largest element
    allowed: float

    @property
    def departs(self) -> bool:
        return self.size > self.allowed

    def __str__(self) -> str:
        return (
            f"{self.case}, step {self.step}, {self.name}: {self.size:.2g} apart "
            f"(allowed: {self.allowed:.2g})"
        )


class Kind(NamedTuple):
    """What a port does with tensors of as many dims.

    Args:
        ndim: of the tensors.
        departure: where the port first differs; None = nowhere.
        explanations: the smallest sets of deviations that all do what the port does.
    """

    ndim: int
    departure: Difference | None
    explanations: Sequence[Deviations]

    def lines(self) -> Iterator[str]:
        if self.departure is None:
            yield f"  {KINDS[self.ndim]}: as the authors'"
            return
        if not self.explanations:
            yield f"  {KINDS[self.ndim]}: none of the named deviations explains it"
        for i, deviations in enumerate(self.explanations):
            yield (
                "    or, which these cases cannot tell apart:"
                if i
                else f"  {KINDS[self.ndim]}: as if"
            )
            yield from (
                f"    - {deviation.words}" for deviation in _ordered(deviations)
            )
        yield f"    first at {self.departure}"


@dataclass(frozen=True)
class Report:
    """The verdict.

    Args:
        mars_type: "mars-adamw", "mars-lion" or "mars-shampoo".
        num_cases: that were run, or that a file has.
        largest: difference of parameters in units of what is allowed.
        kinds: matrices, vectors and kernels.
        failures: {case: what it raised}.
    """

    mars_type: str
    num_cases: int
    largest: float
    kinds: Sequence[Kind]
    failures: Mapping[str, str]

    @property
    def conforms(self) -> bool:
        """Whether the port does what the authors' class does, in all cases."""
        departs = any(kind.departure for kind in self.kinds)
        return bool(self.num_cases) and not departs and not self.failures

    def __str__(self) -> str:
        failures = [f"  {case} raises {why}" for case, why in self.failures.items()]
        if not self.num_cases:  # nothing is known of the port
            return "\n".join([f"{self.mars_type}: no case could be run", *failures])
        verdict = "conforms" if self.conforms else "departs from the authors' class"
        lines = [
            f"{self.mars_type}: {verdict} ({self.num_cases} cases; largest difference "
            f"{self.largest:.2g} times what is allowed)",
            *failures,
        ]
        for kind in () if self.conforms else self.kinds:
            lines += kind.lines()
        return "\n".join(lines)


def judge(
    trajectories: Mapping[str, Sequence[Arrays]],
    mars_type: str,
    failures: Mapping[str, str] | None = None,
) -> Report:
    """Say what a port does by its parameters, in any framework.

    Args:
        trajectories: {case: parameters after each step, NumPy arrays by name}. Not all
            cases of the type need be there.
        mars_type: of the authors' class.
        failures: {case: what it raised}.
    """
    known = {case.name: case for case in cases(mars_type)}
    if unknown := [name for name in trajectories if name not in known]:
        raise ValueError(
            f"got cases {unknown}, expected some of {list(known)}: leave them out"
        )
    for name, params in trajectories.items():
        if len(params) != (num := len(known[name].params)):
            raise ValueError(
                f"got {len(params)} steps of {name}, expected {num}: give all of them"
            )
    pairs = [(known[name], params) for name, params in trajectories.items()]
    rows = [
        row
        for case, params in pairs
        for row in differences(case, case.params, params, case.init)
    ]
    kinds: list[Kind] = []
    for ndim in KINDS:
        names = {name for case, _ in pairs for name in _names(case, ndim)}
        departure = next(
            (row for row in rows if row.departs and row.name in names), None
        )
        shared = {d for kind in kinds for some in kind.explanations[:1] for d in some}
        explanations = _explain(pairs, ndim, shared) if departure else []
        kinds.append(Kind(ndim, departure, explanations))
    largest = max((row.size / row.allowed for row in rows), default=0.0)
    return Report(mars_type, len(pairs), largest, kinds, failures or {})


def differences(
    case: Case, want: Iterable[Arrays], got: Iterable[Arrays], names: Iterable[str]
) -> Iterator[Difference]:
    """Yield how far tensors are apart, step by step."""
    for t, (x, y) in enumerate(zip(want, got, strict=True)):
        for name in names:
            size = float(np.max(np.abs(x[name].astype(np.float64) - y[name])))
            size = np.inf if np.isnan(size) else size
            yield Difference(case.name, t + 1, name, size, case.tolerance(t, name))


def _names(case: Case, ndim: int) -> list[str]:
    return [name for name, x in case.init.items() if x.ndim == ndim]


def _ordered(deviations: Iterable[Deviation]) -> list[Deviation]:
    return sorted(deviations, key=DEVIATIONS.index)


def _does(pairs: Pairs, ndim: int, deviations: Deviations) -> bool:
    """Whether these deviations do what the port does."""
    for case, params in pairs:
        names = _names(case, ndim)
        simulated = simulate(case, _ordered(deviations), names)
        if any(row.departs for row in differences(case, simulated, params, names)):
            return False
    return True


def _acts(pairs: Pairs, ndim: int, deviation: Deviation, shared: Deviations) -> bool:
    """Whether a deviation changes anything, alone or beside those that are shared."""
    return any(
        _changes(case.name, ndim, deviation, beside)
        for beside in {Deviations(), shared}
        for case, _ in pairs
    )


@cache
def _changes(
    case_name: str, ndim: int, deviation: Deviation, beside: Deviations
) -> bool:
    """Whether a deviation changes anything of a case, beside others."""
    (case,) = (c for kind in TYPES for c in cases(kind) if c.name == case_name)
    names = _names(case, ndim)
    runs = [
        simulate(case, _ordered(deviations), names)
        for deviations in (beside, beside | {deviation})
    ]
    return any(row.departs for row in differences(case, *runs, names))


def _explain(pairs: Pairs, ndim: int, known: Iterable[Deviation]) -> list[Deviations]:
    """Return all smallest sets of deviations that do what the port does; those that are
    known of it by other tensors count nothing.
    """
    known = Deviations(known)
    shared = [
        Deviations(some)
        for size in range(len(known) + 1)
        for some in combinations(_ordered(known), size)
    ]
    with np.errstate(all="ignore"):  # what is no MARS may overflow
        acting = [
            deviation
            for deviation in DEVIATIONS
            if deviation not in known and _acts(pairs, ndim, deviation, known)
        ]
        for size in range(AT_MOST + 1):
            explanations = []
            for some in combinations(acting, size):
                sets = (beside | {*some} for beside in shared)  # the smallest first
                smallest = next((s for s in sets if _does(pairs, ndim, s)), None)
                explanations += [] if smallest is None else [smallest]
            if explanations:
                return explanations
    return []
