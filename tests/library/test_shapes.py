"""Shapes that annotations state are those that functions see, in eager steps.

The library needs no jaxtyping to run: its annotations are strings, and types here.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
import typing

import pytest
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import TypeCheckError, jaxtyped
from torch import nn

from marsopt import MARS
from marsopt.rules import component, mars, newton_schulz, soap
from marsopt.step import decide

MODULES = (newton_schulz, soap, component, mars, decide)
SHAPES = [(24, 4), (4, 24), (5, 5), (3, 4, 6), (7,)]
RULES = ["mars-adamw", "mars-shampoo", "mars-m", "mars-normuon", "mars-soap"]
OPTIONS = {
    "mars-soap": [dict(precondition_frequency=2), dict(sides="short")],
}


def names_for_types(module):
    """Return what a module calls types where only type checkers look."""
    (block,) = [
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    every = dict(vars(module))
    exec(compile(ast.Module(block.body, []), module.__file__, "exec"), every)
    return every


def checked(function, annotated):
    """Return a function that checks what it is given, and returns, by the annotations
    of one, which are strings.
    """
    own = types.FunctionType(
        function.__code__, function.__globals__, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    own.__kwdefaults__ = function.__kwdefaults__
    names = names_for_types(sys.modules[annotated.__module__])
    own.__annotations__ = typing.get_type_hints(annotated, names)
    conf = BeartypeConf(is_pep484_tower=True)  # an int is a float
    return jaxtyped(typechecker=beartype(conf=conf))(own)


def shaped():
    """Return all (owner, function) whose annotations state a shape."""
    found = []
    for module in MODULES:
        new = names_for_types(module).keys() - vars(module).keys()
        classes = [
            c for c in vars(module).values()
            if isinstance(c, type) and c.__module__ == module.__name__
        ]  # fmt: skip
        for owner in (module, *classes):
            for it in vars(owner).values():
                if not isinstance(it, types.FunctionType):
                    continue
                if it.__module__ != module.__name__:
                    continue
                stated = " ".join(map(str, it.__annotations__.values()))
                if new & set(re.findall(r"\w+", stated)):
                    found.append((owner, it))
    return found


EVERY = shaped()  # before a test checks them


@pytest.fixture
def met(monkeypatch):
    """Check all shapes; the names of the functions that were called."""
    called = set()
    for owner, function in EVERY:
        inner = checked(function, function)

        def outer(*args, inner=inner, **kw):
            called.add(inner.__qualname__)
            return inner(*args, **kw)

        inner.__qualname__ = function.__qualname__
        places = [owner]
        if isinstance(owner, types.ModuleType):  # and who has imported it
            places = [m for n, m in sys.modules.items() if n.startswith("marsopt")]
        for place in places:
            if vars(place).get(function.__name__) is function:
                monkeypatch.setattr(place, function.__name__, outer)
    return called


def steps(rule, **options):
    torch.manual_seed(0)
    shapes = SHAPES if rule == "mars-adamw" else SHAPES[:4]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = MARS(
        params, mars_type=rule, lr=0.01, lr_1d=0.01, max_norm=1.0, matrices="batched",
        compile=False, **options,
    )  # fmt: skip
    for t in range(4):
        for p in params:
            p.grad = torch.randn_like(p)
        if t == 2:
            params[0].grad = None
        optimizer.step()
    return params


CASES = [(r, o) for r in RULES for o in ({}, *OPTIONS.get(r, []))]


def test_steps_have_the_shapes_that_are_stated(met):
    """And every function that states one was called."""
    for rule, options in CASES:
        assert all(torch.isfinite(p).all() for p in steps(rule, **options)), rule
    assert met == {function.__qualname__ for _, function in EVERY}
    assert len(met) >= 12


GRAM = soap.gram_matrix  # before a test checks it


def of_rows(x):
    return x @ x.mT


def test_a_wrong_shape_is_an_error(met):
    with pytest.raises(TypeCheckError):
        soap.gram_matrix(torch.ones(3))
    right = torch.ones(4, 3)
    assert soap.gram_matrix(right).shape == (3, 3)
    with pytest.raises(TypeCheckError):
        checked(of_rows, GRAM)(right)
