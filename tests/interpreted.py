"""Run by tests/test_rehearsal_interpreter.py: cases of interpreted steps, some with a
mutant of the code that their checks guard, and what the command says of wrong input.

    python -m tests.interpreted --json FILE [CASE ...]

A CASE is one of the command's, which plays it; with =MUTANT it is small, takes one
step, and the library is changed before, but for the eager steps that it is compared
with.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

# first, since all that follows imports Triton
from benchmarks.gpu.rehearsal import interpreted, interpreter

# isort: split
import torch

from benchmarks.gpu.rehearsal.steppers import eager
from marsopt.functional import step
from marsopt.optim import compiled
from train.errors import UserError
from train.files import write_json

SHAPES = ((24, 20), (24, 20), (33, 20))
WRONG = (
    "mars-adam",
    "mars-m/exact",
    "lion/none/float16",
    "lion/none/float32/float32/float32/7",
)


def read_always():
    """Read y of transport in every step."""
    return mock.patch.object(step, "where_or_unread", torch.where)


def written_always():
    """Write y of transport in skipped steps, too."""
    return mock.patch.object(step, "where_or_unread", lambda ok, new, old: new)


def forgotten():
    """Commit everything but m."""
    real = compiled.in_place

    def in_place(function):
        def moved(old, *own):
            new, more = function(old, *own)
            return new._replace(buffers={**new.buffers, "m": old.buffers["m"]}), more

        return real(moved)

    return mock.patch.object(compiled, "in_place", in_place)


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


def mutated(text: str) -> interpreted.Result:
    """Return what comes of CASE=MUTANT."""
    text, _, mutant = text.partition("=")
    change, kind = MUTANTS[mutant]
    case = replace(interpreted.case_of(text), shapes=SHAPES, steps=(kind,))
    reference = eager(case)
    with change():
        return interpreted.interpreted(case, reference)


def reported(found: list[interpreted.Result], path: Path) -> tuple[int, dict]:
    """Return the status in which the command ends, and the JSON that it writes."""
    try:
        interpreted.report(found, path)
        status = 0
    except SystemExit as ended:
        status = ended.code
    return status, json.loads(path.read_text())


def messages() -> dict[str, str]:
    """Return what is said of cases that there are not, and of Triton without an
    interpreter.
    """
    said = {}
    for text in WRONG:
        try:
            interpreted.case_of(text)
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
    plain = [text for text in args.cases if "=" not in text]
    mutants = [text for text in args.cases if "=" in text]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        interpreted.main(["--cases", *plain, "--json", str(args.json)])
    found = json.loads(args.json.read_text())
    status, others = reported([mutated(text) for text in mutants], args.json)
    rows = [*found["cases"], *others["cases"]]
    everything = dict(
        made_with=found["made_with"],
        cases=dict(zip(plain + mutants, rows, strict=True)),
        printed=printed.getvalue(),
        status=status,
        messages=messages(),
    )
    write_json(args.json, everything)


if __name__ == "__main__":
    main()
