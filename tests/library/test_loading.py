"""A state dict is loaded as a whole, or refused by name with nothing changed."""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
from functools import partial
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._pytree import tree_map_only

from marsopt import MARS, REGISTRY
from marsopt.functional.routing import all_hyperparameters
from marsopt.rules.algorithm import GRADIENTS, MOMENTUM
from marsopt.rules.correction import H
from marsopt.rules.preconditioner import Preconditioner
from marsopt.rules.registry import BUILT_IN
from tests.stacking import equal, fill, parameters, run, same

SHAPES = {"w": (3, 4), "v": (4, 3), "b": (5,)}
PAGE = Path(__file__).parents[2] / "docs/api/optimizer.md"
COUNTS = {"step", "num_grads"}
SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "row_exp_avg_sq", "exp_avg_sq_in_basis"}


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


@functools.cache
def loaded_by(mars_type):
    """An optimizer that refuses all it is given, and its state dict."""
    optimizer = made(mars_type)
    return optimizer, copy.deepcopy(optimizer.state_dict())


def check_refused(mars_type, saved, message):
    """That loading is refused, and that the state is as before."""
    optimizer, before = loaded_by(mars_type)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    same(optimizer.state_dict(), before)


# ---- damage ------------------------------------------------------------------------


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


@hypothesis.settings(max_examples=150, derandomize=True, database=None, deadline=None)
@hypothesis.given(mars_type=st.sampled_from([*REGISTRY]), data=st.data())
def test_any_wrong_value_is_refused_by_name(mars_type, data):
    whole = saved_by(mars_type)
    saved = {**whole, "state": {i: dict(e) for i, e in whole["state"].items()}}
    number = data.draw(st.sampled_from(sorted(saved["state"])))
    entry = saved["state"][number]
    key = data.draw(st.sampled_from([k for k in sorted(entry) if entry[k].numel()]))
    entry[key] = data.draw(st.sampled_from(wrongs(key)))(entry[key])
    check_refused(mars_type, saved, f"'{list(SHAPES)[number]}'.*expected")


def without(key):
    def lose(saved):
        del saved["state"][0][key]

    return lose


def of_other_shapes(saved):
    saved["state"][0], saved["state"][1] = saved["state"][1], saved["state"][0]


def of_a_negative_rate(saved):
    saved["param_groups"][0]["lr"] = -1.0


def of_another_rule(saved):
    """Which has a moment that ours would start with; it lacks another."""
    saved |= copy.deepcopy(saved_by("soap"))
    del saved["state"][0]["exp_avg_sq_in_basis"]


def of_torch(kind, saved, **options):
    params = [nn.Parameter(torch.ones(s)) for s in SHAPES.values()]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    theirs = getattr(torch.optim, kind)(groups, lr=0.1, **options)
    fill(params, 0)
    theirs.step()
    saved |= theirs.state_dict()


def of_more_parameters(saved):
    saved |= made("mars-adamw", shapes=SHAPES | {"last": (2,)}).state_dict()


def of_more_groups(saved):
    for group in saved["param_groups"]:
        group["params"] = [0, 1, 2] if group is saved["param_groups"][0] else []
    saved["param_groups"] += copy.deepcopy(saved["param_groups"])


def of_a_model(saved):
    saved.clear()
    saved |= nn.Linear(2, 2).state_dict()


DAMAGE = {
    "a buffer is lost": (
        without("last_grad"),
        r"without \['last_grad'\] of parameter 'w'",
    ),
    "another rule's is lost": (of_another_rule, "exp_avg_sq_in_basis"),
    "shapes": (of_other_shapes, r"got exp_avg of shape \(4, 3\).*'w'"),
    "a rate": (of_a_negative_rate, "got lr=-1.0"),
    "SGD": (
        partial(of_torch, "SGD", momentum=0.9),
        "got the state of an optimizer with",
    ),
    "maximize": (
        partial(of_torch, "AdamW", maximize=True),
        "got the state of an optimizer with",
    ),
    "more parameters": (of_more_parameters, "of 2 parameters, expected 1|parameters"),
    "more groups": (of_more_groups, "group|parameters"),
    "a model": (of_a_model, r"of \['bias', 'weight'\], expected one of an optimizer"),
    "no state": (lambda saved: saved.pop("state"), "which has .* and 'state'"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_state_dict_changes_nothing(damage, message):
    saved = copy.deepcopy(saved_by("mars-adamw"))
    damage(saved)
    check_refused("mars-adamw", saved, message)


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


@pytest.mark.parametrize(
    ("saved", "into"),
    [
        (dict(mars_type="mars-adamw"), dict(mars_type="mars-lion")),
        (dict(mars_type="mars-lion"), dict(mars_type="mars-adamw")),
        (dict(amsgrad=True), dict(amsgrad=False)),
        (dict(mars_type="mars-m"), dict(mars_type="mars-m", clip=None)),
    ],
    ids=["wider", "narrower", "amsgrad", "clip"],
)
def test_a_state_dict_brings_its_structure_and_loses_nothing(saved, into):
    """Defect 6 of the authors: what the saved hyperparameters need is loaded, not made
    anew as zeros.
    """
    a, b = (parameters(*SHAPES.values()) for _ in range(2))
    optimizer = MARS(a, lr=0.01, compile=False, **saved)
    other = MARS(b, lr=0.5, compile=False, **into)
    run(optimizer, a, range(3))
    for p, q in zip(a, b, strict=True):
        q.data.copy_(p.data)
    other.load_state_dict(optimizer.state_dict())
    same(other.state_dict(), optimizer.state_dict())
    run(optimizer, a, range(3, 5))
    run(other, b, range(3, 5))
    equal(a, b)


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("schedule", [False, True])
def test_checkpoints_of_torch_are_loaded_in_silence(kind, schedule, caplog):
    """And a plain AdamW goes on as it would."""
    a, b = (parameters((3, 4), (4,)) for _ in range(2))
    options = dict(decoupled_weight_decay=True) if kind != "AdamW" else {}
    source = getattr(torch.optim, kind)(a, lr=0.01, **options)
    if schedule:
        OneCycleLR(source, 0.1, 10)
    run(source, a, range(3))
    for p, q in zip(a, b, strict=True):
        q.data.copy_(p.data)
    target = MARS(b, mars_type="adamw", compile=False)
    target.load_state_dict(source.state_dict())
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert target.param_groups[0]["maximize"] is False
    run(source, a, range(3, 6))
    run(target, b, range(3, 6))
    assert all(map(partial(torch.allclose, atol=1e-7), a, b))


def test_state_of_a_frozen_parameter_keeps_its_dtype():
    a, b = (parameters((3, 3), (2, 2), dtype=torch.bfloat16) for _ in range(2))
    kw = dict(lr=0.01, state_dtype=torch.float32, compile=False)
    optimizer = MARS(a, **kw)
    run(optimizer, a, range(2))
    b[1].requires_grad_(False)
    other = MARS(b, **kw)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[b[1]]["exp_avg"].dtype == torch.float32
    assert torch.equal(other.state[b[1]]["exp_avg"], optimizer.state[a[1]]["exp_avg"])


def test_state_that_is_wider_is_rounded_to_nearest():
    a, b = (parameters(*SHAPES.values()) for _ in range(2))
    wide = MARS(a, lr=0.01, compile=False)
    run(wide, a, [0])
    own = dict(state_dtype=torch.bfloat16, stochastic_rounding=True, compile=False)
    narrow = MARS(b, lr=0.01, **own)
    narrow.load_state_dict(wide.state_dict())
    for p, q in zip(a, b, strict=True):
        m = wide.state[p]["exp_avg"].to(torch.bfloat16)
        assert torch.equal(narrow.state[q]["exp_avg"], m)
        assert narrow.state[q]["exp_avg"].dtype == torch.bfloat16


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
    groups = [saved_by(name)["param_groups"] for name in REGISTRY]
    keys = {key for several in groups for group in several for key in group}
    further = keys - {*all_hyperparameters(), "params"}
    defaults = made("mars-adamw").defaults.keys()
    page = PAGE.read_text().split("A param group holds")[1].split("##")[0]
    assert further - defaults | {"lr_ratio"} == set(
        re.findall(r"^\| `(\w+)` ", page, re.MULTILINE)
    )
