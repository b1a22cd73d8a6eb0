"""A warm step compiles nothing, whatever changes between steps; and whatever it meets
that is not as before, it takes steps equal to eager ones.
"""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode

from marsopt import MARS

SHAPE = (260, 256)  # above what shares a stack on a CPU
NUM = 3


@pytest.fixture
def traced(monkeypatch):
    """Graphs as dynamo makes them, without what inductor makes of them: that takes
    longer, and has to fit the tensors, of which other tests are.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


of_dynamo = pytest.mark.usefixtures("traced")


def parameters(num=NUM):
    torch.manual_seed(0)
    return [nn.Parameter(0.02 * torch.randn(SHAPE)) for _ in range(num)]


def gradients(params, seed):
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn(SHAPE)


def spans(call):
    """Return the names of all spans of ``call``."""
    with torch.profiler.profile() as found:
        call()
    return [event.name for event in found.events()]


def num_compiled(call):
    """Return how many graphs ``call`` compiles."""
    before = counters["stats"]["unique_graphs"]
    call()
    return counters["stats"]["unique_graphs"] - before


def test_a_step_is_as_many_calls_of_graphs_as_it_describes():
    params = parameters()
    optimizer = MARS(params, max_norm=1.0, compile=True)
    for seed in range(3):
        gradients(params, seed)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (seed + 1)
        names = spans(optimizer.step)
    regions = [name for name in names if name.startswith("Torch-Compiled Region: ")]
    calls = optimizer.describe().calls
    assert len(regions) == 2 * len(calls)  # products and updates: a CPU decides eagerly
    assert len(set(regions)) == 2


@of_dynamo
def test_a_step_under_autocast_takes_the_same_graphs():
    params = parameters()
    optimizer = MARS(params, compile=True)
    for seed in range(2):
        gradients(params, seed)
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
            gradients(params, seed)
            if change is not None:
                change(params)
            optimizer.step()
        for a, b in zip(mine, others, strict=True):
            torch.testing.assert_close(a, b, msg=f"{change} in step {seed}")


@pytest.mark.parametrize(
    "change", [half_of_them, missing, moved, shifted, with_a_graph]
)
def test_a_first_step_on_whatever_tensors_is_an_eager_one(change):
    steps_as_an_eager_one([change, None, None])


# so few that Dynamo's limit on graphs of one function is not reached
@pytest.mark.parametrize("changes", [CHANGES[:5], CHANGES[5:]], ids=["some", "others"])
def test_whatever_tensors_it_meets_later_it_steps_as_an_eager_one(changes):
    amid = [step for change in changes for step in (change, None)]
    steps_as_an_eager_one([None, None, *amid])


@of_dynamo
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
        gradients(mine, seed)
        gradients(others, seed)
        eager.step()
        if seed in (2, 3):
            with entered():
                compiled.step()
        else:
            compiled.step()
    for a, b in zip(mine, others, strict=True):
        torch.testing.assert_close(a, b)


@of_dynamo
def test_set_stance_is_obeyed():
    params = parameters(2)
    optimizer = MARS(params, compile=True)
    for seed in range(2):
        gradients(params, seed)
        optimizer.step()
    with torch.compiler.set_stance("force_eager"):
        names = spans(optimizer.step)
    assert not any("Torch-Compiled Region" in name for name in names)


@of_dynamo
def test_a_global_clip_comes_and_goes():
    """Each has a graph of its own, which is compiled once."""
    mine, others = parameters(2), parameters(2)
    compiled = MARS(mine, lr=1e-2, compile=True)
    eager = MARS(others, lr=1e-2, compile=False)
    for seed, max_norm in enumerate([None, 0.5, None, 0.5]):
        for params, optimizer in ((mine, compiled), (others, eager)):
            gradients(params, seed)
            optimizer.max_norm = max_norm
        eager.step()
        assert num_compiled(compiled.step) == 0 or seed < 2
    for a, b in zip(mine, others, strict=True):
        torch.testing.assert_close(a, b)


@of_dynamo
def test_groups_that_differ_in_numbers_share_their_graphs():
    params = parameters(4)
    halves = [
        dict(params=params[:2], betas=(0.9, 0.95), weight_decay=0.1),
        dict(params=params[2:], betas=(0.8, 0.99), lr=1e-2),
    ]
    optimizer = MARS(halves, compile=True)
    gradients(params, 0)
    optimizer.step()
    (graph,) = {tuple(call) for call in optimizer.describe().calls}
    assert len(graph) == 4


@of_dynamo
def test_a_reset_compiles_anew():
    params = parameters(2)
    optimizer = MARS(params, compile=True)
    gradients(params, 0)
    num = num_compiled(optimizer.step)
    for _ in range(2):  # a second one too
        torch.compiler.reset()
        assert num_compiled(optimizer.step) == num
        assert num_compiled(optimizer.step) == 0


@of_dynamo
def test_nothing_of_a_step_is_kept_alive():
    params = parameters(2)
    optimizer = MARS(params, compile=True)
    for seed in range(2):
        gradients(params, seed)
        optimizer.step()
    alive = [weakref.ref(p.grad.untyped_storage()) for p in params]
    optimizer.zero_grad()
    gc.collect()
    assert not any(ref() is not None for ref in alive)


@of_dynamo
def test_a_copy_takes_the_graphs_and_has_tensors_of_its_own():
    params = parameters(2)
    optimizer = MARS(params, lr=1e-2, compile=True)
    for seed in range(2):
        gradients(params, seed)
        optimizer.step()
    theirs, twin = copy.deepcopy((params, optimizer))
    gradients(params, 3)
    gradients(theirs, 3)
    optimizer.step()
    assert num_compiled(twin.step) == 0
    for a, b in zip(params, theirs, strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


def sweep(params, **options):
    """Take two steps by an optimizer of its own."""
    optimizer = MARS(params, compile=True, **options)
    for seed in range(2):
        gradients(params, seed)
        optimizer.step()


@of_dynamo
def test_the_next_optimizer_of_these_shapes_compiles_nothing():
    """Whatever its hyperparameters are, and whether the one before is still there."""
    options = dict(max_norm=1.0)
    assert num_compiled(lambda: sweep(parameters(), **options)) > 0
    theirs, ours = parameters(), parameters()
    numbers = dict(lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1, gamma=0.05)
    assert num_compiled(lambda: sweep(theirs, **options, **numbers)) == 0
    eager = MARS(ours, compile=False, **options, **numbers)
    for seed in range(2):
        gradients(ours, seed)
        eager.step()
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b)


@of_dynamo
@pytest.mark.parametrize(
    "other",
    [
        lambda p: nn.Parameter(torch.zeros(260, 255)),
        lambda p: nn.Parameter(p.detach().t().contiguous().t()),
        lambda p: nn.Parameter(p.detach().double()),
        lambda p: nn.Parameter(p.detach().bfloat16()),
    ],
    ids=["shape", "strides", "float64", "bfloat16"],
)
def test_other_tensors_have_graphs_of_their_own(other):
    """None of a shape that changes, and no guard that fails."""
    torch.compiler.reset()
    counters.clear()
    sweep([nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)])
    params = [other(nn.Parameter(torch.zeros(SHAPE))) for _ in range(2)]
    optimizer = MARS(params, compile=True)
    for p in params:
        p.grad = torch.ones_like(p)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert num_compiled(optimizer.step) > 0
        assert num_compiled(optimizer.step) == 0


@of_dynamo
def test_an_optimizer_that_is_gone_leaves_no_tensor():
    """Its graphs stay, for the next one."""
    params = parameters(2)
    optimizer = MARS(params, compile=True)
    for seed in range(2):
        gradients(params, seed)
        optimizer.step()
    tensors = [t for s in optimizer.state.values() for t in s.values()]
    tensors += [*params, *(p.grad for p in params)]
    alive = [weakref.ref(t.untyped_storage()) for t in tensors]
    del params, optimizer, tensors
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]
    assert num_compiled(lambda: sweep(parameters(2))) == 0


@of_dynamo
def test_a_graph_that_may_not_be_compiled_again_is_replaced():
    """By one with a limit of its own: many optimizers may have met its guards."""
    params = parameters(1)
    with torch._dynamo.config.patch(recompile_limit=1):
        optimizer = MARS(params, compile=True)
        for change in (None, with_a_graph):
            gradients(params, 0)
            if change is not None:
                change(params)
            optimizer.step()
