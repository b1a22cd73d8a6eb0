"""A warm step calls its graphs past Dynamo; and whatever it meets that Dynamo's guards
would have asked, it takes steps equal to eager ones.
"""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode

from marsopt import MARS
from marsopt.optim.direct import Direct

SHAPE = (260, 256)  # above what shares a stack on a CPU
NUM = 6


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


def goes_through_dynamo(call):
    """Return whether ``call`` was compiled, or looked up, by Dynamo."""
    before = counters["stats"]["unique_graphs"]
    is_looked_up = "TorchDynamo Cache Lookup" in spans(call)
    return is_looked_up or counters["stats"]["unique_graphs"] != before


WRONG = {
    "size": lambda x: torch.ones(1, 5, 4),
    "stride": lambda x: torch.ones(1, 4, 4).mT,
    "outer stride": lambda x: torch.ones(1, 4, 8)[..., :4],
    "dtype": lambda x: x.double(),
    "dims": lambda x: x[0],
    "type": lambda x: nn.Parameter(x, requires_grad=False),
    "requires_grad": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_tensor_of_another_kind_goes_through_dynamo(wrong):
    def doubled(x):
        return [2 * x]

    function, x = Direct(doubled, {}), torch.arange(16.0).view(1, 4, 4)
    with torch.no_grad():
        function(x)
        assert not goes_through_dynamo(lambda: function(x.clone()))
        other, found = WRONG[wrong](x), []
        assert goes_through_dynamo(lambda: found.extend(function(other)))
        assert torch.equal(found[0], 2 * other)


@pytest.mark.parametrize("correction", ["approximate", "transport"])
def test_a_warm_step_asks_no_guard_of_dynamo(correction):
    params = parameters()
    optimizer = MARS(params, max_norm=1.0, correction=correction, compile=True)
    for seed in range(3):
        gradients(params, seed)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (seed + 1)
        names = spans(optimizer.step)
    assert not any(name == "TorchDynamo Cache Lookup" for name in names)
    regions = [name for name in names if name.startswith("Torch-Compiled Region: ")]
    calls = optimizer.describe().calls
    assert len(regions) == 2 * len(calls) + 1  # products and updates, and what decides
    assert len(set(regions)) == 3


def test_a_step_under_autocast_takes_the_same_graphs():
    params = parameters()
    optimizer = MARS(params, compile=True)
    for seed in range(2):
        gradients(params, seed)
        optimizer.step()
    for dtype, keeps in ((torch.bfloat16, True), (torch.float16, False)):
        with torch.autocast("cpu", dtype=dtype, cache_enabled=keeps):
            assert not goes_through_dynamo(optimizer.step)


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


@pytest.mark.parametrize(
    ("correction", "first"),
    [("approximate", True), ("transport", False)],
    ids=["first", "later"],
)
def test_whatever_tensors_it_meets_it_steps_as_an_eager_one(correction, first):
    """Each change stands for a step, as the first one or amid others."""
    for change in CHANGES:
        mine, others = parameters(), parameters()
        pairs = [
            (p, MARS(p, lr=1e-2, max_norm=1.0, correction=correction, compile=compile))
            for p, compile in ((mine, True), (others, False))
        ]
        for seed in range(4):
            for params, optimizer in pairs:
                gradients(params, seed)
                if seed == (0 if first else 2):
                    change(params)
                optimizer.step()
        for a, b in zip(mine, others, strict=True):
            torch.testing.assert_close(a, b, msg=change.__name__)


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


def test_set_stance_is_obeyed():
    params = parameters(2)
    optimizer = MARS(params, compile=True)
    for seed in range(2):
        gradients(params, seed)
        optimizer.step()
    with torch.compiler.set_stance("force_eager"):
        names = spans(optimizer.step)
    assert not any("Torch-Compiled Region" in name for name in names)


def scaled(x, factors):
    x.mul_(factors[0])
    return [None, factors[1] * 2]


def test_versions_count_what_a_direct_call_writes():
    x, factors = torch.ones(4, 4), [torch.tensor(2.0), torch.tensor(3.0)]
    function = Direct(scaled, {})
    with torch.no_grad():
        function(x, factors)
        before = x._version
        assert not goes_through_dynamo(lambda: function(x, factors))
    assert x._version > before
    assert x.flatten().tolist() == [4.0] * 16


def test_another_layout_compiles_anew_and_both_are_kept():
    function = Direct(scaled, {})
    factors = [torch.tensor(2.0), torch.tensor(3.0)]
    x, flipped = torch.rand(4, 6), torch.rand(6, 4).t()
    with torch.no_grad():
        for one in (x, flipped):
            expected = 2 * one
            assert goes_through_dynamo(lambda one=one: function(one, factors))
            assert torch.equal(one, expected)
        for one in (x, flipped):
            expected = 2 * one
            assert not goes_through_dynamo(lambda one=one: function(one, factors))
            assert torch.equal(one, expected)


def test_what_was_one_object_and_is_no_more_goes_through_dynamo():
    function = Direct(scaled, {})
    same = torch.tensor(2.0)
    x = torch.ones(2)
    with torch.no_grad():
        function(x, [same, same])
        assert not goes_through_dynamo(lambda: function(x, [same, same]))
        _, out = function(x, [same, torch.tensor(5.0)])
    assert out == 10
    assert x.tolist() == [8.0, 8.0]


def test_inputs_that_overlap_are_dynamos():
    def added(x, y):
        x.add_(y)
        return [x + y]

    function, x = Direct(added, {}), torch.ones(4)
    with torch.no_grad():
        for _ in range(2):
            assert goes_through_dynamo(lambda: function(x, x[:]))
        assert x.tolist() == [4.0] * 4


def test_a_reset_compiles_anew():
    function = Direct(scaled, {})
    x, factors = torch.ones(4), [torch.tensor(2.0), torch.tensor(3.0)]
    with torch.no_grad():
        function(x, factors)
        for _ in range(2):  # a second one too
            torch.compiler.reset()
            assert goes_through_dynamo(lambda: function(x, factors))
            assert not goes_through_dynamo(lambda: function(x, factors))


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


def test_a_copy_has_graphs_of_its_own():
    params = parameters(2)
    optimizer = MARS(params, lr=1e-2, compile=True)
    for seed in range(2):
        gradients(params, seed)
        optimizer.step()
    theirs, twin = copy.deepcopy((params, optimizer))
    gradients(params, 3)
    gradients(theirs, 3)
    optimizer.step()
    twin.step()
    for a, b in zip(params, theirs, strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
