"""A state dict is loaded as a whole, or refused by name with nothing changed."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from marsopt import MARS, REGISTRY, SOAP, Approximate, Exact
from marsopt.functional.authors import all_options
from marsopt.optim.state_dict import STAGE_COUNT
from marsopt.rules.component import MOMENTUM, H, Preconditioner
from marsopt.rules.formats import LOW_BITS
from marsopt.rules.registry import RULES
from tests.stacking import parameters, run, same

SHAPES = {"w": (3, 4), "v": (4, 3), "b": (5,)}
PAGE = Path(__file__).parents[2] / "docs/api/optimizer.md"


def made(mars_type, seed=0, shapes=SHAPES, **options):
    torch.manual_seed(seed)
    params = {name: nn.Parameter(torch.randn(s)) for name, s in shapes.items()}
    options = dict(amsgrad=mars_type == "adamw", compile=False) | options
    optimizer = MARS(params.items(), lr=0.01, mars_type=mars_type, **options)
    run(optimizer, list(params.values()), range(2))
    return optimizer


@functools.cache
def saved_by(mars_type):
    return copy.deepcopy(made(mars_type, seed=1).state_dict())


# ---- damage --------------------------------------------------------------------------


def of_other_shapes(saved):
    saved["state"][0], saved["state"][1] = saved["state"][1], saved["state"][0]


def of_another_rule(saved):
    """Which has a moment that ours would start with; it lacks another."""
    saved |= copy.deepcopy(saved_by("soap"))
    del saved["state"][0]["exp_avg_sq_in_basis"]


def of_more_parameters(saved):
    saved |= made("mars-adamw", shapes=SHAPES | {"last": (2,)}).state_dict()


def of_a_model(saved):
    saved.clear()
    saved |= nn.Linear(2, 2).state_dict()


DAMAGE = {
    "a buffer is lost": (
        lambda saved: saved["state"][0].pop("last_grad"),
        r"without \['last_grad'\] of parameter 'w'",
    ),
    "another rule's is lost": (of_another_rule, "exp_avg_sq_in_basis"),
    "shapes": (of_other_shapes, r"got exp_avg of shape \(4, 3\).*'w'"),
    "a rate": (lambda s: s["param_groups"][0].update(lr=-1.0), "got lr=-1.0"),
    "more parameters": (of_more_parameters, "of 2 parameters, expected 1|parameters"),
    "more groups": (
        lambda saved: saved["param_groups"].append({**saved["param_groups"][0]}),
        "group|parameters",
    ),
    "a model": (of_a_model, r"of \['bias', 'weight'\], expected one of an optimizer"),
    "no state": (lambda saved: saved.pop("state"), "which has .* and 'state'"),
}


def a_value(change):
    def damage(saved):
        entry = saved["state"][1]
        for key in ("exp_avg", "step"):
            entry[key] = change(entry[key])

    return damage


DAMAGE |= {
    name: (a_value(change), "'v'.*expected")
    for name, change in {
        "bool": torch.Tensor.bool,
        "complex": lambda t: t.to(torch.complex64),
        "another dim": lambda t: t[None],
        "a list": lambda t: [t.tolist()],
        "None": lambda t: None,
        "a dict": lambda t: {"values": t},
    }.items()
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_state_dict_changes_nothing(damage, message):
    saved = copy.deepcopy(saved_by("mars-adamw"))
    damage(saved)
    optimizer = made("mars-adamw")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    same(optimizer.state_dict(), before)


# ---- what is taken -----------------------------------------------------------------


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_whatever_loses_nothing_is_taken(mars_type):
    """Floats of another size, which the state holds; whole steps of any type; options
    that an older version had not. The given dict stays as it is.
    """
    whole = saved_by(mars_type)
    for dtype in (torch.bfloat16, torch.float64):
        saved = copy.deepcopy(whole)
        saved["state"] = tree_map_only(
            torch.Tensor, lambda t, d=dtype: t.to(d), saved["state"]
        )
        for number, step in enumerate((2, 2.0, torch.tensor(2))):
            saved["state"][number]["step"] = step
        for group in saved["param_groups"]:
            for key in ("betas", "log_time", "epsilon_hat", "amsgrad"):
                group.pop(key, None)
        given, optimizer = copy.deepcopy(saved), made(mars_type)
        keys = [set(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(given)
        same(given, saved)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        run(optimizer, params, [2])
        same(given, saved)
        assert [float(optimizer.state[p]["step"]) for p in params] == [3, 3, 3]
        assert [set(group) for group in optimizer.param_groups] == keys


def test_state_is_rounded_to_its_dtype_and_of_a_frozen_parameter_too():
    a, b = (parameters(*SHAPES.values()) for _ in range(2))
    wide = MARS(a, lr=0.01, compile=False)
    run(wide, a, [0])
    b[1].requires_grad_(False)
    own = dict(state_dtype=torch.bfloat16, stochastic_rounding=True, compile=False)
    narrow = MARS(b, lr=0.01, **own)
    narrow.load_state_dict(wide.state_dict())
    for p, q in zip(a, b, strict=True):
        m = wide.state[p]["exp_avg"].bfloat16()
        torch.testing.assert_close(narrow.state[q]["exp_avg"], m, rtol=0, atol=0)


def test_names_come_with_the_state_dict():
    first = made("mars-adamw")
    plain = MARS(parameters(*SHAPES.values()), compile=False)
    without_names = copy.deepcopy(plain.state_dict())
    plain.load_state_dict(first.state_dict())
    first.load_state_dict(without_names)
    for optimizer in (plain, first):
        names = [n for group in optimizer.param_groups for n in group["param_names"]]
        assert names == list(SHAPES)


# ---- the page ----------------------------------------------------------------------


def documented():
    """The rows of the table of state keys: {key: (dtype, component, home)}."""
    table = PAGE.read_text().split("## State keys")[1].split("\nA param group")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|(.*)\|(.*)\|(.*)\|$", table, re.MULTILINE)
    return {key: tuple(map(str.strip, cells)) for key, *cells in rows}


def test_the_page_has_all_state_keys():
    """The table's dtypes, components and homes are those of the declared buffers."""
    preconditioners = {SOAP, *(row.preconditioner for row in RULES)}
    kept, kinds = {}, {*preconditioners, Approximate, Exact}
    rules = {kind.__name__ for kind in preconditioners}
    for kind in kinds:
        keeps = kind.keeps if issubclass(kind, Preconditioner) else {"h": H}
        for buffer in keeps.values():
            _, names = kept.setdefault(buffer.key, (buffer, []))
            names.append(kind.__name__)
    rows = documented()
    assert set(rows) == {"step", STAGE_COUNT, MOMENTUM, *LOW_BITS, *kept}
    for key, (buffer, names) in kept.items():
        dtype, component, home = rows[key]
        assert dtype == str(buffer.dtype).removeprefix("torch."), key
        assert home == buffer.home, key
        listed = set(re.findall(r"\b[A-Z]\w+", component))
        if component.startswith("all rules but "):
            listed = rules - listed
        assert listed == set(names), key


def test_the_page_has_all_keys_of_a_group():
    """Keys beside hyperparameters, and the ratios, which no argument gives."""
    groups = [saved_by(name)["param_groups"] for name in REGISTRY]
    keys = {key for several in groups for group in several for key in group}
    further = keys - {*all_options(), "params"}
    defaults = made("mars-adamw").defaults.keys()
    page = PAGE.read_text().split("A param group holds")[1].split("##")[0]
    assert further - defaults | {"lr_ratio", "lr_1d_ratio"} == set(
        re.findall(r"^\| `(\w+)` ", page, re.MULTILINE)
    )
