"""Every public name has an example in the API reference, which runs and prints what it
says.
"""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import marsopt
import marsopt.parallel

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
NAMES = sorted(
    f"{module.__name__}.{name}"
    for module in (marsopt, marsopt.parallel)
    for name in module.__all__
)
# values, which have no docstring of their own: their examples are in the pages
VALUES = {"marsopt.LOCAL", "marsopt.REGISTRY", "marsopt.__version__"}


def object_of(name: str) -> object:
    module, _, own = name.rpartition(".")
    return getattr(import_module(module), own)


def run(text: str, name: str) -> int:
    """Run the examples of a text in names of their own; return how many there are."""
    names = {"marsopt": marsopt, "torch": torch}
    test = doctest.DocTestParser().get_doctest(text, names, name, name, 0)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
    return len(test.examples)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in VALUES])
def test_the_examples_of_a_public_name_run(name):
    known = object_of(name)
    assert run(known.__doc__, name) > 0
    for method in vars(known).values() if isinstance(known, type) else ():
        run(getattr(method, "__doc__", None) or "", name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page):
    text = page.read_text()
    assert run(text, page.name) == text.count("\n   >>> ")


def test_pages_know_every_public_name_and_rule():
    text = "".join(page.read_text() for page in PAGES)
    shown = re.findall(r"^\.\. auto\w+:: ([\w.]+)|^\.\. data:: (\w+)", text, re.M)
    known = {(code or data).rpartition(".")[2] for code, data in shown}
    assert {name.rpartition(".")[2] for name in NAMES} <= known
    rules = (ROOT / "docs" / "fidelity.md").read_text().partition("## The update")[0]
    rows = re.findall(r"^\| ([a-z, -]+) \|", rules, re.M)
    assert {*", ".join(rows).split(", ")} == {*marsopt.REGISTRY}


def test_values_have_an_example_in_a_page():
    text = "".join(page.read_text() for page in PAGES)
    for name in VALUES:
        _, _, about = text.partition(f".. data:: {name.rpartition('.')[2]}\n")
        assert ">>> " in about.partition("\n.. ")[0], name
