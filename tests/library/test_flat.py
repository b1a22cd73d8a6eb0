"""Flat groups: stacks and leaves are the same optimizer."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import marsopt
from marsopt import MARS, REGISTRY, FlatGroup
from marsopt.optim import portions
from tests.stacking import as_on_a_gpu
from tests.table import ROWS

SHAPES = {
    "a": (6, 4),
    "scale": (4,),
    "b": (6, 4),
    "tall": (5, 3),
    "c": (6, 4),
    "bias": (4,),
}
MATRICES = {name: s for name, s in SHAPES.items() if len(s) == 2}
LR = 1e-2
CLOSE = dict(rtol=0, atol=1e-6)
TYPES = REGISTRY


def tensors(shapes, seed):
    """{name: random tensor}"""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


# ---- the container ----------------------------------------------------------------


@pytest.mark.parametrize("container", [dict, list, tuple])
def test_pack_and_unpack_round_trip(container):
    leaves = tensors(SHAPES, 0)
    leaves["half"] = torch.randn(6, 4).bfloat16()
    given = leaves if container is dict else container(leaves.values())
    flat = FlatGroup.pack(given)
    back = flat.unpack()
    pairs = (
        zip(given.items(), back.items(), strict=True)
        if container is dict
        else zip(enumerate(given), enumerate(back), strict=True)
    )
    for (name, x), (other, y) in pairs:
        assert name == other
        assert torch.equal(x, y) and x.dtype == y.dtype
        assert x.data_ptr() != y.data_ptr()
    assert [tuple(s.shape) for s in flat.stacks] == [
        (3, 6, 4),
        (2, 4),
        (1, 5, 3),
        (1, 6, 4),
    ]


def test_stacks_of_one_dtype_share_one_buffer_and_leaves_are_views():
    flat = FlatGroup.pack(tensors(SHAPES, 0))
    assert len({s.untyped_storage().data_ptr() for s in flat.stacks}) == 1
    flat.unpack()["b"].fill_(7.0)
    assert (flat["a (+2)"][1] == 7.0).all()
    assert "a (+2)" in repr(flat)


def test_pack_refuses_what_no_stack_can_hold():
    with pytest.raises(TypeError, match="expected a sequence or mapping"):
        FlatGroup.pack(torch.zeros(3))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"pass dict\(params.named_parameters\(\)\)"):
        FlatGroup.pack(model)
    with pytest.raises(TypeError, match=r"pass list\(params\)"):
        FlatGroup.pack(model.parameters())
    with pytest.raises(ValueError, match="got no parameters"):
        FlatGroup.pack([])
    with pytest.raises(ValueError, match="use one FlatGroup per device"):
        FlatGroup.pack([torch.zeros(2), torch.zeros(2, device="meta")])
    with pytest.raises(ValueError, match="real floating point"):
        FlatGroup.pack([torch.zeros(2, dtype=torch.int64)])


# ---- rules on stacks --------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_rule_on_stacks_is_the_rule_on_leaves(row):
    """Values, state, and purity, over five steps with clips at work."""
    shapes = MATRICES if row.matrix_only else SHAPES
    rule = row.rule(max_norm=0.7)
    x = tensors(shapes, 0)
    flat = FlatGroup.pack(x)
    s, t = rule.init(x), rule.init(flat)
    for i in range(5):
        g = tensors(shapes, 1 + i)
        before = [v.clone() for v in flat.stacks]
        x, s = rule.step(x, g, s, lr=LR)
        packed = FlatGroup.pack(g)
        new, t = rule.step(flat, packed, t, lr=LR)
        assert all(map(torch.equal, before, flat.stacks))
        flat = new
        torch.testing.assert_close(flat.unpack(), x, **CLOSE)
    for name in rule.matrix.kept:
        torch.testing.assert_close(t.buffers[name].unpack(), s.buffers[name], **CLOSE)


@pytest.mark.parametrize("mars_type", TYPES)
def test_the_routing_sees_leaves_in_stacks(mars_type):
    """A stack of vectors has two dims and is no matrix."""
    rule = marsopt.mars(
        mars_type=mars_type,
        base_lr=LR,
        lr_1d=2 * LR,
        ns_dtype=torch.float32,
        max_norm=0.7,
    )
    x = tensors(SHAPES, 0)
    flat = FlatGroup.pack(x)
    s, t = rule.init(x), rule.init(flat)
    for i in range(3):
        g = tensors(SHAPES, 1 + i)
        x, s = rule.step(x, g, s, lr=LR)
        flat, t = rule.step(flat, FlatGroup.pack(g), t, lr=LR)
    torch.testing.assert_close(flat.unpack(), x, **CLOSE)


def test_exact_mode_takes_a_flat_reference():
    rule = marsopt.rule("mars-adamw", is_approx=False)
    x, g, h = (tensors(SHAPES, i) for i in range(3))
    one, _ = rule.step(x, g, rule.init(x), lr=LR, reference=h)
    flat = FlatGroup.pack(x)
    two, _ = rule.step(
        flat,
        FlatGroup.pack(g),
        rule.init(flat),
        lr=LR,
        reference=FlatGroup.pack(h),
    )
    torch.testing.assert_close(two.unpack(), one, **CLOSE)


def test_a_whole_training_step_is_one_graph_on_a_flat_group():
    """Forward, backward and update, differentiated through the views."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)
    )
    rule = marsopt.mars(base_lr=LR, max_norm=1.0)
    x, y = torch.randn(16, 8), torch.randn(16, 8)

    def loss(flat):
        return (functional_call(model, flat.unpack(), x) - y).square().mean()

    def step(flat, state, lr):
        return rule.step(flat, grad(loss)(flat), state, lr=lr)

    flat = FlatGroup.pack({n: p.detach() for n, p in model.named_parameters()})
    state = rule.init(flat)
    once = torch.compile(step, fullgraph=True, backend="aot_eager")
    lr = torch.tensor(LR)
    a, b = step(flat, state, lr), once(flat, state, lr)
    assert isinstance(b[0], FlatGroup)
    for _ in range(3):
        a, b = step(*a, lr), once(*b, lr)
    torch.testing.assert_close(b[0].unpack(), a[0].unpack(), **CLOSE)
    assert loss(b[0]) < loss(flat)


# ---- the class: stacks (compiled) and leaves (eager) ------------------------------


def parameters(shapes=SHAPES, seed=0):
    return [nn.Parameter(x) for x in tensors(shapes, seed).values()]


def fill(params, seed, missing=()):
    grads = tensors({i: p.shape for i, p in enumerate(params)}, seed)
    for i, p in enumerate(params):
        p.grad = None if i in missing else grads[i]


def pair(**kw):
    """The same optimizer over leaves and over stacks; run both with ``walk``."""
    kw = dict(lr=LR, max_norm=0.7, ns_dtype=torch.float32) | kw
    a, b = parameters(), parameters()
    with mock.patch.object(portions, "SMALL", 0):
        leaves = MARS(a, compile=False, **kw)
    return (leaves, a), (MARS(b, compile=True, **kw), b)


def walk(optimizer, params, seeds, missing=()):
    """Stacks run eagerly: what is compiled is tested elsewhere, and takes longer."""
    with torch.compiler.set_stance("force_eager"):
        for seed in seeds:
            fill(params, seed, missing)
            optimizer.step()


def equal(one, two):
    torch.testing.assert_close(two[1], one[1], **CLOSE)
    a, b = (o.state_dict()["state"] for o, _ in (one, two))
    torch.testing.assert_close(b, a, **CLOSE)


@pytest.mark.parametrize("mars_type", TYPES)
@pytest.mark.parametrize("missing", [(), (2,), (0, 2, 4)], ids=str)
def test_stacks_are_leaves_to_the_class(mars_type, missing):
    one, two = pair(mars_type=mars_type)
    for each in (one, two):
        walk(*each, range(2))
        walk(*each, [2], missing)
        walk(*each, [3])
    equal(one, two)
    assert max(len(bucket.params) for bucket in two[0].describe().buckets) == 3


@pytest.mark.parametrize("mars_type", TYPES)
@pytest.mark.parametrize("missing", [(), (2,)], ids=str)
def test_calls_are_leaves_to_the_class(mars_type, missing, monkeypatch):
    """Large leaves on a CPU: those of a kind make calls of up to four."""
    monkeypatch.setattr(portions, "SMALL", 0)
    one, two = pair(mars_type=mars_type)
    for each in (one, two):
        walk(*each, range(2))
        walk(*each, [2], missing)
    equal(one, two)
    sizes = [len(call) for call in two[0].describe().calls]
    # a, b, c: three of a kind; scale, bias: two; tall
    assert sorted(sizes) == [1, 2, 3]
    assert not any(bucket.is_copied for bucket in two[0].describe().buckets)


def test_calls_take_kinds_that_are_as_frequent_together(monkeypatch):
    monkeypatch.setattr(portions, "SMALL", 5)
    shapes = {
        f"{kind}{i}": s for i in range(3) for kind, s in (("a", (3, 2)), ("b", (2, 4)))
    }
    shapes |= {"table": (7, 3), "scale": (4,), "bias": (4,)}
    params = parameters(shapes)
    optimizer = MARS(params, compile=True)
    buckets = optimizer.describe().buckets
    calls = [
        [(len(buckets[i].params), *buckets[i].shape) for i in call]
        for call in optimizer.describe().calls
    ]
    layer = [(1, 3, 2), (1, 2, 4)]
    assert sorted(calls) == sorted([layer, layer, layer, [(1, 7, 3), (2, 4)]])


def test_a_step_that_is_not_finite_changes_no_leaf_of_a_stack():
    _, (optimizer, params) = pair()
    walk(optimizer, params, [0])
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    fill(params, 1)
    params[2].grad[1, 1] = torch.inf
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    assert optimizer.num_skipped == 1
    torch.testing.assert_close((params, optimizer.state_dict()["state"]), before)


def test_compiled_stacks_are_the_eager_leaves():
    one, two = pair(mars_type="mars-shampoo")
    for seed in range(3):
        for optimizer, params in (one, two):
            fill(params, seed)
            optimizer.step()
    equal(one, two)


# ---- where tensors live -----------------------------------------------------------


def addresses(optimizer, params):
    """Where parameters, gradients and state lie."""
    held = [
        x
        for p in params
        for x in (p, p.grad, *optimizer.state[p].values())
        if x is not None
    ]
    return [(x.data_ptr(), x.untyped_storage().data_ptr()) for x in held]


@pytest.mark.parametrize("mars_type", ["mars-adamw", "moonlight", "soap"])
@pytest.mark.parametrize("small", [0, 2**16], ids=["leaves", "stacks"])
def test_nothing_moves(mars_type, small, monkeypatch):
    """Over construction, steps, a group that is added, and a load."""
    monkeypatch.setattr(portions, "SMALL", small)
    params = parameters()
    before = [(p.data_ptr(), p.untyped_storage().data_ptr()) for p in params]
    optimizer = MARS(params, lr=LR, mars_type=mars_type, compile=True)
    assert before == [(p.data_ptr(), p.untyped_storage().data_ptr()) for p in params]
    walk(optimizer, params, [0])
    before = addresses(optimizer, params)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
    assert addresses(optimizer, params) == before


def test_state_has_storages_of_its_own():
    optimizer, params = pair()[1]
    walk(optimizer, params, [0])
    held = [x for p in params for x in (p, *optimizer.state[p].values())]
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in held)
    assert len({x.data_ptr() for x in held if x.numel()}) == sum(
        x.numel() > 0 for x in held
    )


@pytest.mark.parametrize("mars_type", ["mars-adamw", "moonlight"])
def test_small_tensors_are_moved_as_large_ones(mars_type, monkeypatch):
    """Bit for bit, compiled."""
    found = []
    for small in (0, 2**16):
        monkeypatch.setattr(portions, "SMALL", small)
        params = parameters()
        optimizer = MARS(params, lr=LR, mars_type=mars_type, compile=True)
        for seed in range(3):
            fill(params, seed)
            optimizer.step()
        found.append((params, optimizer.state_dict()["state"]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize(
    "mars_type", ["muon", "moonlight", "mars-normuon", "soap-muon"]
)
@pytest.mark.parametrize("small", [0, 2**16], ids=["leaves", "stacks"])
def test_matrices_are_rows_of_one_batch(mars_type, small, monkeypatch):
    """As on a GPU: the numbers are those without batches."""
    monkeypatch.setattr(portions, "SMALL", small)
    found = []
    for is_gpu in (False, True):
        with monkeypatch.context() as patch:
            if is_gpu:
                as_on_a_gpu(patch)
            params = parameters()
            optimizer = MARS(
                params, lr=LR, mars_type=mars_type, compile=True, ns_dtype=torch.float32
            )
            walk(optimizer, params, range(3))
        found.append((params, optimizer.state_dict()["state"]))
    torch.testing.assert_close(*found, **CLOSE)


@pytest.mark.parametrize("how", ["view", "shared", "slice"])
def test_whoever_looks_into_a_parameter_sees_steps(how):
    one, params = pair()[0], parameters()
    if how == "view":
        other = params[2].data
    elif how == "shared":
        other = params[2].data.share_memory_()
    else:
        other = torch.cat([params[2].data, torch.zeros(1, 4)])
        params[2].data = other[:6]
    optimizer = MARS(params, lr=LR, max_norm=0.7, compile=True)
    for each in (one, (optimizer, params)):
        walk(*each, range(3))
    equal(one, (optimizer, params))
    assert torch.equal(other[:6], params[2].detach())


def test_a_parameter_that_is_given_other_storage_is_followed():
    one, two = pair()
    for optimizer, params in (one, two):
        walk(optimizer, params, [0])
        params[4].data = params[4].data.clone() + 1
        walk(optimizer, params, [1, 2])
    equal(one, two)


def test_a_graph_of_before_the_step_notices_it():
    _, (optimizer, params) = pair()
    walk(optimizer, params, [0])
    loss = (params[0] * params[2]).sum()
    walk(optimizer, params, [1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_in_the_same_memory_are_refused():
    base = torch.zeros(8)
    for a, b in ((base, base), (base[:5], base[4:])):
        with pytest.raises(ValueError, match="in the same memory"):
            MARS([nn.Parameter(a), nn.Parameter(b)])
    MARS([nn.Parameter(base[:4]), nn.Parameter(base[4:])])


def test_a_leaf_that_is_cast_leaves_its_stack():
    _, (optimizer, params) = pair()
    walk(optimizer, params, [0])
    before = params[0].detach().clone()
    params[2].data = params[2].data.bfloat16()
    for p in params:
        p.grad = None
    params[2].grad = torch.ones(6, 4, dtype=torch.bfloat16)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    assert [p.dtype for p in params[:3]] == [torch.float32] * 2 + [torch.bfloat16]
    assert torch.equal(params[0], before)


def test_gradients_of_two_precisions_in_one_stack():
    one, two = pair()
    for optimizer, params in (one, two):
        fill(params, 0)
        params[0].grad_dtype = None
        params[0].grad = params[0].grad.bfloat16()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    equal(one, two)


def test_grads_packed_in_another_order_are_refused():
    rule = marsopt.rule("lion")
    flat = FlatGroup.pack(tensors({"a": (3,), "b": (3,), "c": (3,)}, 0))
    other = FlatGroup.pack(tensors({"a": (3,), "c": (3,), "b": (3,)}, 0))
    with pytest.raises(ValueError, match="packed otherwise"):
        rule.step(flat, other, rule.init(flat), lr=1.0)
    routed = marsopt.mars()
    with pytest.raises(ValueError, match="packed otherwise"):
        routed.step(flat, other, routed.init(flat), lr=1.0)


def test_state_that_was_cleared_starts_anew():
    _, (optimizer, params) = pair()
    walk(optimizer, params, [0])
    optimizer.state[params[2]].clear()
    walk(optimizer, params, [1])
    assert float(optimizer.state[params[2]]["step"]) == 1.0
    assert float(optimizer.state[params[0]]["step"]) == 2.0


def test_betas_changed_in_place_are_followed():
    one, two = pair(), pair()
    for (optimizer, params), late in zip((one[0], two[0]), (False, True), strict=True):
        group = optimizer.param_groups[0]
        group["betas"] = [0.95, 0.99]
        walk(optimizer, params, [0])
        if late:
            group["betas"][0] = 0.5
        else:
            group["betas"] = (0.5, 0.99)
        walk(optimizer, params, [1])
    equal(one[0], two[0])


def test_a_resized_parameter_is_refused():
    for optimizer, params in pair():
        walk(optimizer, params, [0])
        params[2].grad = None
        params[2].data = torch.zeros(7, 4)
        with pytest.raises(
            ValueError, match=r"parameter 2 of group 0, expected .* \(7, 4\)"
        ):
            walk(optimizer, params, [1])


def test_gradients_of_any_strides():
    one, two = pair()
    for seed in range(3):
        for optimizer, params in (one, two):
            fill(params, seed)
            for p in params[2:4]:  # in a stack, and alone
                p.grad = p.grad.t().contiguous().t()
            params[1].grad = torch.full((1,), 0.1).expand(4)
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
    equal(one, two)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "moonlight"])
def test_a_step_writes_no_gradient(mars_type):
    for optimizer, params in pair(mars_type=mars_type):
        walk(optimizer, params, [0])
        before = [p.grad.clone() for p in params]
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        torch.testing.assert_close([p.grad for p in params], before, rtol=0, atol=0)


def test_h_in_half_precision():
    """A quarter of the state's growth by MARS; rounding h is all that it changes."""
    one, _ = pair()
    _, two = pair(h_dtype=torch.bfloat16)
    for each in (one, two):
        walk(*each, range(4))
    assert two[0].state[two[1][0]]["last_grad"].dtype == torch.bfloat16
    assert two[0].state[two[1][0]]["exp_avg"].dtype == torch.float32
    difference = max((a - b).abs().max() for a, b in zip(one[1], two[1], strict=True))
    assert 0 < difference < 1e-2 * 4 * LR


def test_moments_narrower_than_the_parameter_are_refused():
    with pytest.raises(ValueError, match="nothing narrower than the parameter"):
        MARS(parameters(), state_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="nothing narrower than the parameter"):
        marsopt.rule("adamw", state_dtype=torch.bfloat16).init(parameters())


def test_a_copy_of_the_optimizer_is_its_own():
    _, (optimizer, params) = pair()
    walk(optimizer, params, [0])
    other = copy.deepcopy(optimizer)
    theirs = other.param_groups[0]["params"]
    walk(other, theirs, [1])
    before = [p.clone() for p in params]
    walk(other, theirs, [2])
    assert all(map(torch.equal, before, params))
    walk(optimizer, params, [1, 2])
    torch.testing.assert_close(theirs, params, **CLOSE)


# ---- graphs -----------------------------------------------------------------------


def count_graphs(mars_type, num_layers, monkeypatch):
    """How many graphs, and nodes in them, two steps of a GPT-2-like model compile."""
    shapes = {"wte": (9, 4), "wpe": (6, 4), "last": (4,)}
    for i in range(num_layers):
        block = {"ln": (4,), "qkv": (12, 4), "proj": (4, 4), "fc": (16, 4)}
        shapes |= {f"{name}.{i}": shape for name, shape in block.items()}
    params = parameters(shapes)
    optimizer = MARS(params, mars_type=mars_type, max_norm=1.0, compile=True)
    found = []

    def backend(graph, _, **options):
        found.append(len(graph.graph.nodes))
        return graph.forward

    real = torch.compile
    marsopt.optim.compiled.graph_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            torch, "compile", lambda f, **own: real(f, **{**own, "backend": backend})
        )
        for seed in range(2):
            fill(params, seed)
            optimizer.step()
    return len(found), sum(found)


@pytest.mark.parametrize(
    ("mars_type", "small", "num_graphs"),
    [
        ("mars-adamw", 2**16, 2),
        # norms, update and what follows owners, for each of two calls
        ("mars-shampoo", 5, 6),
    ],
)
def test_graphs_do_not_grow_with_depth(mars_type, small, num_graphs, monkeypatch):
    monkeypatch.setattr(portions, "SMALL", small)
    shallow = count_graphs(mars_type, 2, monkeypatch)
    assert shallow[0] == num_graphs
    assert count_graphs(mars_type, 12, monkeypatch) == shallow


# torch 2.11 warns of what key_averages does at the end of every profile
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_passes_are_named_in_a_profilers_trace():
    optimizer, params = pair(mars_type="mars-shampoo")[0]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as trace:
        walk(optimizer, params, [0])
    seen = {event.key for event in trace.key_averages()}
    assert seen >= {
        "marsopt: gather",
        "marsopt: norms",
        "marsopt: update",
        "marsopt: matrices",
        "marsopt: scatter",
    }
