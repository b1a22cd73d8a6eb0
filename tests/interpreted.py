"""Run by tests/test_rehearsal_interpreter.py: cases of interpreted steps, some with a
mutant of the code that their checks guard, and what the command says of wrong input.

    python -m tests.interpreted --json FILE [CASE ...]

A CASE is one of the command's; with =MUTANT it is small, takes one step, and the
library is changed before, but for the eager steps that it is compared with.
"""

from __future__ import annotations

import argparse
import importlib
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

# first, since all that follows imports Triton
from benchmarks.gpu.rehearsal import interpreter
from benchmarks.gpu.rehearsal.interpreted import case_of, interpreted, to_dict

# isort: split
import torch

from benchmarks.gpu.rehearsal.steppers import eager
from marsopt.functional import step
from marsopt.optim import kernels
from train.errors import UserError
from train.files import write_json

SHAPES = ((24, 20), (24, 20), (33, 20))
WRONG = (
    "mars-adam",
    "mars-m/exact",
    "lion/none/float16",
    "lion/none/float32/float32/7",
)


def read_always():
    """Read y of transport in every step."""
    return mock.patch.object(step, "where_or_unread", torch.where)


def written_always():
    """Write y of transport in skipped steps, too."""
    return mock.patch.object(step, "where_or_unread", lambda ok, new, old: new)


def forgotten():
    """Commit everything but m."""
    real = kernels._commit

    def commit(old, new):
        real(old, new._replace(buffers={**new.buffers, "m": old.buffers["m"]}))

    return mock.patch.object(kernels, "_commit", commit)


def blind():
    """Take a NaN for a zero."""
    real = step.statistics

    def statistics(products, live):
        sums = real(products, live)
        return torch.where(sums == sums, sums, 0.0)

    return mock.patch.object(step, "statistics", statistics)


def cut_off():
    """Round to bfloat16 as Triton's own interpreter does."""
    return mock.patch.object(interpreter, "rounding", lambda cast: cast)


# and the one step that each takes
MUTANTS = {
    "read_always": (read_always, "normal"),
    "written_always": (written_always, "skipped"),
    "forgotten": (forgotten, "normal"),
    "blind": (blind, "skipped"),
    "cut_off": (cut_off, "normal"),
}


def found(text: str) -> dict:
    """Return what comes of a case, with every fault."""
    text, _, mutant = text.partition("=")
    case = case_of(text)
    if not mutant:
        return to_dict(interpreted(case, eager(case)))
    change, kind = MUTANTS[mutant]
    case = replace(case, shapes=SHAPES, steps=(kind,))
    reference = eager(case)
    with change():
        return to_dict(interpreted(case, reference))


def messages() -> dict[str, str]:
    """Return what is said of cases that there are not, and of Triton without an
    interpreter.
    """
    said = {}
    for text in WRONG:
        try:
            case_of(text)
        except UserError as error:
            said[text] = str(error)
    with mock.patch.dict(os.environ):
        del os.environ["TRITON_INTERPRET"]
        try:
            importlib.reload(interpreter)
        except RuntimeError as error:
            said["imported"] = str(error)
    return said


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    cases = {text: found(text) for text in args.cases}
    write_json(args.json, dict(cases=cases, messages=messages()))


if __name__ == "__main__":
    main()
