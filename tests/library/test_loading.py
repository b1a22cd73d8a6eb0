"""A state dict is loaded as a whole, or refused by name with nothing changed."""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map_only

from marsopt import MARS, REGISTRY
from marsopt.functional.routing import all_hyperparameters
from marsopt.rules.algorithm import GRADIENTS, MOMENTUM
from marsopt.rules.correction import H
from marsopt.rules.preconditioner import Preconditioner
from marsopt.rules.registry import BUILT_IN

SHAPES = {"w": (3, 4), "v": (4, 3), "b": (5,)}
PAGE = Path(__file__).parents[2] / "docs/api/optimizer.md"
COUNTS = {"step", "num_grads"}
SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "row_exp_avg_sq", "exp_avg_sq_in_basis"}


def made(mars_type, correction=None, seed=0):
    torch.manual_seed(seed)
    params = {name: nn.Parameter(torch.randn(s)) for name, s in SHAPES.items()}
    optimizer = MARS(
        params.items(), lr=0.01, mars_type=mars_type, correction=correction,
        amsgrad=mars_type == "adamw", compile=False,
    )  # fmt: skip
    for _ in range(2):
        for p in params.values():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


@functools.cache
def saved_by(mars_type, correction):
    return copy.deepcopy(made(mars_type, correction, seed=1).state_dict())


@functools.cache
def loaded_by(mars_type, correction):
    """An optimizer that refuses all it is given, and its state dict."""
    optimizer = made(mars_type, correction)
    return optimizer, copy.deepcopy(optimizer.state_dict())


def one_entry(value):
    """Put a value into the last entry of a tensor."""

    def write(tensor):
        changed = tensor.clone()
        changed.reshape(-1)[-1] = value
        return changed

    return write


ANYWHERE = [
    *map(one_entry, (math.nan, math.inf, -math.inf)),
    *(lambda t, d=d: t.to(d) for d in (torch.bool, torch.complex64)),
    lambda t: t[None],
    lambda t: t.expand(2, *t.shape),
    lambda t: [t.tolist()],
    lambda t: None,
    lambda t: {"values": t},
    lambda t: {},
]
NOT_STEPS = [*(lambda t, d=d: t.to(d) for d in (torch.int64, torch.uint8))]
SQUARE = [one_entry(-1.0), one_entry(-1e-30), lambda t: -torch.ones_like(t)]
STEP = [
    *(lambda t, v=v: v for v in (-1, math.nan, 3 + 1j)),
    *(lambda t, v=v: torch.tensor(v) for v in (-5, -1.0)),
]


def wrongs(key):
    """The ways in which a value of a key may be wrong."""
    kinds = ANYWHERE + (STEP if key == "step" else NOT_STEPS)
    return kinds + (SQUARE if key in SQUARES | COUNTS else [])


rules = st.sampled_from([(name, None) for name in REGISTRY])


def check_refused(rule, saved, label):
    """That loading is refused by name, and that the state is as before."""
    optimizer, before = loaded_by(*rule)
    with pytest.raises(ValueError, match="expected") as refused:
        optimizer.load_state_dict(saved)
    assert label in str(refused.value)
    after = optimizer.state_dict()
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert after["param_groups"] == before["param_groups"]


@hypothesis.settings(max_examples=200, derandomize=True, database=None, deadline=None)
@hypothesis.given(rule=rules, data=st.data())
def test_any_wrong_value_is_refused_by_name(rule, data):
    whole = saved_by(*rule)
    saved = {**whole, "state": {i: dict(e) for i, e in whole["state"].items()}}
    number = data.draw(st.sampled_from(sorted(saved["state"])))
    entry = saved["state"][number]
    key = data.draw(st.sampled_from([k for k in sorted(entry) if entry[k].numel()]))
    entry[key] = data.draw(st.sampled_from(wrongs(key)))(entry[key])
    check_refused(rule, saved, f"'{list(SHAPES)[number]}'")


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_whatever_loses_nothing_is_taken(mars_type):
    """Floats of another size, which the state holds; whole steps of any type."""
    whole = saved_by(mars_type, None)
    for dtype in (torch.bfloat16, torch.float64):
        saved = copy.deepcopy(whole)
        saved["state"] = tree_map_only(
            torch.Tensor, lambda t, d=dtype: t.to(d), saved["state"]
        )
        for number, step in enumerate((2, 2.0, torch.tensor(2))):
            saved["state"][number]["step"] = step
        optimizer = made(mars_type)
        optimizer.load_state_dict(saved)
        for p in optimizer.param_groups[0]["params"]:
            assert float(optimizer.state[p]["step"]) == 2


@pytest.mark.parametrize("mars_type", ["mars-adamw", "soap"])
def test_hooks_may_wrap_a_state_dict_and_unwrap_it(mars_type):
    optimizer, other = made(mars_type), made(mars_type, seed=1)
    optimizer.register_state_dict_post_hook(lambda _, saved: {"optimizer": saved})
    other.register_load_state_dict_pre_hook(lambda _, saved: saved["optimizer"])
    other.load_state_dict(optimizer.state_dict())
    want = optimizer.state_dict()["optimizer"]["state"]
    torch.testing.assert_close(other.state_dict()["state"], want, rtol=0, atol=0)


def test_one_line_says_what_a_load_did(caplog):
    saved = copy.deepcopy(saved_by("moonlight", None))
    del saved["state"][2]
    optimizer = made("moonlight")
    caplog.clear()
    optimizer.load_state_dict(saved)
    line = caplog.records[-1]
    assert line.levelno == logging.INFO
    assert line.getMessage() == (
        "marsopt: load_state_dict restored 4 tensors, and restarted 3"
    )


def documented():
    """The rows of the table of state keys: {key: (dtype, component, home)}."""
    table = PAGE.read_text().split("## State keys")[1].split("\nA param group")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|(.*)\|(.*)\|(.*)\|$", table, re.MULTILINE)
    return {key: tuple(map(str.strip, cells)) for key, *cells in rows}


def test_the_page_has_all_state_keys():
    """The table's dtypes, components and homes are those of the declared buffers."""
    kept, kinds = {}, BUILT_IN - {type(None)}
    rules = {k.__name__ for k in kinds if issubclass(k, Preconditioner)}
    for kind in kinds:
        keeps = kind.keeps if issubclass(kind, Preconditioner) else {"h": H}
        for buffer in keeps.values():
            _, names = kept.setdefault(buffer.key, (buffer, []))
            names.append(kind.__name__)
    rows = documented()
    assert set(rows) == {"step", MOMENTUM, GRADIENTS, *kept}
    for key, (buffer, names) in kept.items():
        dtype, component, home = rows[key]
        assert dtype == str(buffer.dtype).removeprefix("torch."), key
        assert home == buffer.home, key
        listed = set(re.findall(r"\b[A-Z]\w+", component))
        if component.startswith("all rules but "):
            listed = rules - listed
        assert listed == set(names), key


def test_the_page_has_all_keys_of_a_group():
    """Keys beside hyperparameters, and ``lr_ratio``, which no argument gives."""
    groups = [saved_by(name, None)["param_groups"] for name in REGISTRY]
    keys = {key for several in groups for group in several for key in group}
    further = keys - {*all_hyperparameters(), "params"}
    defaults = made("mars-adamw").defaults.keys()
    page = PAGE.read_text().split("A param group holds")[1].split("##")[0]
    assert further - defaults | {"lr_ratio"} == set(
        re.findall(r"^\| `(\w+)` ", page, re.MULTILINE)
    )
