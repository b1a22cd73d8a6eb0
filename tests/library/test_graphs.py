"""A warm step compiles nothing, whatever changes between steps; and whatever it meets
that is not as before, it takes steps equal to eager ones.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode

import marsopt
from marsopt.rules.numerics import scalar_dtype
from marsopt.step.graphs import compile_graph
from tests import stacking
from tests.stacking import equal, fill, forced

SHAPE = (7, 5)
NUM = 3
MARS = partial(marsopt.MARS, mars_type="adamw")  # a short formula


@pytest.fixture(autouse=True)
def alone(monkeypatch, of_dynamo):
    """What inductor makes of graphs: test_compiled_is_eager of test_optimizer.py."""
    forced(monkeypatch, "leaves")


def parameters(num=NUM):
    return stacking.parameters(*num * [SHAPE])


def num_compiled(call):
    """Return how many graphs ``call`` compiles."""
    before = counters["stats"]["unique_graphs"]
    call()
    return counters["stats"]["unique_graphs"] - before


LAYER = ((4,), (12, 4))


@pytest.mark.parametrize(
    ("mars_type", "mode"),
    [("adamw", "leaves"), ("adamw", "flat"), ("muon", "flat")],
)
def test_graphs_do_not_grow_with_depth(mars_type, mode, monkeypatch):
    forced(monkeypatch, mode)
    own = dict(ns_steps=1) if mars_type == "muon" else {}
    found = []
    for num_layers in (2, 4):
        params = stacking.parameters((9, 4), (6, 4), *num_layers * LAYER)
        optimizer = MARS(params, mars_type=mars_type, compile=True, **own)
        torch.compiler.reset()
        for seed in range(2):
            fill(params, seed)
            found.append(num_compiled(optimizer.step))
    first, warm, deep, deep_warm = found
    assert first == deep > 0 == warm == deep_warm


def test_a_step_under_autocast_takes_the_same_graphs():
    params = parameters()
    optimizer = MARS(params, compile=True)
    for seed in range(2):
        fill(params, seed)
        optimizer.step()
    for dtype, keeps in ((torch.bfloat16, True), (torch.float16, False)):
        with torch.autocast("cpu", dtype=dtype, cache_enabled=keeps):
            assert num_compiled(optimizer.step) == 0


class Nothing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def strided(params):
    for p in params:
        p.grad = p.grad.t().contiguous().t()


def narrower(params):
    params[0].grad_dtype = None
    params[0].grad = params[0].grad.bfloat16()


def half_of_them(params):
    for p in params[::2]:
        p.grad = p.grad.t().contiguous().t()


def missing(params):
    params[1].grad = None


def of_one_object(params):
    for p in params:
        p.grad = params[0].grad


def the_parameter_itself(params):
    for p in params:
        p.grad = p.detach()


def moved(params):
    for p in params:
        p.data = p.data.t().contiguous().t()


def shifted(params):
    for p in params:
        p.grad = torch.cat([torch.zeros(1), p.grad.flatten()])[1:].view(SHAPE)


def with_a_graph(params):
    for p in params:
        p.grad = p.grad.clone().requires_grad_()


def expanded(params):
    for p in params:
        p.grad = p.grad[:1].expand(SHAPE)


CHANGES = [
    strided,
    half_of_them,
    missing,
    of_one_object,
    the_parameter_itself,
    moved,
    shifted,
    with_a_graph,
    expanded,
    narrower,
]


def steps_as_an_eager_one(changes):
    """Compare after each step; a change is made before it, or None."""
    mine, others = parameters(), parameters()
    pairs = [
        (p, MARS(p, lr=1e-2, max_norm=1.0, compile=compile))
        for p, compile in ((mine, True), (others, False))
    ]
    for seed, change in enumerate(changes):
        for params, optimizer in pairs:
            fill(params, seed)
            if change is not None:
                change(params)
            optimizer.step()
        for a, b in zip(mine, others, strict=True):
            torch.testing.assert_close(a, b, msg=f"{change} in step {seed}")


# so few changes that Dynamo's limit on graphs of one function is not reached
@pytest.mark.parametrize("changes", [CHANGES[:5], CHANGES[5:]], ids=["some", "others"])
def test_whatever_tensors_it_meets_it_steps_as_an_eager_one(changes):
    """Later, or in the first step."""
    amid = [step for change in changes for step in (change, None)]
    steps_as_an_eager_one([None, *amid])
    steps_as_an_eager_one(changes[1:3])


@pytest.mark.parametrize(
    "entered",
    [
        Nothing,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        lambda: torch.compiler.set_stance("force_eager"),
        torch.enable_grad,
    ],
    ids=["function mode", "inference", "autocast", "force_eager", "grad"],
)
def test_whatever_torch_computes_under_it_steps_as_an_eager_one(entered):
    mine, others = parameters(), parameters()
    compiled = MARS(mine, lr=1e-2, max_norm=1.0, compile=True)
    eager = MARS(others, lr=1e-2, max_norm=1.0, compile=False)
    for seed in range(6):
        fill(mine, seed)
        fill(others, seed)
        eager.step()
        if seed in (2, 3):
            with entered():
                compiled.step()
        else:
            compiled.step()
    equal(mine, others, 1e-6)


def test_set_stance_is_obeyed():
    params = parameters(2)
    optimizer = MARS(params, compile=True)
    fill(params, 0)
    with torch.compiler.set_stance("force_eager"):
        assert num_compiled(optimizer.step) == 0
    assert num_compiled(optimizer.step) > 0


def test_a_global_clip_comes_and_goes():
    """Each has a graph of its own, which is compiled once."""
    mine, others = parameters(2), parameters(2)
    compiled = MARS(mine, lr=1e-2, compile=True)
    eager = MARS(others, lr=1e-2, compile=False)
    for seed, max_norm in enumerate([None, 0.5, None, 0.5]):
        for params, optimizer in ((mine, compiled), (others, eager)):
            fill(params, seed)
            optimizer.max_norm = max_norm
        eager.step()
        assert num_compiled(compiled.step) == 0 or seed < 2
    equal(mine, others, 1e-6)


def test_groups_that_differ_in_numbers_share_their_graphs():
    found = []
    for several in (False, True):
        params = parameters(4)
        other = dict(betas=(0.8, 0.99), lr=1e-2) if several else {}
        halves = [dict(params=params[:2]), dict(params=params[2:], **other)]
        optimizer = MARS(halves, compile=True)
        torch.compiler.reset()
        fill(params, 0)
        found.append(num_compiled(optimizer.step))
    assert found[0] == found[1] > 0


def test_a_reset_compiles_anew():
    params = parameters(2)
    optimizer = MARS(params, compile=True)
    fill(params, 0)
    num = num_compiled(optimizer.step)
    for _ in range(2):  # a second one too
        torch.compiler.reset()
        assert num_compiled(optimizer.step) == num
        assert num_compiled(optimizer.step) == 0


def test_nothing_of_a_step_is_kept_alive():
    params = parameters(2)
    optimizer = MARS(params, compile=True)
    for seed in range(2):
        fill(params, seed)
        optimizer.step()
    alive = [weakref.ref(p.grad.untyped_storage()) for p in params]
    optimizer.zero_grad()
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def sweep(params, **options):
    """Take two steps by an optimizer of its own."""
    optimizer = MARS(params, compile=True, **options)
    for seed in range(2):
        fill(params, seed)
        optimizer.step()


def test_the_next_optimizer_of_these_shapes_compiles_nothing():
    """Whatever its hyperparameters are, and whether the one before is still there."""
    options = dict(max_norm=1.0)
    assert num_compiled(lambda: sweep(parameters(), **options)) > 0
    theirs, ours = parameters(), parameters()
    numbers = dict(lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1)
    assert num_compiled(lambda: sweep(theirs, **options, **numbers)) == 0
    eager = MARS(ours, compile=False, **options, **numbers)
    for seed in range(2):
        fill(ours, seed)
        eager.step()
    equal(theirs, ours, 1e-6)


@pytest.mark.parametrize(
    ("other", "is_new"),
    [
        (lambda p: nn.Parameter(torch.zeros(7, 6)), False),
        (lambda p: nn.Parameter(torch.zeros(7, 3, 2)), False),
        (lambda p: nn.Parameter(p.detach().t().contiguous().t()), False),
        (lambda p: nn.Parameter(p.detach().double()), True),
        (lambda p: nn.Parameter(p.detach().bfloat16()), True),
    ],
    ids=["shape", "dims", "strides", "float64", "bfloat16"],
)
def test_graphs_are_of_dtypes_and_not_of_shapes(other, is_new):
    """No guard fails."""
    torch.compiler.reset()
    counters.clear()
    sweep([nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)])
    params = [other(nn.Parameter(torch.zeros(SHAPE))) for _ in range(2)]
    optimizer = MARS(params, compile=True)
    for p in params:
        p.grad = torch.ones_like(p)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert (num_compiled(optimizer.step) > 0) == is_new
        assert num_compiled(optimizer.step) == 0


def test_an_optimizer_that_is_gone_leaves_no_tensor():
    """Its graphs stay, for the next one."""
    params = parameters(2)
    optimizer = MARS(params, compile=True)
    for seed in range(2):
        fill(params, seed)
        optimizer.step()
    tensors = [t for s in optimizer.state.values() for t in s.values()]
    tensors += [*params, *(p.grad for p in params)]
    alive = [weakref.ref(t.untyped_storage()) for t in tensors]
    del params, optimizer, tensors
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]
    assert num_compiled(lambda: sweep(parameters(2))) == 0


def test_inductor_captures_no_step(monkeypatch):
    """Else a replay writes into tensors that a caller kept, such as ``grad_norm``."""
    options = []
    monkeypatch.setattr(torch, "compile", lambda f, **kw: options.append(kw["options"]))
    for dynamic in (False, True):
        compile_graph(lambda kind, tensors: None, None, None, dynamic)
    assert [of_graph["triton.cudagraphs"] for of_graph in options] == [False, False]


@pytest.mark.parametrize(
    ("device", "has_float64", "dtype"),
    [
        ("cpu", None, torch.float64),
        ("mps", None, torch.float32),
        ("xpu", True, torch.float64),
        ("xpu", False, torch.float32),  # Arc
    ],
)
def test_scalars_are_float64_where_the_device_has_it(
    device, has_float64, dtype, monkeypatch
):
    """In a graph, too, which cannot trace the question."""
    capability = {"has_fp64": has_float64}
    monkeypatch.setattr(torch.xpu, "get_device_capability", lambda device: capability)
    device = torch.device(device, 0)

    def converted(x):
        return x.to(scalar_dtype(device))

    for call in converted, torch.compile(converted, backend="eager", fullgraph=True):
        assert call(torch.ones(2)).dtype == dtype
