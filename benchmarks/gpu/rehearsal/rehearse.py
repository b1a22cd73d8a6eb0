"""One case of a part, in this process; what was done already is kept."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from train.files import write_json

ROOT = Path(__file__).parents[3]
SOURCES = ("benchmarks/gpu/rehearsal", "marsopt", "parallel", "train/forecast")

Row = dict[str, Any]  # of a case: its name, its faults in words, and figures


class Part(Protocol):
    """A module of this folder."""

    NAMES: Sequence[str]  # of all cases
    DEFAULT: Sequence[str]  # of those that are played where none is named
    play: Callable[[str], Row]
    columns: Callable[[Row], dict[str, str]]  # of the table


def part_of(name: str) -> Part:
    """Return a part; "interpreted" has to be imported before Triton is."""
    return importlib.import_module(f"{__package__}.{name}")


def has_triton() -> bool:
    """Return whether Triton is on Python's path, without importing it."""
    return importlib.util.find_spec("triton") is not None


@cache
def fingerprint() -> str:
    """Return what a row depends on: sources, torch and Triton."""
    triton = version("triton") if has_triton() else "none"
    digest = hashlib.sha256(f"{torch.__version__} {triton}".encode())
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch and marsopt log at a first step."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def rehearse(name: str, part: str, out: Path | None) -> Row:
    """Return a case's row, from a file in ``out`` if its sources are today's."""
    path = out / part / f"{name.replace('/', ' ')}.json" if out else None
    if path is not None and path.exists():
        kept = json.loads(path.read_text())
        if kept["fingerprint"] == fingerprint():
            return kept["row"]
    with quiet():
        row = part_of(part).play(name)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dict(fingerprint=fingerprint(), row=row))
    return row
