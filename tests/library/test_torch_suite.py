"""What torch's own suite asks of every optimizer (its test/test_optim.py, over
torch/testing/_internal/common_optimizers.py), asked of every ``mars_type``.

Left out: what MARS has no option for (foreach, fused, maximize, capturable,
differentiable, and with it second order), what needs several devices, and peak memory,
which is measured on a GPU. Compiled steps run eagerly over their stacks, but where the
name says otherwise.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from marsopt import MARS, REGISTRY, SOAP
from tests.stacking import build, copies, equal, fill, parameters, run, same, traced

LR = 0.01
SHAPES = ((6, 4), (4,), (6, 4), (4,))

# every rule as it is compiled; where tensors move is nothing that rules differ in, so
# that one of elements, one of matrices and one with factors stand for all eagerly
CELLS = [(mars_type, "flat") for mars_type in REGISTRY]
CELLS += [(mars_type, "eager") for mars_type in ("mars-adamw", "mars-m", "mars-soap")]
every_type = pytest.mark.parametrize(("mars_type", "mode"), CELLS, indirect=["mode"])


# what lives with the owners of whole matrices (test_soap.py)
# kept by owners of matrices
COUNTS = "step", "stage_count"
FACTORS = {buffer.key for buffer in SOAP.keeps.values()} | {"row_exp_avg_sq"}


@pytest.fixture
def made(mode):
    """(optimizer, params) after two steps."""
    params = parameters(*SHAPES)
    optimizer = build(params, mode, lr=LR)
    run(optimizer, params, range(2))
    return optimizer, params


# ---- no gradient -------------------------------------------------------------------


@every_type
def test_a_step_without_gradients_is_no_step(mars_type, mode):
    params = parameters(*SHAPES)
    kw = dict(mars_type=mars_type, weight_decay=0.1)
    optimizer = build(params, mode, lr=LR, **kw)
    run(optimizer, params, range(2))
    optimizer.zero_grad()
    before, state = copies(params), copy.deepcopy(optimizer.state_dict())
    with traced():
        optimizer.step()
    equal(params, before)
    found = optimizer.state_dict()
    # of a rank that has no gradient others may have one: all count the call
    for entry in (*found["state"].values(), *state["state"].values()):
        entry.pop("stage_count", None)
    same(found, state)


# ---- groups and rates --------------------------------------------------------------


@every_type
def test_groups_are_optimizers_of_their_own(mars_type, mode):
    """Whatever their numbers are, and whether their decays grow."""
    kw = dict(mars_type=mars_type, ns_dtype=torch.float64, weight_decay=0.1)
    # square, since rounding decides the eigenvectors of a factor without full rank
    shapes = (4, 4), (4,), (4, 4), (4,)
    params, others = (parameters(*shapes, dtype=torch.float64) for _ in range(2))
    own = [
        dict(lr=0.1 / d, betas=(1 - 1 / d, 1 - 0.9 / d), log_time=log_time)
        for d, log_time in ((3.0, None), (10.0, 4.0), (30.0, 30.0), (4.0, None))
    ]
    groups = [{"params": [p], **o} for p, o in zip(params, own, strict=True)]
    together = build(groups, mode, **kw)
    apart = [
        build([{"params": [p], **o}], "eager", **kw)
        for p, o in zip(others, own, strict=True)
    ]
    run(together, params, range(3))
    for optimizer in apart:
        for seed in range(3):
            fill(others, seed)
            optimizer.step()
    equal(params, others, 1e-6)


def test_defaults_are_those_of_the_constructor_and_fill_new_groups(made):
    optimizer, _ = made
    assert optimizer.defaults["lr"] == LR
    assert optimizer.defaults["betas"] == (0.95, 0.99)
    assert optimizer.defaults["mars_type"] == "mars-adamw"
    assert all(set(optimizer.defaults) <= set(g) for g in optimizer.param_groups)
    optimizer.defaults["weight_decay"] = 0.25
    optimizer.add_param_group({"params": parameters((2, 2))})
    assert optimizer.param_groups[-1]["weight_decay"] == 0.25


@every_type
def test_dtypes_may_be_mixed(mars_type, mode):
    """State has the dtype of its parameter, float32 for float16, and the steps are
    those of each alone.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    kw = dict(lr=LR, mars_type=mars_type, ns_dtype=torch.float32)
    params, others = (
        [
            p
            for i, d in enumerate(dtypes)
            for p in parameters((4, 3), (3,), seed=i, dtype=d)
        ]
        for _ in range(2)
    )
    optimizer, apart = (
        build(params, mode, **kw),
        [build([p], "eager", **kw) for p in others],
    )
    with traced():
        for seed in range(2):
            fill(params, seed)
            fill(others, seed)
            for each in (optimizer, *apart):
                each.step()
    for p, q in zip(params, others, strict=True):
        own = torch.float32 if p.dtype == torch.float16 else p.dtype
        for key, value in optimizer.state[p].items():
            if key not in FACTORS:
                assert value.dtype == (torch.float32 if key in COUNTS else own)
        torch.testing.assert_close(p, q)


# ---- hooks and closures ------------------------------------------------------------


def test_hooks_run_in_torchs_order_and_change_what_they_are_given(made):
    optimizer, params = made
    order = []

    def note(label, returned=None):
        def hook(mine, *args):
            assert mine is optimizer
            order.append((label, float(mine.state[params[0]]["step"])))
            return returned

        return hook

    handles = [
        register_optimizer_step_pre_hook(note("all, before")),
        optimizer.register_step_pre_hook(
            note("before", ((optimizer, lambda: 7.0), {}))
        ),
        optimizer.register_step_post_hook(note("after")),
        register_optimizer_step_post_hook(note("all, after")),
    ]
    fill(params, 2)
    try:
        with traced():
            assert optimizer.step() == 7.0
    finally:
        for handle in handles:
            handle.remove()
    before = [("all, before", 2.0), ("before", 2.0)]
    assert order == [*before, ("after", 3.0), ("all, after", 3.0)]
    optimizer.register_state_dict_pre_hook(note("save"))
    optimizer.register_state_dict_post_hook(note("saved", {"mine": 2}))
    assert optimizer.state_dict() == {"mine": 2}
    assert [label for label, _ in order[4:]] == ["save", "saved"]


def test_a_closure_has_gradients_and_its_loss_is_returned(made):
    optimizer, params = made

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    with torch.no_grad(), traced():
        assert optimizer.step(closure).requires_grad


def test_hooks_before_loading_may_replace_what_is_loaded(made, mode):
    """... in their order; one that is prepended comes first."""
    optimizer, params = made
    others = parameters(*SHAPES)
    other, order = build(others, mode, lr=0.5), []

    def rate(lr):
        def hook(mine, saved):
            order.append(lr)
            groups = [{**group, "lr": lr} for group in saved["param_groups"]]
            return {**saved, "param_groups": groups}

        return hook

    other.register_load_state_dict_pre_hook(rate(0.1))
    other.register_load_state_dict_pre_hook(rate(0.2), prepend=True)
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    assert order == [0.2, 0.1]
    assert other.param_groups[0]["lr"] == 0.1
    assert saved["param_groups"][0]["lr"] == LR
    torch.testing.assert_close(other.state_dict()["state"], saved["state"])


# ---- bad input ---------------------------------------------------------------------


def errors():
    """What torch lists for all optimizers, and for Adam and Muon."""
    (p, q), base = parameters((2, 2), (2, 2)), torch.zeros(8)
    complex_ = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    return {
        "a tensor": (p, {}, TypeError, "iterable of Tensors or dicts"),
        "a module": (nn.Linear(2, 2), {}, TypeError, "got a module .*pass its .param"),
        "modules": ([nn.Linear(2, 2)], {}, TypeError, "got a module .*pass its .param"),
        "a module in a group": (
            [{"params": nn.Linear(2, 2)}], {}, TypeError, "got a module .*pass its .p",
        ),
        "meta": ([nn.Parameter(p.to("meta"))], {}, ValueError, "to_empty"),
        "a set in a group": (
            [{"params": {p, q}}], {}, TypeError, "ordered collections",
        ),
        "no tensors": ([1.0], {}, TypeError, "can only optimize Tensors"),
        "nothing": ([], {}, ValueError, "empty parameter list"),
        "no leaf": ([p * 2], {}, ValueError, "non-leaf"),
        "complex": ([complex_], {}, ValueError, "view_as_real"),
        "a group without params": ([{"lr": 0.1}], {}, ValueError, "params"),
        "some names": ([("weight", p), q], {}, ValueError, "param names are missing"),
        "names in one group": (
            [{"params": [p]}, {"params": [("weight", q)]}],
            {}, ValueError, "with/without names",
        ),
        "lr < 0": ([p], dict(lr=-0.1), ValueError, "got lr=-0.1"),
        "beta1": ([p], dict(betas=(1.0, 0.0)), ValueError, r"betas\[0\]=1.0"),
        "beta2": ([p], dict(betas=(0.9, -0.1)), ValueError, r"betas\[1\]=-0.1"),
        "weight_decay": ([p], dict(weight_decay=-1), ValueError, "weight_decay=-1"),
        "eps": ([p], dict(eps=-1e-8), ValueError, "got eps=-1e-08"),
        "a rate of a group": (
            [{"params": [p], "lr": -0.5}], {}, ValueError, "got lr=-0.5",
        ),
        "clip": ([p], dict(clip=-1.0), ValueError, "got clip=-1.0"),
        "max_norm": ([p], dict(max_norm=0.0), ValueError, "got max_norm=0.0"),
        "nonfinite": ([p], dict(nonfinite="ignore"), ValueError, "got nonfinite='ign"),
        "compile": ([p], dict(compile="yes"), ValueError, "got compile='yes'"),
        "collectives": ([p], dict(collectives=None), ValueError, "got collectives=No"),
        "state_dtype": (
            [p], dict(state_dtype=torch.int64), ValueError, "got state_dtype=torch.int",
        ),
        "narrow moments": (
            [p], dict(state_dtype=torch.bfloat16), ValueError, "nothing narrower than",
        ),
        "the same memory": (
            [nn.Parameter(base[:5]), nn.Parameter(base[4:])],
            {}, ValueError, "in the same memory",
        ),
        "the same tensor": (
            [nn.Parameter(base), nn.Parameter(base)], {}, ValueError, "same memory",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", errors())
def test_bad_input_is_an_error(name):
    params, kwargs, kind, message = errors()[name]
    with pytest.raises(kind, match=message):
        MARS(params, **dict(compile=False) | kwargs)


def test_a_bad_group_is_not_added(made):
    optimizer, params = made
    num_groups = len(optimizer.param_groups)
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": set(parameters(*SHAPES))})
    for name in ("no tensors", "no leaf", "complex"):
        bad, _, kind, message = errors()[name]
        with pytest.raises(kind, match=message):
            optimizer.add_param_group({"params": bad})
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group(params)
    assert len(optimizer.param_groups) == num_groups
    run(optimizer, params, [2])
    assert float(optimizer.state[params[0]]["step"]) == 3


def test_sparse_gradients_are_refused_and_nothing_changes(made):
    optimizer, params = made
    before, state = copies(params), copy.deepcopy(optimizer.state_dict())
    fill(params, 2)
    params[0].grad = params[0].grad.to_sparse()
    with pytest.raises(ValueError, match="make it dense"), traced():
        optimizer.step()
    equal(params, before)
    same(optimizer.state_dict(), state)
