"""What a port of MARS does otherwise than the authors' class, in words.

Tensors of as many dims are looked at together: first matrices, on which the correction
acts, then vectors and what has more dims. Looked for is the smallest set of named
deviations whose parameters are the port's, in every case and after every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from marsopt.conformance.candidate import Factory, can, run
from marsopt.conformance.deviations import DEVIATIONS
from marsopt.conformance.model import Deviation, simulate
from marsopt.conformance.probes import cases
from marsopt.conformance.recordings import Arrays, Case

Found = frozenset[Deviation]

AT_MOST = 4  # deviations of one kind of tensors
KINDS = {
    2: "matrices (2 dims)",
    1: "vectors (1 dim)",
    4: "kernels of convolutions (4 dims)",
}


@dataclass(frozen=True)
class Departure:
    """Where a port first differs.

    Args:
        case: its name.
        step: from 1.
        name: of the tensor.
        difference: the largest of its elements.
        allowed: how large it may be.

    Example:
        >>> from marsopt.conformance import Departure
        >>> print(Departure("mars-lion-clip", 2, "bias", 9.3e-6, 1e-6))
        mars-lion-clip, step 2, bias: 9.3e-06 apart (allowed: 1e-06)
    """

    case: str
    step: int
    name: str
    difference: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"{self.case}, step {self.step}, {self.name}: {self.difference:.2g} apart "
            f"(allowed: {self.allowed:.2g})"
        )


@dataclass(frozen=True)
class Kind:
    """What a port does with tensors of as many dims.

    Args:
        ndim: of the tensors.
        departure: where it first differs; None = nowhere.
        explained: the smallest sets of deviations that all do what it does.

    Example:
        >>> from marsopt.conformance import Adapted, check
        >>> report = check(Adapted(torch.optim.AdamW))
        >>> for kind in report.kinds:
        ...     print(kind.ndim, kind.departure.step, len(kind.explained))
        2 2 1
        1 1 1
        4 1 1
    """

    ndim: int
    departure: Departure | None = None
    explained: Sequence[Found] = ()


@dataclass(frozen=True)
class Report:
    """The verdict.

    Args:
        mars_type: "mars-adamw", "mars-lion" or "mars-shampoo".
        num_cases: that were run, or given.
        largest: difference of parameters in units of what is allowed.
        kinds: matrices, vectors and others.
        failures: by case, what a case that could not be run raised.

    Example:
        >>> from marsopt.conformance import Report
        >>> print(Report("mars-lion", num_cases=5, largest=0.09, kinds=[]))
        mars-lion: conforms (5 cases; largest difference 0.09 times what is allowed)
    """

    mars_type: str
    num_cases: int
    largest: float
    kinds: Sequence[Kind]
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def conforms(self) -> bool:
        """Whether it does what the authors' class does, in all cases."""
        departs = any(kind.departure for kind in self.kinds)
        return bool(self.num_cases) and not departs and not self.failures

    def __str__(self) -> str:
        failed = [
            f"  {case} cannot be run: {why}" for case, why in self.failures.items()
        ]
        if not self.num_cases:  # nothing is known of it
            return "\n".join([f"{self.mars_type}: no case could be run", *failed])
        lines = [f"{self.mars_type}: conforms" if self.conforms else self._departs()]
        lines[0] += (
            f" ({self.num_cases} cases; largest difference {self.largest:.2g} times "
            "what is allowed)"
        )
        lines += failed
        for kind in self.kinds:
            lines += _told(kind) if not self.conforms else []
        return "\n".join(lines)

    def _departs(self) -> str:
        return f"{self.mars_type}: departs from the authors' class"


def _told(kind: Kind) -> Iterator[str]:
    if kind.departure is None:
        yield f"  {KINDS[kind.ndim]}: as the authors'"
        return
    if not kind.explained:
        yield f"  {KINDS[kind.ndim]}: none of the named deviations explains it"
    for i, found in enumerate(kind.explained):
        yield (
            "    or, which these cases cannot tell apart:"
            if i
            else f"  {KINDS[kind.ndim]}: as if"
        )
        yield from (f"    - {deviation.words}" for deviation in _ordered(found))
    yield f"    first at {kind.departure}"


def _ordered(found: Found) -> list[Deviation]:
    return [deviation for deviation in DEVIATIONS if deviation in found]


def check(factory: Factory, mars_type: str = "mars-adamw") -> Report:
    """Run an optimizer along the recordings, and say what it does.

    Args:
        factory: called with a list of parameters and all arguments of the authors'
            constructor by name (``marsopt.conformance.AUTHORS``), returns an optimizer
            whose ``param_groups`` have "lr". ``Adapted`` makes one of a class that
            lacks some of them. Exact MARS is looked at where it is a class that has the
            authors' ``update_previous_grad`` and ``update_last_grad``.
        mars_type: "mars-adamw", "mars-lion" or "mars-shampoo".

    Raises:
        ValueError: another ``mars_type``.
        ImportError: NumPy or safetensors are not there.

    Example:
        >>> from marsopt.conformance import Adapted, check
        >>> port = Adapted(marsopt.MARS, dict(compile=False))
        >>> check(port, "mars-lion").conforms
        True
    """
    every, failures, trajectories = cases(mars_type), {}, {}
    for case in every:
        if not can(factory, case):
            continue
        try:
            trajectories[case.name] = run(factory, case)
        except Exception as error:  # whatever a port raises is what is told of it
            failures[case.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return judge(trajectories, mars_type, failures)


def judge(
    trajectories: Mapping[str, Sequence[Arrays]],
    mars_type: str = "mars-adamw",
    failures: Mapping[str, str] | None = None,
) -> Report:
    """Say what an optimizer does by the parameters that it came to, in any framework.

    Args:
        trajectories: by the name of a case, which recordings.json has, parameters after
            each step, NumPy arrays by name. Not all cases need be there; "faint" ones
            are the first of a type with gradients times 1e-7.
        mars_type: as of ``check``.
        failures: cases that could not be run, and why.

    Raises:
        ValueError: another ``mars_type``, cases that it does not have, or other steps.

    Example:
        >>> from marsopt.conformance import cases, judge
        >>> mine = {case.name: case.params for case in cases("mars-lion")}
        >>> judge(mine, "mars-lion").largest        # the recordings themselves
        0.0
    """
    every = {case.name: case for case in cases(mars_type)}
    unknown = [name for name in trajectories if name not in every]
    if unknown:
        raise ValueError(
            f"got cases {unknown}, expected some of {list(every)}: leave them out"
        )
    for name, found in trajectories.items():
        if len(found) != (num := len(every[name].params)):
            raise ValueError(
                f"got {len(found)} steps of {name}, expected {num}: give all of them"
            )
    pairs = [(every[name], found) for name, found in trajectories.items()]
    kinds: list[Kind] = []
    for ndim in KINDS:
        departure = next(_departures(pairs, ndim), None)
        explained: Sequence[Found] = ()
        if departure is not None:
            explained = _explain(pairs, ndim, _common(kinds))
        kinds.append(Kind(ndim, departure, explained))
    largest = max((max(_shares(*pair)) for pair in pairs), default=0.0)
    return Report(mars_type, len(pairs), largest, kinds, failures or {})


Pairs = Sequence[tuple[Case, Sequence[Arrays]]]


def _names(case: Case, ndim: int) -> list[str]:
    return [name for name, x in case.init.items() if x.ndim == ndim]


def _shares(case: Case, found: Sequence[Arrays]) -> Iterator[float]:
    """Yield differences, in units of what is allowed."""
    for t, (want, got) in enumerate(zip(case.params, found, strict=True)):
        for name in case.init:
            yield _apart(want[name], got[name]) / case.tolerance(t, name)


def _apart(want: np.ndarray, got: np.ndarray) -> float:
    difference = float(np.max(np.abs(want.astype(np.float64) - got)))
    return difference if difference == difference else np.inf  # NaN


def _departures(pairs: Pairs, ndim: int) -> Iterator[Departure]:
    for case, found in pairs:
        for t, (want, got) in enumerate(zip(case.params, found, strict=True)):
            for name in _names(case, ndim):
                allowed = case.tolerance(t, name)
                apart = _apart(want[name], got[name])
                if apart > allowed:
                    yield Departure(case.name, t + 1, name, apart, allowed)


def _common(kinds: Sequence[Kind]) -> Found:
    """Return what is known of a port by other tensors."""
    return frozenset().union(*(kind.explained[0] for kind in kinds if kind.explained))


def _does(pairs: Pairs, ndim: int, deviations: Found) -> bool:
    """Whether these deviations do what the port does."""
    told = _ordered(deviations)
    for case, found in pairs:
        for name in _names(case, ndim):
            for t, want in enumerate(simulate(case, told, [name])):
                if not _apart(want[name], found[t][name]) <= case.tolerance(t, name):
                    return False
    return True


def _acts(pairs: Pairs, ndim: int, deviation: Deviation, known: Found) -> bool:
    """Whether a deviation changes anything here, alone or beside those known."""
    for beside in {frozenset[Deviation](), known}:
        without, with_it = _ordered(beside), _ordered(beside | {deviation})
        for case, _ in pairs:
            names = _names(case, ndim)
            both = zip(
                simulate(case, without, names),
                simulate(case, with_it, names),
                strict=True,
            )
            for t, (one, other) in enumerate(both):
                if any(_apart(one[n], other[n]) > case.tolerance(t, n) for n in names):
                    return True
    return False


def _explain(pairs: Pairs, ndim: int, known: Found) -> list[Found]:
    """Return all smallest sets of deviations that do what the port does; what is known
    of it by other tensors counts nothing.
    """
    shared = [
        frozenset(some)
        for size in range(len(known) + 1)
        for some in combinations(_ordered(known), size)
    ]
    with np.errstate(all="ignore"):  # what is no MARS may overflow
        every = [
            deviation
            for deviation in DEVIATIONS
            if deviation not in known and _acts(pairs, ndim, deviation, known)
        ]
        for size in range(AT_MOST + 1):
            found = []
            for some in combinations(every, size):
                for beside in shared:
                    if _does(pairs, ndim, beside | {*some}):
                        found.append(beside | {*some})
                        break  # no more of what is shared than it needs
            if found:
                return found
    return []
