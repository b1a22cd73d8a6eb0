"""The authors' class by the oracle, tensor by tensor, and with deviations from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from marsopt.conformance.oracle import Oracle
from marsopt.conformance.recordings import Arrays, Case

Arguments = Mapping[str, Any]


def _as_they_are(arguments: Arguments) -> Arguments:
    return arguments


@dataclass(frozen=True)
class Deviation:
    """One thing that a port does otherwise.

    Args:
        words: what, as the verdict says it.
        oracle: what it changes of ``Oracle``, as a class to inherit from before it.
        arguments: what it changes of the constructor's arguments; beside those that the
            authors have there are: "corrects", which numbers of dims are corrected
            without ``optimize_1d``; "scheduled", whether rates follow the schedule, of
            what is corrected and of what is not; "norm_over", which numbers of dims
            the norm of the clip is over, None = the tensor alone.
    """

    words: str
    oracle: type | None = None
    arguments: Callable[[Arguments], Arguments] = _as_they_are


ROUTES: Arguments = dict(
    corrects=lambda ndim: ndim == 2, scheduled=(True, True), norm_over=None
)


@cache
def _deviating(changes: tuple[type, ...]) -> type[Oracle]:
    return type("Deviating", (*changes, Oracle), {})


class _Moved:
    """A tensor and its oracle."""

    def __init__(self, x: np.ndarray, arguments: Arguments, made: type[Oracle]):
        self.is_corrected = arguments["optimize_1d"] or arguments["corrects"](x.ndim)
        kind, betas, wd = "adamw", arguments["betas_1d"], arguments["weight_decay_1d"]
        if self.is_corrected:
            kind, betas = arguments["mars_type"], arguments["betas"]
            wd = arguments["weight_decay"]
            if kind == "mars-shampoo" and x.ndim != 2:
                kind = "mars-adamw"
        own = dict(gamma=arguments["gamma"], eps=arguments["eps"])
        own["amsgrad"] = arguments["amsgrad"]
        self.oracle = made(x, kind, beta1=betas[0], beta2=betas[1], wd=wd, **own)
        self.ratio = 1.0
        if not self.is_corrected:
            self.ratio = arguments["lr_1d"] / arguments["lr"]
        self.is_scheduled = arguments["scheduled"][not self.is_corrected]
        self.constant = arguments["lr"]

    def rate(self, lr: float) -> float:
        return self.ratio * (lr if self.is_scheduled else self.constant)


def simulate(
    case: Case,
    deviations: Sequence[Deviation] = (),
    names: Collection[str] | None = None,
) -> Iterator[Arrays]:
    """Yield the parameters after each step of a case, in float64.

    Args:
        case: its own ``params`` are not looked at.
        deviations: none = as the authors' class. What one changes of the oracle stands
            before what the ones after it change.
        names: of the tensors that are wanted; None = all.
    """
    arguments = {**case.arguments, **ROUTES}
    for deviation in deviations:
        arguments = dict(deviation.arguments(arguments))
    changes = tuple(d.oracle for d in deviations if d.oracle is not None)
    made = _deviating(changes)
    over, wanted = arguments["norm_over"], case.init if names is None else names
    every = case.init if over else wanted
    moved = {name: _Moved(case.init[name], arguments, made) for name in every}
    for t, (lr, grads) in enumerate(zip(case.lrs, case.grads, strict=True)):
        c = {
            name: one.oracle.corrected(grads[name], case.reference(t, name))
            for name, one in moved.items()
        }
        norms = {name: float(np.linalg.norm(value)) for name, value in c.items()}
        if over:
            squares = [norms[n] ** 2 for n in moved if over(case.init[n].ndim)]
            norms = dict.fromkeys(norms, sum(squares) ** 0.5)
        after = {}
        for name in wanted:
            one = moved[name]
            clipped = one.oracle.clipped(c[name], norms[name])
            after[name] = one.oracle.advance(clipped, one.rate(lr))
        yield after
