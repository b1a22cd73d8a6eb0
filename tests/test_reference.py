"""The examples of the API reference run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import marsopt

ROOT = Path(__file__).parent.parent
PUBLIC = {
    "marsopt": marsopt.__all__,
    "marsopt.parallel": importlib.import_module("marsopt.parallel").__all__,
}
NAMES = {f"{module}.{name}" for module in PUBLIC for name in PUBLIC[module]}
# the index is of objects: values have no docstring of their own, but their pages do
VALUES = {"marsopt.LOCAL", "marsopt.REGISTRY", "marsopt.__version__"}
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))


def text_of(name: str) -> str:
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own).__doc__ or ""


def run(text: str, name: str, example: doctest.DocTestParser) -> int:
    """Run the examples of a text in names of their own; return how many there are."""
    names = {"marsopt": marsopt, "torch": torch}
    torch.manual_seed(0)
    test = example.get_doctest(text, names, name, name, 0)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)
    return len(test.examples)


@pytest.mark.parametrize("name", sorted(NAMES - VALUES))
def test_the_example_of_a_public_name_runs(name):
    assert run(text_of(name), name, doctest.DocTestParser())
