"""State in eight bits: right on average, at most a code apart, never 0 where a step
divides by it; and the same for every runner and every door.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import marsopt
from marsopt import MARS, REGISTRY, FlatGroup
from marsopt.parallel import MeshCollectives
from marsopt.rules.formats import CODED, SCALE, SPAN, TOP, decode, encode
from tests import dcp_states
from tests.processes import spawn

INT8 = dict(state_dtype=CODED)
BF16, F32 = torch.bfloat16, torch.float32
LR, STEPS = 0.01, 4
# two tensors with codes; a vector, a small tensor and an odd row length without
SHAPES = {"tall": (96, 64), "wide": (40, 192), "b": (8192,), "small": (6, 64)}
SHAPES |= {"odd": (80, 60)}
CODES = ("tall", "wide")


def tree(seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(s, generator=g) for n, s in SHAPES.items()}


# ---- one number ----------------------------------------------------------------------


def values(are_squares):
    """Rows of all sizes, a row and spans of zeros, and a number among zeros."""
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([1e-15, 1e-9, 1.0, 1e4, 1e15, 0.0])[:, None]
    x[1, :64], x[2, 64:127] = 0.0, 0.0
    return x * x if are_squares else x


def step_of(x, scales, are_squares):
    """The distance to the next code, by the scale and the size of x."""
    scale = scales.float().repeat_interleave(SPAN, 1)
    if are_squares:
        return 2 * x.sqrt() * scale / 255 + (scale / 255) ** 2
    # of y = k / (2 TOP - k)
    return (x.abs() + scale) ** 2 / (2 * TOP * scale).clamp(min=1e-45) * 1.02


@pytest.mark.parametrize("are_squares", [False, True])
def test_codes_are_right_on_average_and_at_most_a_step_away(are_squares):
    x = values(are_squares)
    total, every = torch.zeros_like(x, dtype=torch.float64), range(0, 2**16, 256)
    for number in every:
        noise = torch.full(x.shape, number, dtype=torch.int32)
        codes, scales = encode(x, noise, are_squares)
        assert (codes.dtype, scales.dtype) == (CODED, BF16)
        found = decode(codes, scales, are_squares)
        step = step_of(x, scales, are_squares)
        assert ((found - x).abs() <= step * 1.001).all()
        assert torch.equal(found.sign(), x.sign()) or not are_squares
        assert (found * x >= 0).all()
        total += found.double()
    step = step_of(x, scales, are_squares)
    off = (total / len(every) - x).abs() / torch.where(step > 0, step, 1.0)
    is_least = are_squares & (x < (scales.repeat_interleave(SPAN, 1) / 255) ** 2)
    assert off[~is_least].max() < 1 / 256 + 1e-3  # of a step, by so many noises
    assert not codes[5].any() and not scales[5].any()
    assert not decode(codes, scales, are_squares)[1, :64].any()


def test_a_square_above_zero_has_a_root_above_zero():
    x = torch.full((1, SPAN), 1e-12)
    x[0, 0], x[0, 1] = 1.0, 0.0
    codes, scales = encode(x, torch.zeros(1, SPAN, dtype=torch.int32), True)
    found = decode(codes, scales, True)[0]
    assert found[1] == 0 and (found[2:] > 1e-6).all()


# ---- rules ---------------------------------------------------------------------------

KINDS = [
    (name, correction)
    for name, rule in REGISTRY.items()
    for correction in (("approximate", "exact") if rule.is_mars else (None,))
]


def give(params, seed):
    for n, x in tree(1000 + seed, 0.1).items():
        params[n].grad = x.to(params[n].dtype)


def built(mars_type="mars-adamw", start=None, **options):
    params = {n: nn.Parameter(x) for n, x in (start or tree(0)).items()}
    own = dict(mars_type=mars_type, lr=LR, max_norm=3.0, ns_dtype=F32, compile=False)
    return params, MARS(params.items(), **own | INT8 | options)


def walk(params, optimizer, steps=range(STEPS)):
    for t in steps:
        give(params, 100 + t)
        optimizer.update_previous_grad()  # exact alone does something
        give(params, t)
        optimizer.step()
        optimizer.update_last_grad()
    return {n: p.detach() for n, p in params.items()}


@pytest.mark.parametrize(("mars_type", "correction"), KINDS)
def test_every_rule_keeps_codes_near_float32(mars_type, correction):
    options = dict(correction=correction)
    if "soap" in mars_type:
        options |= dict(sides="short", eps=0.01)
    (params, optimizer), (others, wide) = (
        built(mars_type, **options, state_dtype=dtype) for dtype in (CODED, None)
    )
    found, wanted = walk(params, optimizer), walk(others, wide)
    start, largest = tree(0), 0.15 if "lion" in mars_type else 0.06
    for n, x in found.items():
        moved = (wanted[n] - start[n]).norm()
        error = (x - wanted[n]).norm() / moved
        assert error < (largest if n in CODES else 1e-5), n
        state = optimizer.state[params[n]]
        coded = {key for key, value in state.items() if value.dtype == CODED}
        assert {key + SCALE for key in coded} == {k for k in state if SCALE in k}
        averages = {
            buffer.key
            for buffer in optimizer.describe().members[0].algorithm.buffers.values()
            if buffer.home == "shard"
        }
        for key in coded:
            assert state[key].shape == x.shape
            assert state[key + SCALE].shape == (x.shape[0], x.shape[1] // SPAN)
            assert state[key + SCALE].dtype == BF16
        is_caller = "last_grad" in state and correction == "exact"
        if n in CODES:
            assert coded >= {"exp_avg", "exp_avg_sq"} & state.keys() & averages
            assert ("last_grad" in coded) != is_caller or "last_grad" not in state
        else:
            assert not coded and all(v.dtype == F32 for v in state.values()), n


@pytest.mark.parametrize("mars_type", ["adamw", "moonlight", "lion"])
def test_functions_flat_groups_and_the_class_agree(mars_type):
    own = dict(ns_dtype=F32) if mars_type == "moonlight" else {}
    rule = marsopt.rule(mars_type, max_norm=3.0, **own, **INT8)
    start = {n: x for n, x in tree(0).items() if n in CODES}
    everything = {n: x for n, x in tree(0).items() if x.ndim > 1}

    def grads(seed, names):
        return {n: x for n, x in tree(1000 + seed, 0.1).items() if n in names}

    def stepped(names, pack):
        params = pack({n: x for n, x in tree(0).items() if n in names})
        state = rule.init(params)
        for t in range(STEPS):
            before = copy.deepcopy(state)
            new, after = rule.step(params, pack(grads(t, names)), state, lr=LR)
            torch.testing.assert_close(before, state, rtol=0, atol=0)  # pure
            params, state = new, after
        return params, state

    loose, state = stepped([*everything], dict)
    params = {n: nn.Parameter(x) for n, x in everything.items()}
    _, optimizer = built(mars_type, everything)
    params = dict(zip(params, optimizer.param_groups[0]["params"], strict=True))
    for t in range(STEPS):
        for n, g in grads(t, everything).items():
            params[n].grad = g
        optimizer.step()
    for n, p in params.items():
        torch.testing.assert_close(p.detach(), loose[n], rtol=1e-5, atol=1e-6)
    for n in CODES:
        entry = optimizer.state[params[n]]
        for symbol, buffer in rule.matrix.buffers.items():
            assert torch.equal(entry[buffer.key], state.buffers[symbol][n]), symbol
    assert not state.buffers["m" + SCALE]["odd"].numel()
    alone, _ = stepped([*start], dict)
    flat, packed = stepped([*start], FlatGroup.pack)
    for n, x in flat.unpack().items():
        torch.testing.assert_close(x, alone[n], rtol=1e-5, atol=1e-6)
    assert packed.skipped == 0


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
def test_compiled_equals_eager(mars_type):
    ends = []
    for compile in (False, True):
        params, optimizer = built(mars_type, compile=compile, splits=2)
        walk(params, optimizer)
        ends.append((params, optimizer))
    (params, eager), (others, graphs) = ends
    for n, p in params.items():
        torch.testing.assert_close(p, others[n], rtol=0, atol=2e-3)
        for key, value in eager.state[p].items():
            far = (value.float() - graphs.state[others[n]][key].float()).abs()
            if value.dtype == CODED:  # sums have another order there
                assert far.max() <= 1 and (far > 0).float().mean() < 0.01, (n, key)


def test_an_average_does_not_stand_still():
    """v with beta2 = 0.999, whose steps are a hundredth of a code."""
    rule = marsopt.rule("adamw", betas=(0.9, 0.999), **INT8)
    params, g = [torch.zeros(64, 64)], torch.Generator().manual_seed(0)
    exact, state = marsopt.rule("adamw", betas=(0.9, 0.999)), rule.init(params)
    wanted = exact.init(params)
    for t in range(200):
        grads = [(1.0 if t < 50 else 0.1) * torch.randn(64, 64, generator=g)]
        _, state = rule.step(params, grads, state, lr=0.0)
        _, wanted = exact.step(params, grads, wanted, lr=0.0)
    for symbol, are_squares in (("m", False), ("v", True)):
        codes, scales = (state.buffers[symbol + end][0] for end in ("", SCALE))
        got = decode(codes, scales, are_squares).double()
        error = got - wanted.buffers[symbol][0].double()
        assert error.std() < 0.15 * got.square().mean().sqrt()
        assert abs(error.mean()) < 4 * error.std() / 64, symbol


@pytest.mark.parametrize("scale", [1e-9, 1e4])
@pytest.mark.parametrize("eps", [1e-30, 1e-8])
def test_gradients_of_any_size_move_as_far(scale, eps):
    g = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * scale
    ends = []
    for dtype in (None, CODED):
        p = nn.Parameter(torch.zeros(64, 128))
        optimizer = MARS([p], mars_type="adamw", lr=LR, eps=eps, weight_decay=0.0,
                         state_dtype=dtype, compile=False)  # fmt: skip
        for _ in range(STEPS):
            p.grad = g
            optimizer.step()
        ends.append(p.detach())
    assert (ends[0] - ends[1]).norm() < 0.05 * ends[0].norm()


def test_rows_without_gradients_stay():
    p = nn.Parameter(torch.ones(128, 64))
    optimizer = MARS([p], mars_type="adamw", lr=LR, weight_decay=0.0, compile=False,
                     **INT8)  # fmt: skip
    for t in range(STEPS):
        p.grad = torch.zeros_like(p)
        p.grad[[3, 70 + t]] = torch.randn(2, 64)
        optimizer.step()
    still = torch.ones(128, dtype=torch.bool)
    still[[3, *(70 + t for t in range(STEPS))]] = False
    assert (p[still] == 1).all() and (p[~still] != 1).any(1).all()
    assert p.isfinite().all()
    assert all(
        not optimizer.state[p][k][still].any() for k in ("exp_avg", "exp_avg_sq")
    )


def test_a_skipped_step_keeps_every_bit_and_a_replay_has_the_same():
    params, optimizer = built()
    walk(params, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    kept = {n: p.detach().clone() for n, p in params.items()}
    give(params, 9)
    params["tall"].grad[0, 0] = torch.nan
    optimizer.step()
    assert optimizer.num_skipped == 1
    same(optimizer.state_dict(), before)
    first, second = ({}, {})
    for end in (first, second):
        with torch.no_grad():
            for n, p in params.items():
                p.copy_(kept[n])
        optimizer.load_state_dict(before)
        end |= {n: x.clone() for n, x in walk(params, optimizer, [7]).items()}
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(BF16, None), (BF16, 24), (BF16, 32), (torch.float64, None)]
)
def test_parameters_of_other_dtypes_and_master_weights(dtype, bits):
    start = {n: x.to(dtype) for n, x in tree(0).items()}
    params, optimizer = built("adamw", start, master_weight_bits=bits)
    walk(params, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    same(optimizer.state_dict(), saved)
    for n, p in params.items():
        state = optimizer.state[p]
        wide = torch.promote_types(dtype, F32)
        assert state["exp_avg"].dtype == (CODED if n in CODES else wide)
    assert all(p.isfinite().all() for p in params.values())


def test_what_stays_wide():
    """Squares of which the largest so far is kept, and buffers of owners."""
    params, optimizer = built("adamw", amsgrad=True)
    walk(params, optimizer)
    state = optimizer.state[params["tall"]]
    assert state["max_exp_avg_sq"].dtype == F32 and state["exp_avg_sq"].dtype == F32
    assert state["exp_avg"].dtype == CODED
    for name in ("soap", "normuon"):
        params, optimizer = built(name)
        for p in params.values():
            for key, value in optimizer.state[p].items():
                assert value.dtype == F32 or value.dtype == CODED or SCALE in key


def same(got, wanted):
    torch.testing.assert_close(got["state"], wanted["state"], rtol=0, atol=0)


def test_torchs_transforms_take_the_step():
    """A graph without a break, vmap, and a derivative by the rate, which ends at
    codes.
    """
    rule, params, grads = marsopt.rule("mars-adamw", **INT8), tree(0), tree(1)
    state = rule.init(params)
    wanted = rule.step(params, grads, state, lr=LR)

    def step(lr):
        return rule.step(params, grads, state, lr=lr)

    graph = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(graph(torch.tensor(LR)), wanted)
    for n, x in torch.vmap(lambda lr: step(lr)[0])(torch.tensor([LR, 0.0])).items():
        torch.testing.assert_close(x, torch.stack([wanted[0][n], params[n]]))
    lr = torch.tensor(LR, requires_grad=True)
    (found,) = torch.autograd.grad(step(lr)[0]["tall"].sum(), lr)
    change = (wanted[0]["tall"] - params["tall"]).sum()
    torch.testing.assert_close(found, change / LR, rtol=1e-3, atol=1e-3)


# ---- saved ---------------------------------------------------------------------------


def test_state_is_saved_and_loaded_to_the_bit():
    params, optimizer = built()
    walk(params, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    others, other = built(start={n: p.detach().clone() for n, p in params.items()})
    other.load_state_dict(saved)
    same(other.state_dict(), saved)
    ends = walk(params, optimizer, [8, 9]), walk(others, other, [8, 9])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "moonlight"])
def test_codes_and_float32_load_into_each_other(mars_type):
    (params, coded), (others, wide) = (
        built(mars_type, state_dtype=dtype) for dtype in (CODED, None)
    )
    walk(params, coded), walk(others, wide)
    before = copy.deepcopy(wide.state_dict())
    wide.load_state_dict(coded.state_dict())
    for n, p in params.items():
        for key, value in wide.state[others[n]].items():
            codes = coded.state[p][key]
            assert value.dtype == F32 and SCALE not in key
            if codes.dtype == CODED:
                scales = coded.state[p][key + SCALE]
                codes = decode(codes, scales, key == "exp_avg_sq")
            assert torch.equal(value, codes), (n, key)
    coded.load_state_dict(before)  # to nearest
    for n, p in params.items():
        for key, value in coded.state[p].items():
            if value.dtype != CODED:
                continue
            x = before["state"][[*params].index(n)][key]
            scales, are_squares = coded.state[p][key + SCALE], key == "exp_avg_sq"
            far = (decode(value, scales, are_squares) - x).abs()
            assert (far <= 0.51 * step_of(x, scales, are_squares)).all()


@pytest.mark.parametrize("dtype", [CODED, None])
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"exp_avg" + SCALE: None}, "got a tensor of torch.int8 as 'exp_avg'"),
        ({"exp_avg" + SCALE: torch.ones(1, 1)}, "got a tensor of torch.int8 as 'exp_a"),
        ({"exp_avg": torch.tensor(1, dtype=CODED)}, "got a tensor of torch.int8 as 'e"),
        (
            {"exp_avg": torch.tensor(1.0)},
            r"got exp_avg of shape \(\) for parameter 'ta",
        ),
    ],
)
def test_codes_without_scales_are_refused(dtype, entry, message):
    saved = built()[1].state_dict()
    of_tall = saved["state"][0]
    saved["state"][0] = {n: x for n, x in (of_tall | entry).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        built(state_dtype=dtype)[1].load_state_dict(saved)


def test_state_of_torch_becomes_codes_and_goes_back():
    params = {n: nn.Parameter(x) for n, x in tree(0).items()}
    theirs = torch.optim.AdamW(params.values(), lr=LR)
    for t in range(STEPS):
        give(params, t)
        theirs.step()
    others, ours = built("adamw", {n: p.detach().clone() for n, p in params.items()})
    ours.load_state_dict([theirs.state_dict()])
    _, back = marsopt.to_torch(ours)
    for n, p in params.items():
        for key in ("exp_avg", "exp_avg_sq"):
            x, found = theirs.state[p][key], back.state[others[n]][key]
            assert found.dtype == F32
            assert (found - x).norm() < 0.02 * x.norm()
    give(params, 9), give(others, 9)
    theirs.step(), back.step()
    assert back.state[others["tall"]]["step"] == STEPS + 1


def test_a_parameter_that_changes_its_layout_keeps_its_averages():
    params, optimizer = built("adamw")
    walk(params, optimizer)
    p = params["tall"]
    state = optimizer.state[p]
    m = decode(state["exp_avg"], state["exp_avg" + SCALE], False)
    p.data = p.data.mT.contiguous().mT
    give(params, 5)
    before = m.clone()
    optimizer.step()
    state = optimizer.state[p]
    assert state["exp_avg"].dtype == F32 and "exp_avg" + SCALE not in state
    torch.testing.assert_close(state["step"], torch.tensor(STEPS + 1.0))
    wanted = torch.lerp(before, p.grad * optimizer_clip(optimizer), 0.1)
    torch.testing.assert_close(state["exp_avg"], wanted, rtol=1e-4, atol=1e-6)


def test_a_pure_step_takes_any_layout():
    rule, x, g = marsopt.rule("mars-adamw", **INT8), tree(0), tree(1)
    ends = []
    for laid in (torch.clone, lambda x: x.mT.contiguous().mT if x.ndim > 1 else x):
        params = {n: laid(value) for n, value in x.items()}
        state = rule.init(params)
        for _ in range(2):
            params, state = rule.step(params, g, state, lr=LR)
        params = {n: laid(value) for n, value in params.items()}
        ends.append(rule.step(params, g, state, lr=LR))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def optimizer_clip(optimizer):
    return min(1.0, 3.0 / float(optimizer.grad_norm + 1e-6))


def test_an_entry_without_a_scale_restarts():
    params, optimizer = built("adamw")
    walk(params, optimizer)
    state = optimizer.state[params["tall"]]
    del state["exp_avg_sq" + SCALE]
    give(params, 5)
    optimizer.step()
    others, fresh = built("adamw")
    give(others, 5)
    fresh.step()
    wanted = fresh.state[others["tall"]]
    assert state["step"] == 1
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[key + SCALE], wanted[key + SCALE])


# ---- refused -------------------------------------------------------------------------


def test_what_is_refused():
    for build in (partial(marsopt.rule, "mars-adamw"), marsopt.mars):
        with pytest.raises(ValueError, match=r"got h_dtype=torch.int8, expected a fl"):
            build(h_dtype=torch.int8)
        with pytest.raises(ValueError, match=r"got state_dtype=torch.uint8, expected"):
            build(state_dtype=torch.uint8)
    rule = marsopt.rule("adamw", **INT8)
    plain = marsopt.rule("adamw")
    params = {"w": torch.ones(64, 64)}
    with pytest.raises(ValueError, match=r"got a state without m_scale, expected one"):
        rule.step(params, params, plain.init(params), lr=LR)
    with pytest.raises(ValueError, match=r"got a state of \['m', 'm_scale'"):
        plain.step(params, params, rule.init(params), lr=LR)


# ---- sharded -------------------------------------------------------------------------

ROWS, COLUMNS, COPY = Shard(0), Shard(1), Replicate()
PLACES = {  # the mesh, and the placements of "cut", and of other tensors
    "1 rank": ((1,), [ROWS], [ROWS]),
    "3 ranks": ((3,), [ROWS], [ROWS]),
    "columns": ((2,), [COLUMNS], [ROWS]),
    "HSDP": ((2, 2), [COPY, ROWS], [COPY, ROWS]),
    "two axes": ((2, 2), [ROWS, COLUMNS], [ROWS, COPY]),
}
CUT = {"cut": (50, 128), "tall": (96, 64), "b": (30,)}
OF_RULES = ("mars-adamw", "mars-m", "normuon")


def drawn(seed):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g) for n, s in CUT.items()}


def of_rule(name, put, **more):
    """Parameters and an optimizer after steps."""
    params = {n: nn.Parameter(put(n, x)) for n, x in drawn(0).items()}
    own = dict(mars_type=name, lr=LR, max_norm=3.0, ns_dtype=F32, compile=False)
    optimizer = MARS(params.items(), **own | INT8 | more)
    for t in range(STEPS):
        for n, x in drawn(1 + t).items():
            params[n].grad = put(n, x)
        optimizer.step()
    return params, optimizer


def wholes(params, optimizer):
    """Parameters and their state in shards, whole."""
    found = {n: whole(p.detach()) for n, p in params.items()}
    for n, p in params.items():
        state = {k: v for k, v in optimizer.state[p].items() if "row_" not in k}
        found |= {f"{n} {key}": whole(value) for key, value in state.items()}
    return found


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def sharded(rank, world, name):
    mesh_shape, of_cut, others = PLACES[name]
    mesh = init_device_mesh("cpu", mesh_shape)

    def put(n, x):
        places = of_cut if n == "cut" else others
        return distribute_tensor(x, mesh, places, src_data_rank=None)

    found = {}
    for rule in OF_RULES:
        own = dict(collectives=MeshCollectives(mesh))
        params, optimizer = of_rule(rule, put, **own)
        for p in params.values():
            for key, value in optimizer.state[p].items():
                if SCALE in key:
                    assert value.placements == p.placements
                    assert value.shape == (p.shape[0], p.shape[1] // SPAN)
                    rows, cols = p.to_local().shape
                    assert value.to_local().shape == (rows, cols // SPAN)
        found[rule] = wholes(params, optimizer)
        again = wholes(*of_rule(rule, put, **own))
        torch.testing.assert_close(again, found[rule], rtol=0, atol=0)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("name", PLACES)
def test_shards_have_codes_of_their_own_and_replicas_the_same(name):
    """As one process has them, to the errors of codes; with one rank to the bit."""
    first, *others = spawn(sharded, torch.Size(PLACES[name][0]).numel(), name)
    for found in others:
        torch.testing.assert_close(found, first, rtol=0, atol=0)
    for rule, found in first.items():
        alone = wholes(*of_rule(rule, lambda n, x: x))
        exact = wholes(*of_rule(rule, lambda n, x: x, state_dtype=None))
        if name == "1 rank":
            torch.testing.assert_close(found, alone, rtol=0, atol=0)
        for n, start in drawn(0).items():
            moved = (exact[n] - start).norm()
            assert (found[n] - exact[n]).norm() < 0.03 * moved, (rule, n)
        for key, value in found.items():
            if value.dtype == CODED:
                x = decode(value, found[key + SCALE], key.endswith("exp_avg_sq"))
                assert (x - exact[key]).norm() < 0.05 * exact[key].norm(), (rule, key)


def uncut(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x = distribute_tensor(torch.ones(64, 64), mesh, [COLUMNS])
    said = []
    for build in (
        lambda: MARS([nn.Parameter(x)], collectives=MeshCollectives(mesh), **INT8),
        lambda: marsopt.rule("adamw", **INT8).init(
            [x], collectives=MeshCollectives(mesh)
        ),
    ):
        with pytest.raises(ValueError) as caught:
            build()
        said.append(str(caught.value))
    return said


@pytest.mark.processes
def test_a_mesh_that_cuts_elements_of_one_scale_is_refused():
    for said in spawn(uncut, 2):
        for text in said:
            assert "got a piece of shape (64, 32)" in text
            assert "expected contiguous rows of a multiple of 64 columns" in text


def legs(rank, world, folder, first, last):
    """Whole parameters and state at the start, and after steps, under FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 64))
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh)
    optimizer = MARS(
        model.named_parameters(),
        mars_type="mars-adamw",
        collectives=MeshCollectives(mesh),
        compile=False,
        **INT8,
    )
    if first:
        dcp_states.load(model, optimizer, f"{folder}/{first}")
    params = dict(model.named_parameters())
    start = wholes(params, optimizer)
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(first, last):
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp_states.save(model, optimizer, f"{folder}/{last}")
    return start, wholes(params, optimizer)


@pytest.mark.processes
def test_a_checkpoint_has_its_codes_on_other_numbers_of_ranks(tmp_path):
    end = {}
    for world, first, last in ((2, 0, 2), (3, 2, 3), (1, 3, 4)):
        found = spawn(legs, world, str(tmp_path), first, last)
        for start, _ in found if first else ():
            torch.testing.assert_close(start, end, rtol=0, atol=0)
        _, end = found[0]
    assert end["0.weight exp_avg"].dtype == CODED
    assert end["2.weight exp_avg"].dtype == F32  # rows of 100
