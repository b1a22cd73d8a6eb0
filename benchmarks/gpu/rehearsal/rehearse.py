"""One case after the other, in this process; what was done already is kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.rehearsal.cases import NONE, Case, lower
from benchmarks.gpu.rehearsal.measure import Compiler, measure, to_dict
from train.files import write_json

ROOT = Path(__file__).parents[3]
# of this folder, that make a result
PARTS = ("binaries", "cases", "device", "lowering", "measure", "traffic")


@cache
def fingerprint() -> str:
    """Return what a result depends on: all sources, torch and Triton."""
    found = hashlib.sha256(f"{torch.__version__} {version('triton')}".encode())
    own = [Path(__file__).with_name(f"{part}.py") for part in PARTS]
    for path in (*own, *sorted((ROOT / "marsopt").rglob("*.py"))):
        found.update(path.read_bytes())
    return found.hexdigest()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch and marsopt say of a first step."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


compiler = cache(Compiler)  # one a process


def rehearse(case: Case, binaries: bool, out: Path) -> dict[str, Any]:
    """Return what a case is made of; from ``out``, if it is there."""
    kind = "compiled" if binaries else "lowered"
    parts = (case.rule, case.correction or NONE, case.model, case.dtype)
    parts += (case.state, kind)
    path = out / f"{' '.join(parts).replace(' ', '_')}.json"
    if path.exists():
        found = json.loads(path.read_text())
        if found["fingerprint"] == fingerprint():
            return found["result"]
    with quiet():
        result = to_dict(measure(lower(case)), compiler() if binaries else None)
    write_json(path, dict(fingerprint=fingerprint(), result=result))
    return result
