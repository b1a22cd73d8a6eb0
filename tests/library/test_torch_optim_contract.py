"""What torch.optim promises to those that wrap, hook, load and exchange."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from marsopt import MARS
from marsopt.functional.routing import all_hyperparameters
from marsopt.rules.registry import REGISTRY
from tests import stacking
from tests.stacking import build, copies, equal, fill, forced, run, traced

ROOT = Path(__file__).parents[2]
SHAPES = ((6, 4), (4,), (6, 4), (4,), (5, 3))
LR = 0.01


def parameters(*shapes, seed=0):
    return stacking.parameters(*shapes or SHAPES, seed=seed)


@pytest.fixture
def made(mode):
    """(optimizer, params) that have not moved."""
    params = parameters()
    return build(params, mode, lr=LR), params


# ---- state of others ---------------------------------------------------------------


def test_state_of_others_stays_the_same_object(made):
    """... is replaced and removed at will, and the numbers do not mind."""
    optimizer, params = made
    twin = parameters()
    mine = {p: (torch.full_like(p, 7.0), {"n": 3}) for p in params}
    for p, (tensor, note) in mine.items():
        optimizer.state[p] |= {"slow_buffer": tensor, "z": note}
    run(optimizer, params, range(3))
    for p, (tensor, note) in mine.items():
        assert optimizer.state[p]["slow_buffer"] is tensor
        assert optimizer.state[p]["z"] is note
        assert (tensor == 7.0).all()
        optimizer.state[p]["z"] = p.detach().clone()
        del optimizer.state[p]["slow_buffer"]
    run(optimizer, params, [3])
    run(build(twin, "eager", lr=LR), twin, range(4))
    equal(params, twin, 1e-6)
    assert all("z" in optimizer.state[p] for p in params)
    assert all(float(optimizer.state[p]["step"]) == 4 for p in params)


def test_state_of_others_stays_where_a_rule_changes_and_a_group_comes(made):
    """What goes is the state of the rule that was left."""
    optimizer, params = made
    z = optimizer.state[params[0]]["z"] = torch.ones(3)
    run(optimizer, params, [0])
    optimizer.param_groups[0]["mars_type"] = "lion"
    optimizer.add_param_group({"params": parameters((2, 2))})
    run(optimizer, params, [1])
    assert optimizer.state[params[0]]["z"] is z
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "z"}


def test_state_of_others_is_saved_and_loaded_as_torch_does(mode):
    """In the parameter's dtype, with what is no tensor as it is."""
    found = []
    for make in (partial(build, mode=mode), torch.optim.AdamW):
        params, others = parameters(), parameters()
        optimizer, other = make(params, lr=LR), make(others, lr=LR)
        run(optimizer, params, range(2))
        for p in params:
            optimizer.state[p]["slow_buffer"] = torch.full_like(
                p, 1 / 3, dtype=torch.float64
            )
            optimizer.state[p]["z"] = {"n": 3, "of": torch.ones(2)}
        saved = optimizer.state_dict()
        assert saved["state"][1]["z"]["n"] == 3
        other.load_state_dict(saved)
        run(other, others, [2])
        found.append(
            [(other.state[q]["slow_buffer"], other.state[q]["z"]) for q in others]
        )
    for (slow, z), (want, z_want) in zip(*found, strict=True):
        assert slow.dtype == want.dtype and torch.equal(slow, want)
        assert z["n"] == z_want["n"] and torch.equal(z["of"], z_want["of"])


def test_state_of_no_parameter_is_kept_saved_and_loaded(mode):
    params, others = parameters(), parameters()
    optimizer, other = (build(each, mode, lr=LR) for each in (params, others))
    optimizer.state["seen"] = {"tokens": 5}
    run(optimizer, params, range(2))
    assert optimizer.state["seen"] == {"tokens": 5}
    other.load_state_dict(optimizer.state_dict())
    run(other, others, [2])
    assert other.state["seen"] == {"tokens": 5}


def test_state_of_others_is_copied_with_the_optimizer(made):
    optimizer, params = made
    optimizer.state[params[0]]["z"] = torch.full((2,), 5.0)
    run(optimizer, params, [0])
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (first, *_) = theirs = twin.param_groups[0]["params"]
        run(twin, theirs, [1])
        assert torch.equal(twin.state[first]["z"], torch.full((2,), 5.0))


# ---- loading -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["load", "deepcopy", "pickle"])
def test_a_group_that_comes_later_has_the_keys_of_the_first(how, made):
    optimizer, _ = made
    if how == "load":
        optimizer.load_state_dict(optimizer.state_dict())
    elif how == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
    else:
        optimizer = pickle.loads(pickle.dumps(optimizer))
    optimizer.add_param_group({"params": parameters((2, 2), (2,))})
    first, last = optimizer.param_groups
    assert set(first) == set(last)


def test_what_a_hook_after_loading_writes_is_kept(made, mode):
    """New keys, tensors in place of those that were loaded, and groups."""
    optimizer, params = made
    run(optimizer, params, range(2))
    others = [nn.Parameter(x) for x in copies(params)]
    other = build(others, mode, lr=LR)
    written = torch.full_like(others[0], 0.25)

    def write(loaded):
        loaded.state[others[0]]["z"] = "mine"
        loaded.state[others[0]]["exp_avg"] = written.clone()
        loaded.state[others[2]]["exp_avg"].zero_()
        loaded.param_groups[0]["lr"] = 0.2

    other.register_load_state_dict_post_hook(write)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state[others[0]]["z"] == "mine"
    assert torch.equal(other.state[others[0]]["exp_avg"], written)
    assert not other.state[others[2]]["exp_avg"].any()
    assert other.param_groups[0]["lr"] == 0.2
    optimizer.state[params[0]]["exp_avg"] = written.clone()
    optimizer.state[params[2]]["exp_avg"].zero_()
    optimizer.param_groups[0]["lr"] = 0.2
    run(optimizer, params, [2])
    run(other, others, [2])
    assert other.state[others[0]]["z"] == "mine"
    equal(params, others, 1e-6)


# ---- where nothing can compile -----------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts what it sees."""

    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_calls += 1
        return function(*args, **kwargs or {})


MODES = {
    "flops": partial(FlopCounterMode, display=False),
    "communication": CommDebugMode,
    "any": Watch,
}


@pytest.mark.parametrize("watcher", MODES)
def test_a_compiled_step_under_a_dispatch_mode_is_the_step(
    watcher, monkeypatch, caplog
):
    """It runs eagerly there, says so once, and the numbers are the same."""
    forced(monkeypatch, "flat")
    kw = dict(lr=LR, mars_type="mars-shampoo", ns_dtype=torch.float32, max_norm=1.0)
    a, b = parameters(), parameters()
    plain, watched = MARS(a, compile=False, **kw), MARS(b, compile=True, **kw)
    run(plain, a, range(3))
    caplog.clear()
    for seed in range(3):
        fill(b, seed)
        with MODES[watcher]() as seen:
            watched.step()
        assert watcher != "any" or seen.num_calls
    equal(a, b, 1e-6)
    said = [r for r in caplog.records if r.name.startswith("marsopt")]
    assert len(said) == 1
    assert "eager" in said[0].getMessage()


def test_a_step_after_a_dispatch_mode_is_compiled_again(monkeypatch, of_dynamo):
    forced(monkeypatch, "flat")
    counters.clear()
    a, b = parameters(), parameters()
    plain, optimizer = (MARS(p, lr=LR, compile=c) for p, c in ((a, False), (b, True)))
    fill(b, 0)
    with Watch():
        optimizer.step()
    assert not counters["stats"]["unique_graphs"]
    fill(b, 1)
    optimizer.step()
    assert counters["stats"]["unique_graphs"]
    run(plain, a, range(2))
    equal(a, b, 1e-6)


def values(compile):
    """Parameters after three steps."""
    params = parameters((6, 4), (4,))
    optimizer = MARS(params, lr=LR, max_norm=1.0, compile=compile)
    for seed in range(3):
        fill(params, seed)
        optimizer.step()
    return params


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("marsopt")]


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
@pytest.mark.parametrize("compile", [None, True])
def test_where_torch_compile_is_off_the_step_is_eager(
    name, compile, monkeypatch, caplog
):
    monkeypatch.setenv(name, "1")
    counters.clear()
    equal(values(compile), values(False), 1e-6)
    assert not counters["stats"]["unique_graphs"]
    assert sum("eager" in message for message in told(caplog)) == 1


def broken(graph, inputs, **options):
    raise RuntimeError("no such compiler")


@pytest.mark.parametrize("compile", [None, True])
def test_a_compiler_that_fails_raises_and_nothing_is_written(compile, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    params = parameters((6, 4), (4,))
    optimizer = MARS(params, compile=compile)
    fill(params, 0)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such"):
        optimizer.step()
    equal(params, parameters((6, 4), (4,)))
    assert all(not s["exp_avg"].any() for s in optimizer.state.values())


# ---- parameters that are exchanged -------------------------------------------------


def exchange(optimizer):
    """As mixed precision tools do: float32 masters in the groups. Returns both."""
    before, masters = [], []
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            master = p.detach().clone().float().requires_grad_()
            before.append(p)
            masters.append(master)
            group["params"][i] = master
    return before, masters


def halves():
    return [nn.Parameter(p.detach().bfloat16()) for p in parameters()]


@pytest.mark.parametrize("num_steps", [0, 2])
def test_masters_may_take_the_place_of_parameters(num_steps, mode):
    """Before the first step, or after some."""
    optimizer = build(params := halves(), mode, lr=LR)
    run(optimizer, params, range(num_steps))
    olds, masters = exchange(optimizer)
    if not num_steps:  # else as with torch.optim: a KeyError
        assert set(optimizer.state_dict()["state"]) <= set(range(len(SHAPES)))
    old_values, want = copies(olds), [nn.Parameter(x) for x in copies(masters)]
    run(optimizer, masters, range(2, 4))
    run(build(want, "eager", lr=LR), want, range(2, 4))
    equal(masters, want, 1e-6)
    equal(olds, old_values)
    assert all(float(optimizer.state[p]["step"]) == 2 for p in masters)
    assert {id(p) for p in masters} <= {id(p) for p in optimizer.state}
    assert optimizer.state[masters[0]]["exp_avg"].dtype == torch.float32
    if num_steps:
        assert all(float(optimizer.state[p]["step"]) == 2 for p in olds)


def test_masters_may_take_the_state_over(mode):
    """apex moves the entries, and casts them by loading what it has saved."""
    optimizer = build(params := halves(), mode, lr=LR)
    run(optimizer, params, range(2))
    olds, masters = exchange(optimizer)
    for old, master in zip(olds, masters, strict=True):
        optimizer.state[master] = optimizer.state.pop(old)
    optimizer.load_state_dict(optimizer.state_dict())
    run(optimizer, masters, [2])
    for master in masters:
        assert optimizer.state[master]["exp_avg"].dtype == torch.float32
        assert float(optimizer.state[master]["step"]) == 3


def test_parameters_that_were_exchanged_are_freed(mode):
    params = parameters()
    optimizer = build(params, mode, lr=LR)
    run(optimizer, params, range(2))
    seen = [weakref.ref(p) for p in params]
    seen += [weakref.ref(optimizer.state[p]["exp_avg"]) for p in params]
    olds, masters = exchange(optimizer)
    run(optimizer, masters, [2])
    for p in olds:  # theirs until it is deleted
        del optimizer.state[p]
    run(optimizer, masters, [3])
    del olds, p
    params.clear()
    gc.collect()
    assert not [ref for ref in seen if ref() is not None]


def test_one_parameter_may_be_exchanged(made):
    """The others go on where they were."""
    optimizer, params = made
    run(optimizer, params, range(2))
    new = parameters(SHAPES[2], seed=5)[0]
    old, params[2] = params[2], new
    (held,) = (g["params"] for g in optimizer.param_groups if old in set(g["params"]))
    held[[p is old for p in held].index(True)] = new
    run(optimizer, params, [2])
    assert float(optimizer.state[old]["step"]) == 2
    assert [float(optimizer.state[p]["step"]) for p in params] == [3, 3, 1, 3, 3]


# ---- no parameters -----------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [{}, dict(max_norm=1.0), dict(is_approx=False), dict(nonfinite="raise")],
    ids=str,
)
@pytest.mark.parametrize("num_groups", [1, 2])
def test_an_optimizer_without_parameters_does_nothing(num_groups, kwargs):
    """ZeRO makes them on ranks that got none."""
    optimizer = MARS([{"params": []} for _ in range(num_groups)], lr=LR, **kwargs)
    optimizer.update_previous_grad()
    assert optimizer.step() is None
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    optimizer.update_last_grad()
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    assert [g["params"] for g in saved["param_groups"]] == [[]] * num_groups
    optimizer.load_state_dict(saved)
    assert optimizer.step() is None
    assert optimizer.grad_norm is None
    assert optimizer.num_skipped == 0
    optimizer.max_norm = 0.5
    assert optimizer.max_norm == 0.5
    twin = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
    assert twin.step() is None


def test_a_group_makes_an_empty_optimizer_real(mode):
    optimizer = build([{"params": []}], mode, lr=LR, max_norm=0.7)
    optimizer.step()
    params, twin = parameters(), parameters()
    optimizer.add_param_group({"params": params})
    run(optimizer, params, range(3))
    run(build(twin, "eager", lr=LR, max_norm=0.7), twin, range(3))
    equal(params, twin, 1e-6)
    assert optimizer.grad_norm is not None
    with pytest.raises(ValueError, match="got lr=-1"):
        MARS([{"params": [], "lr": -1.0}])


# ---- options of the whole optimizer in groups --------------------------------------

OPTIONS = {
    "is_approx": (False, True),
    "ns_steps": (3, 4),
    "ns_coefficients": ("polar_express", "quintic"),
    "ns_dtype": (torch.float32, torch.bfloat16),
    "state_dtype": (torch.float64, torch.float32),
    "h_dtype": (torch.bfloat16, None),
    "stochastic_rounding": (True, False),
    "compile": (False, True),
    "nonfinite": ("raise", "skip"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_group_may_repeat_an_option_and_not_change_it(name):
    same, other = OPTIONS[name]
    kwargs = {"compile": False, "ns_dtype": torch.float32, name: same}
    params = parameters()
    MARS([{"params": params, name: same}], **kwargs)
    optimizer = MARS(parameters((2, 2)), **kwargs)
    optimizer.add_param_group({"params": params, name: same})
    for add in (
        lambda: MARS([{"params": params, name: other}], **kwargs),
        lambda: MARS(parameters((2, 2)), **kwargs).add_param_group(
            {"params": params, name: other}
        ),
    ):
        with pytest.raises(ValueError, match=f"{name}.* in a param group"):
            add()


def test_defaults_repeated_in_a_group_are_accepted():
    listed = {**all_hyperparameters(), **signature(MARS).parameters}
    group = {name: listed[name].default for name in OPTIONS}
    MARS([{"params": parameters(), **group}])


def test_groups_of_one_optimizer_make_another():
    kwargs = dict(lr=LR, is_approx=True, compile=False)
    params, twin = parameters(), parameters()
    first = MARS(params, **kwargs)
    optimizer = MARS([dict(g) for g in first.param_groups], **kwargs)
    run(optimizer, params, range(2))
    run(MARS(twin, **kwargs), twin, range(2))
    equal(params, twin)


# ---- one parameter twice -----------------------------------------------------------

TWICE = "got parameter .*twice, expected once: "


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dup")
@pytest.mark.parametrize(
    "make",
    [
        lambda p, q: [p, q, p],
        lambda p, q: [{"params": [p, q]}, {"params": [p]}],
        lambda p, q: [{"params": [p, p]}, {"params": [q]}],
        lambda p, q: [("one", p), ("two", q), ("three", p)],
    ],
    ids=["list", "groups", "one group", "named"],
)
def test_a_parameter_twice_is_named(make, request):
    with pytest.raises(ValueError, match=TWICE) as caught:
        MARS(make(*parameters((3, 3), (3, 3))), compile=False)
    assert "same memory" not in str(caught.value)
    named = "one" in str(caught.value) or "three" in str(caught.value)
    assert named == (request.node.callspec.id == "named")


# ---- whatever torch's default device is --------------------------------------------


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_a_default_device_has_no_part_in_it(mars_type):
    """Built, stepped, saved and loaded under the meta device."""
    a, b = parameters(), parameters()
    options = dict(lr=LR, mars_type=mars_type, stochastic_rounding=True)
    options |= dict(state_dtype=torch.bfloat16, clip=None, max_norm=1.0)
    plain = build(a, "eager", **options)
    run(plain, a, range(3))
    meta = torch.device("meta")
    with meta:
        optimizer = build(b, "eager", **options)
    for seed in range(3):
        fill(b, seed)
        with meta:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
    equal(a, b, 0.0)


# ---- the authors' loop -------------------------------------------------------------


def test_the_batch_size_of_the_authors_loop_is_taken_and_ignored(made):
    """With a closure and through a scaler, too."""
    optimizer, params = made
    twin = parameters()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    def closure():
        fill(params, 1)
        return 5.0

    with traced():
        fill(params, 0)
        assert optimizer.step(bs=32) is None
        assert optimizer.step(closure, bs=64) == 5.0
        assert optimizer.step(closure=closure, bs=64) == 5.0
        scaler.step(optimizer, bs=32)
    plain = build(twin, "eager", lr=LR)
    run(plain, twin, [0, 1, 1])
    for p in twin:
        p.grad /= scaler.get_scale()
    plain.step()
    equal(params, twin, 1e-6)


# ---- beside torch's own tools ------------------------------------------------------


def test_a_grad_scaler_changes_nothing_but_the_scale(mode):
    a, b = parameters(), parameters()
    scaled, plain = (build(p, mode, lr=LR, max_norm=0.5) for p in (a, b))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for seed in range(4):
        fill(b, seed)
        for p, q in zip(a, b, strict=True):
            p.grad = None
            scaler.scale((p * q.grad).sum()).backward()
        with traced():
            scaler.step(scaled)
            scaler.update()
            plain.step()
    equal(a, b, 1e-6)
    assert scaler.get_scale() == 1024.0


def test_a_grad_scaler_leaves_a_step_with_infinities_out(made):
    optimizer, params = made
    run(optimizer, params, [0])
    before = copies(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    fill(params, 1)
    params[1].grad[0] = float("inf")
    with traced():
        scaler.step(optimizer)
    scaler.update()
    equal(params, before)
    assert scaler.get_scale() == 4.0
    assert optimizer.num_skipped == 0
    assert float(optimizer.state[params[0]]["step"]) == 1


SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "one cycle, with betas": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 8),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 2, cycle_momentum=False),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "in sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1, 3), lr_scheduler.ExponentialLR(o, 0.8)],
        [3],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_move_it_as_they_move_adamw(schedule, mode):
    kw = dict(lr=LR, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    a, b = parameters(), parameters()
    ours, theirs = build(a, mode, mars_type="adamw", **kw), torch.optim.AdamW(b, **kw)
    both = [SCHEDULES[schedule](o) for o in (ours, theirs)]
    for seed in range(6):
        for optimizer, params in ((ours, a), (theirs, b)):
            run(optimizer, params, [seed])
        for scheduler in both:
            scheduler.step()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    equal(a, b, 1e-6)
