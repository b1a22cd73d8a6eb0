"""The cases of a type: recordings, and one of faint gradients, by the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from marsopt.conformance.model import simulate
from marsopt.conformance.recordings import AUTHORS, TYPES, Arrays, Case, recorded, table

FAINT = 1e-7  # times the gradients: eps shows


def cases(mars_type: str) -> list[Case]:
    """Return all recordings of a type of the class, and one with faint gradients.

    Args:
        mars_type: "mars-adamw", "mars-lion" or "mars-shampoo".

    Raises:
        ValueError: another type.

    Example:
        >>> from marsopt.conformance import cases
        >>> [case.name for case in cases("mars-lion")][0]
        'mars-lion-clip'
    """
    if mars_type not in TYPES:
        raise ValueError(
            f"got mars_type={mars_type!r}, expected one of {', '.join(TYPES)}: the "
            "types of the authors' class"
        )
    names = [
        name
        for name, entry in table()["cases"].items()
        if entry["kind"] == "MARS"
        and entry["kw"].get("mars_type", AUTHORS["mars_type"]) == mars_type
        and "ns" not in entry
    ]
    found = [recorded(name) for name in names]
    return [*found, faint(found[0])]


def faint(case: Case) -> Case:
    """Return a case with gradients so small that it shows where eps is added; the
    oracle tells what comes of it.
    """
    grads: list[Arrays] = [
        {n: np.float32(FAINT) * g for n, g in row.items()} for row in case.grads
    ]
    name = case.name.replace("-clip", "-faint")
    small = replace(case, name=name, grads=grads)
    return replace(small, params=list(simulate(small)))
