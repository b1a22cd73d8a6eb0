"""What type checkers and editors see of marsopt/functional/named.py, whose functions
are made from the table of hyperparameters: python -m tests.named_stub writes named.pyi.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

from marsopt.functional import named

STUB = Path(named.__file__).with_suffix(".pyi")
HEAD = '''"""Signatures of the named rules: by python -m tests.named_stub."""

from typing import Literal

import torch

from marsopt.functional.rule import Rule
from marsopt.rules.checks import Number
'''
NUMBER = "float | torch.Tensor"


def written() -> str:
    """Return the stub, as ruff formats it."""
    functions = [
        it
        for it in vars(named).values()
        if inspect.isfunction(it) and hasattr(it, "__signature__")
    ]
    ordered = sorted({it.__name__: it for it in functions}.items())
    text = HEAD + "".join(f"\n{signature(*pair)}" for pair in ordered)
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", "named.pyi", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def signature(name: str, it: object) -> str:
    """Return a function of the stub."""
    taken = inspect.signature(it).parameters.values()
    listed = ", ".join(
        f"{p.name}: {hint(p.annotation)} = {default(p.default)}" for p in taken
    )
    return f"def {name}(*, {listed}) -> Rule: ..."


def hint(annotation: object) -> str:
    text = inspect.formatannotation(annotation)
    text = re.sub(r"Optional\[(Literal\[.*\])\]", r"\1 | None", text)
    return text.replace(NUMBER, "Number")


def default(value: object) -> str:
    """Return a default as it is written, or, where it is another object, dots."""
    plain = value is None or isinstance(value, bool | int | float | str | tuple)
    return repr(value) if plain else "..."


if __name__ == "__main__":
    STUB.write_text(written())
