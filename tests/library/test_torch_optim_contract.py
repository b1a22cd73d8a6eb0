"""What torch.optim promises to those that wrap, hook, load and exchange."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import lr_scheduler
from torch.utils.flop_counter import FlopCounterMode

from marsopt import MARS
from tests import stacking
from tests.stacking import build, copies, equal, fill, forced, run, traced

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


# ---- loading -----------------------------------------------------------------------


def test_a_group_that_comes_later_has_the_keys_of_the_first(made):
    optimizer, _ = made
    optimizer.load_state_dict(optimizer.state_dict())
    for each in (
        optimizer,
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
    ):
        each.add_param_group({"params": parameters((2, 2), (2,))})
        first, last = each.param_groups
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


@pytest.mark.parametrize(
    "watch", [partial(FlopCounterMode, display=False), CommDebugMode]
)
def test_a_compiled_step_under_a_dispatch_mode_is_the_step(
    watch, monkeypatch, caplog, of_dynamo
):
    """It runs eagerly there, says so once, and is compiled again after it."""
    forced(monkeypatch, "flat")
    kw = dict(lr=LR, mars_type="mars-shampoo", ns_dtype=torch.float32, max_norm=1.0)
    a, b = parameters(), parameters()
    plain, watched = MARS(a, compile=False, **kw), MARS(b, compile=True, **kw)
    run(plain, a, range(3))
    caplog.clear()
    counters.clear()
    for seed in range(2):
        fill(b, seed)
        with watch():
            watched.step()
    assert not counters["stats"]["unique_graphs"]
    assert sum("eager" in message for message in told(caplog)) == 1
    fill(b, 2)
    watched.step()
    assert counters["stats"]["unique_graphs"]
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


# ---- no parameters -----------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs", [dict(max_norm=1.0), dict(is_approx=False, nonfinite="raise")], ids=str
)
def test_an_optimizer_without_parameters_does_nothing(kwargs):
    """ZeRO makes them on ranks that got none."""
    optimizer = MARS([{"params": []}, {"params": []}], lr=LR, **kwargs)
    optimizer.update_previous_grad()
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    optimizer.update_last_grad()
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    assert [g["params"] for g in saved["param_groups"]] == [[], []]
    optimizer.load_state_dict(saved)
    assert optimizer.grad_norm is None and optimizer.num_skipped == 0
    assert pickle.loads(pickle.dumps(optimizer)).step() is None


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
    "master_weight_bits": (None, 32),
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


# ---- one parameter twice -----------------------------------------------------------

TWICE = "got parameter .*twice, expected once: "


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dup")
@pytest.mark.parametrize(
    "make",
    [
        lambda p, q: [p, q, p],
        lambda p, q: [{"params": [p, q]}, {"params": [p]}],
        lambda p, q: [("one", p), ("two", q), ("three", p)],
    ],
    ids=["list", "groups", "named"],
)
def test_a_parameter_twice_is_named(make, request):
    with pytest.raises(ValueError, match=TWICE) as caught:
        MARS(make(*parameters((3, 3), (3, 3))), compile=False)
    named = "one" in str(caught.value) or "three" in str(caught.value)
    assert named == (request.node.callspec.id == "named")


# ---- whatever torch's default device is --------------------------------------------


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m", "mars-soap"])
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
    "one cycle, with betas": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 8),
    "in sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1, 3), lr_scheduler.ExponentialLR(o, 0.8)],
        [3],
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
