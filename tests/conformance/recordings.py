"""Recordings of the authors' own code, in two files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Arrays = Mapping[str, np.ndarray]  # by the name of a tensor

HERE = Path(__file__).parent
# The constructor of AGI-Arena/MARS, mars.py.
AUTHORS: dict[str, Any] = dict(
    lr=3e-3,
    betas=(0.95, 0.99),
    eps=1e-8,
    weight_decay=0.0,
    amsgrad=False,
    gamma=0.025,
    is_approx=True,
    mars_type="mars-adamw",
    optimize_1d=False,
    lr_1d=3e-3,
    betas_1d=(0.9, 0.95),
    weight_decay_1d=0.1,
)
TYPES = ("mars-adamw", "mars-lion", "mars-shampoo")
# Of parameters, beside what the authors' float32 computed; of Newton-Schulz in bfloat16
# in units of the sum of the learning rates so far, times its scale by shape.
TOLERANCE, TOLERANCE_NS = 1e-6, 0.05


@dataclass(frozen=True)
class Case:
    """A start, gradients, and the parameters after each step.

    Args:
        name: of the recording.
        arguments: of the authors' constructor, all of them.
        lrs: learning rate of each step.
        init: parameters before the first step.
        grads: gradients of each step.
        handed: exact MARS, else None: the gradient that is handed over *before* each
            step, of the next batch at the current parameters. It is h of the step after
            it; h of the first is 0.
        params: parameters after each step.
    """

    name: str
    arguments: Mapping[str, Any]
    lrs: list[float]
    init: Arrays
    grads: list[Arrays]
    handed: list[Arrays] | None
    params: list[Arrays]

    def reference(self, step: int, name: str) -> np.ndarray | None:
        """Return h of a step, from 0; None: it is the gradient of the step before."""
        if self.handed is None:
            return None
        return self.handed[step - 1][name] if step else np.zeros_like(self.init[name])

    def tolerance(self, step: int, name: str) -> float:
        """Return how far the parameters after a step, from 0, may be apart."""
        shape = self.init[name].shape
        if self.arguments["mars_type"] != "mars-shampoo" or len(shape) != 2:
            return TOLERANCE
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        return float(TOLERANCE_NS * scale * sum(self.lrs[: step + 1]))


@cache
def table() -> dict[str, Any]:
    """Return recordings.json."""
    return json.loads((HERE / "recordings.json").read_text())


@cache
def tensors() -> Arrays:
    """Return recordings.safetensors, by key."""
    return load_file(HERE / "recordings.safetensors")


def stacked(key: str) -> Arrays:
    """Return the tensors below a key, by name."""
    return {name: tensors()[f"{key}/{name}"] for name in table()["shapes"]}


def steps(key: str) -> list[Arrays]:
    """Return the tensors below a key, step by step."""
    arrays = stacked(key)
    num = len(next(iter(arrays.values())))
    return [{name: array[t] for name, array in arrays.items()} for t in range(num)]


def recorded(mars_type: str) -> list[Case]:
    """Return the recordings of a type of the authors' class, with their Newton-Schulz
    in float64.
    """
    return [
        _case(name, entry)
        for name, entry in table()["cases"].items()
        if entry["kind"] == "MARS"
        and entry["kw"].get("mars_type", AUTHORS["mars_type"]) == mars_type
        and "ns" not in entry
    ]


def _case(name: str, entry: Mapping[str, Any]) -> Case:
    arguments = AUTHORS | {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in entry["kw"].items()
    }
    factors = entry.get("lr_sched", [1.0] * entry["steps"])
    return Case(
        name=name,
        arguments=arguments,
        lrs=[arguments["lr"] * factor for factor in factors],
        init=stacked(entry["init"]),
        grads=steps(entry["grad"]),
        handed=steps(entry["prev"]) if "prev" in entry else None,
        params=steps(f"param/{name}"),
    )
