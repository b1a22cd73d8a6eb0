"""Updates are those of the authors' own code."""

from __future__ import annotations

import pytest
import torch

import marsopt
from tests.recordings import SHAPES, TABLE, check, read, walk

pytestmark = [
    pytest.mark.golden,
    pytest.mark.parametrize("case", TABLE["cases"]),
    pytest.mark.parametrize("source", ["copied", "whole"]),
]


@pytest.fixture
def golden(case, source):
    return read(case, source)


def test_through_the_class(golden):
    walk(golden)


def test_through_the_rules(golden):
    kw, ns_dtype = dict(golden["kw"]), golden["ns_dtype"]
    exact = golden.get("exact", False)
    if golden["kind"] == "MARS":
        kw |= {"is_approx": not exact, "ns_dtype": ns_dtype}
        if "lr" in kw:
            kw["base_lr"] = kw.pop("lr")
        sides = [(marsopt.mars(**kw), tuple(SHAPES))]
    else:
        name, own = golden["kind"], dict(weight_decay=kw["wd"], ns_dtype=ns_dtype)
        if name == "mars-m-efficient":
            name, own = "mars-m", own | dict(clip=None)
        matrix = marsopt.rule(name, **own)
        adamw = marsopt.rule(
            "adamw", betas=(0.9, 0.95), weight_decay=kw["wd"], epsilon_hat=True
        )
        sides = [(matrix, golden["matrix"]), (adamw, golden["adamw"])]
    params = golden["init"]
    states = [rule.init({n: params[n] for n in names}) for rule, names in sides]
    h = {n: torch.zeros_like(x) for n, x in params.items()}
    for t, lr in enumerate(golden["lrs"]):
        for i, (rule, names) in enumerate(sides):
            new, states[i] = rule.step(
                {n: params[n] for n in names},
                {n: golden["grad"][t][n] for n in names},
                states[i],
                lr=lr,
                reference=h if exact else None,
            )
            params = {**params, **new}
        if exact:
            h = golden["prev"][t]
        check(golden, t, params)
