"""A run goes on from what was saved, to the bit: every kind of state by a file, and a
few kinds by every tool.
"""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

import marsopt
from marsopt import REGISTRY
from tests.stacking import build, check_storages, forced, run_protocol, same
from train.runs.safe_dcp import load

WHAT = {name: dict(mars_type=name) for name in REGISTRY} | {
    "amsgrad": dict(amsgrad=True),
    "exact": dict(correction="exact", max_norm=0.5),
    "exact matrices": dict(mars_type="mars-m", correction="exact"),
    "one buffer": dict(mars_type="mars-lion", clip=None),
    "log_time": dict(mars_type="moonlight", log_time=3.0),
    "soap, log_time": dict(mars_type="soap", log_time=3.0, precondition_frequency=2),
    "rounded": dict(state_dtype=torch.bfloat16, stochastic_rounding=True),
    "wider": dict(state_dtype=torch.float64, h_dtype=torch.bfloat16),
    "half": dict(state_dtype=torch.float32),
    "master 32": dict(mars_type="mars-m", master_weight_bits=32),
    "master 24": dict(mars_type="moonlight", master_weight_bits=24),
    "a tensor": dict(lr=torch.tensor(0.01)),
}


def fresh(what, mode="eager", seed=0, **own):
    """(model, optimizer) before the first step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 6))
    model = model.bfloat16() if what.startswith(("half", "master")) else model
    options = dict(lr=0.01, ns_dtype=torch.float32) | WHAT[what] | own
    return model, build(model.named_parameters(), mode, **options)


def train(pair, seeds):
    run_protocol(pair[1], list(pair[0].parameters()), seeds)


def check_same(one, two):
    """Parameters, state and groups of (model, optimizer) pairs, bit for bit."""
    parameters = (dict(pair[0].named_parameters()) for pair in (one, two))
    torch.testing.assert_close(*parameters, rtol=0, atol=0)
    same(*(pair[1].state_dict() for pair in (one, two)))


def by_a_file(source, target, folder):
    torch.save([each.state_dict() for each in source], folder / "state")
    found = torch.load(folder / "state", weights_only=True)
    for each, saved in zip(target, found, strict=True):
        each.load_state_dict(saved)
    return target


def by_dcp(source, target, folder):
    def states(pair):
        return {str(i): each.state_dict() for i, each in enumerate(pair)}

    dcp.save(states(source), checkpoint_id=folder, no_dist=True)
    found = states(target)
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    for i, each in enumerate(target):
        each.load_state_dict(found[str(i)])
    return target


TOOLS = {
    "file": by_a_file,
    "deepcopy": lambda source, target, folder: copy.deepcopy(source),
    "pickle": lambda source, target, folder: pickle.loads(pickle.dumps(source)),
    "dcp": by_dcp,
}
CELLS = [("file", what, "eager") for what in WHAT]
CELLS += [
    (tool, what, "eager")
    for tool in TOOLS
    for what in ("mars-soap", "exact", "master 24")
]
CELLS += [("file", what, "flat") for what in ("mars-adamw", "mars-m", "mars-soap")]
# structure that the target had otherwise, and the state dict brings
OTHERS = {
    "mars-adamw": dict(mars_type="mars-lion"),
    "mars-lion": dict(mars_type="mars-adamw"),
    "amsgrad": dict(amsgrad=False),
    "mars-m": dict(clip=None),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("tool", "what", "mode"), dict.fromkeys(CELLS))
def test_a_run_goes_on_to_the_bit(tool, what, mode, tmp_path, monkeypatch):
    """In an optimizer of other values, which may have gone astray, or of another
    structure (defect 6 of the authors: zeros in place of what the saved one needs).
    """
    forced(monkeypatch, mode)
    others = dict(lr=0.5, eps=1e-3) | OTHERS.get(what, {})
    source, target = fresh(what, mode), fresh(what, mode, seed=1, **others)
    train(source, range(2))
    for number in "12":
        if number == "2":
            train(target, [7])
        (tmp_path / number).mkdir()
        target = TOOLS[tool](source, target, tmp_path / number)
        check_same(source, target)
    for pair in (source, target):
        train(pair, range(2, 4))
    check_same(source, target)
    entries = target[1].state.values()
    check_storages([*target[0].parameters(), *(t for e in entries for t in e.values())])


def test_a_copy_is_apart():
    pair = fresh("mars-adamw")
    train(pair, range(2))
    twin = copy.deepcopy(pair)
    before = copy.deepcopy(twin)
    train(pair, [2])
    check_same(twin, before)
    public = [{n for n in vars(o) if n[0] != "_"} for o in (pair[1], twin[1])]
    assert public[0] == public[1] >= {"defaults", "state", "param_groups"}


# ---- the functional rule's state -----------------------------------------------------


def equal_trees(a, b):
    (mine, shape), (theirs, other) = tree_flatten(a), tree_flatten(b)
    return shape == other and all(map(torch.equal, mine, theirs))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True], ids=["dict", "flat"])
@pytest.mark.parametrize(
    "make", [marsopt.mars, partial(marsopt.rule, "mars-adamw")], ids=["two", "one"]
)
def test_functional_state_is_saved(make, flat, tmp_path):
    """By torch.load as it is, and by DCP: as one value, in the place of one (which DCP
    takes to pieces), or as its tensors.
    """
    x = {n: torch.randn(s) for n, s in {"a": (4, 3), "b": (4, 3), "c": (3,)}.items()}
    first = marsopt.FlatGroup.pack(x) if flat else x
    rule = make(max_norm=1.0)
    params, state = rule.step(first, first, rule.init(first), lr=0.01)
    both = {"params": params, "state": state}
    file = io.BytesIO()
    torch.save(both, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert equal_trees(found, both)
    want = rule.step(params, params, state, lr=0.01)
    got = rule.step(found["params"], found["params"], found["state"], lr=0.01)
    assert equal_trees(got, want)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    dcp.save({"state": state}, checkpoint_id=whole, no_dist=True)
    for read in (partial(dcp.load, checkpoint_id=whole), partial(load, path=whole)):
        found = {"state": rule.init(first)}
        read(found, no_dist=True)
        assert equal_trees(found["state"], state)
    dcp.save({"leaves": tree_leaves(both)}, checkpoint_id=parts, no_dist=True)
    again = {"params": tree_map(torch.clone, first), "state": rule.init(first)}
    dcp.load({"leaves": tree_leaves(again)}, checkpoint_id=parts, no_dist=True)
    assert equal_trees(again, both)
