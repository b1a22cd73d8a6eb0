"""The authors' class by the oracle, tensor by tensor, also with deviations from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from tests.conformance.oracle import Oracle
from tests.conformance.recordings import TYPES, Arrays, Case, recorded

Arguments = Mapping[str, Any]
FAINT = 1e-7  # times the gradients: eps shows


@dataclass(frozen=True)
class Deviation:
    """A thing that a port does otherwise.

    Args:
        words: what, as the verdict says it.
        oracle: what changes in ``Oracle``, as a class to inherit from before it.
        arguments: what changes in the constructor's arguments and in ``ROUTES``, of
            all of them.
    """

    words: str
    oracle: type | None = None
    arguments: Callable[[Arguments], Arguments] = lambda arguments: {}


# Beside the constructor's arguments: which numbers of dims are corrected without
# optimize_1d; whether lr and lr_1d follow the schedule; which numbers of dims the norm
# of the clip is over, None = each tensor.
ROUTES: Arguments = dict(
    corrects=lambda ndim: ndim == 2, scheduled=True, scheduled_1d=True, norm_over=None
)


@cache
def _deviating(changes: tuple[type, ...]) -> type[Oracle]:
    return type("Deviating", (*changes, Oracle), {})


class _Tensor:
    """A tensor's oracle and learning rate."""

    def __init__(self, x: np.ndarray, arguments: Arguments, cls: type[Oracle]):
        is_corrected = arguments["optimize_1d"] or arguments["corrects"](x.ndim)
        suffix, kind, self.ratio = "", arguments["mars_type"], 1.0
        if not is_corrected:
            suffix, kind = "_1d", "adamw"
            self.ratio = arguments["lr_1d"] / arguments["lr"]
        elif kind == "mars-shampoo" and x.ndim != 2:
            kind = "mars-adamw"
        beta1, beta2 = arguments[f"betas{suffix}"]
        wd = arguments[f"weight_decay{suffix}"]
        others = {key: arguments[key] for key in ("gamma", "eps", "amsgrad")}
        self.oracle = cls(x, kind, beta1=beta1, beta2=beta2, wd=wd, **others)
        self.is_scheduled = arguments[f"scheduled{suffix}"]
        self.constant = arguments["lr"]

    def lr(self, lr: float) -> float:
        return self.ratio * (lr if self.is_scheduled else self.constant)


def simulate(
    case: Case,
    deviations: Sequence[Deviation] = (),
    names: Collection[str] | None = None,
) -> Iterator[Arrays]:
    """Yield the parameters after each step of a case, in float64.

    Args:
        case: its ``params`` are not read.
        deviations: none = as the authors' class. The oracle of each stands before those
            of the ones after it.
        names: of the tensors to yield; None = all.
    """
    arguments = {**case.arguments, **ROUTES}
    for deviation in deviations:
        arguments |= deviation.arguments(arguments)
    cls = _deviating(tuple(d.oracle for d in deviations if d.oracle is not None))
    over, names = arguments["norm_over"], case.init if names is None else names
    tensors = {
        name: _Tensor(case.init[name], arguments, cls)
        for name in (case.init if over else names)
    }
    for t, (lr, grads) in enumerate(zip(case.lrs, case.grads, strict=True)):
        c = {
            name: tensor.oracle.corrected(grads[name], case.reference(t, name))
            for name, tensor in tensors.items()
        }
        norms = {name: float(np.linalg.norm(value)) for name, value in c.items()}
        if over:
            squares = [norms[n] ** 2 for n in tensors if over(case.init[n].ndim)]
            norms = dict.fromkeys(norms, sum(squares) ** 0.5)
        after = {}
        for name in names:
            oracle = tensors[name].oracle
            clipped = oracle.clipped(c[name], norms[name])
            after[name] = oracle.advance(clipped, tensors[name].lr(lr))
        yield after


@cache
def cases(mars_type: str) -> list[Case]:
    """Return all recordings of a type, and the first of them with gradients so small
    that it shows where eps is added; its parameters come from the oracle.
    """
    if mars_type not in TYPES:
        raise ValueError(f"got mars_type={mars_type!r}, expected one of {TYPES}")
    recordings = recorded(mars_type)
    first = recordings[0]
    grads: list[Arrays] = [
        {n: np.float32(FAINT) * g for n, g in row.items()} for row in first.grads
    ]
    name = first.name.replace("-clip", "-faint")
    faint = replace(first, name=name, grads=grads)
    return [*recordings, replace(faint, params=list(simulate(faint)))]
