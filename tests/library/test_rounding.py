"""State of bfloat16, rounded stochastically: right on average, pure, and the same for
equal layouts of memory and shards.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import marsopt
from marsopt import MARS, REGISTRY, FlatGroup
from marsopt.parallel import MeshCollectives
from marsopt.rules import numerics
from marsopt.step.leaf import seeds_of
from tests.processes import spawn

BF16 = torch.bfloat16
NARROW = dict(state_dtype=BF16, stochastic_rounding=True)
ALL_NOISE = torch.arange(2**16, dtype=torch.int32)
SHAPES = {"wide": (24, 40), "tall": (40, 24), "odd": (5, 7), "one": (1, 6), "b": (30,)}
STEPS = 4


def generator(seed):
    return torch.Generator().manual_seed(seed)


def tree(seed, scale=1.0):
    g = generator(seed)
    return {n: scale * torch.randn(s, generator=g) for n, s in SHAPES.items()}


def next_up(x):
    """The neighbour of bfloat16 numbers that is farther from zero."""
    return (x.view(torch.int16) + 1).view(BF16)


# ---- one number ----------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-140, -130, -126, -40, 0, 40, 126])
def test_the_mean_over_all_noise_is_the_value_itself(exponent):
    g = generator(exponent + 200)
    values = torch.randn(16, generator=g) * 2.0**exponent
    for value in values.clamp(-numerics.LARGEST_NARROW, numerics.LARGEST_NARROW):
        found = numerics.stochastic(value.expand(2**16), ALL_NOISE)
        assert found.double().mean() == value.double()
        low = (value.view(torch.int32) & ~0xFFFF).view(torch.float32).to(BF16)
        assert ((found == low) | (found == next_up(low))).all()


def test_what_bfloat16_holds_stays():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16)
    for noise in (0, 1, 2**15, 2**16 - 1):
        found = numerics.stochastic(every.float(), torch.tensor(noise).int())
        assert torch.equal(found.nan_to_num(7), every.nan_to_num(7))
        assert torch.equal(found.isnan(), every.isnan())


def test_what_is_finite_stays_finite():
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, numerics.LARGEST_NARROW, 3.3896e38])
    for noise in (0, 2**16 - 1):
        found = numerics.stochastic(values, torch.tensor(noise).int())
        assert found.isfinite().all()
        assert torch.equal(
            found.float().abs(), torch.full((4,), numerics.LARGEST_NARROW)
        )


def test_wider_numbers_and_derivatives():
    value = torch.tensor([1.001, -3.3], dtype=torch.float64, requires_grad=True)
    found = numerics.stochastic(value, torch.tensor([0, 2**16 - 1]).int())
    assert found.tolist() == [1.0, -3.3125]
    found.float().sum().backward()
    assert value.grad.tolist() == [1.0, 1.0]


# ---- noise ---------------------------------------------------------------------------

SIGMAS = 5  # of some 2000 statistics, each of many numbers


def unit(noise):
    """As numbers of mean 0 and variance 1."""
    return ((noise.double() + 0.5) / 2**16 - 0.5) * 12**0.5


def of(t, number, start=0, num=2**17, place=7):
    """Noise of step t, of the tensor of this place in the tree."""
    index = torch.arange(start, start + num)
    seeds = torch.tensor(seeds_of(place, torch.Size([num]), {}, 1))
    key = numerics.step_key(torch.tensor([float(t)]), seeds)
    return unit(numerics.noise(index, key, number))


@pytest.mark.parametrize("start", [0, 12345, 2**24 + 77, 2**31 - 2**16])
def test_noise_is_uniform_and_without_correlation(start):
    num = 2**17
    for t in (1, 2, 2**20):
        m, v, h = (of(t, number, start, num) for number in range(3))
        statistics = {"m, v": m * v, "m, h": m * h, "v, h": v * h}
        for name, u in dict(m=m, v=v, h=h).items():
            later = of(t + 1, "mvh".index(name), start, num)
            statistics |= {name: u, f"{name}, steps": u * later}
            others = {"tensors": of(t, "mvh".index(name), start, num, place=8)}
            others["tensor and step"] = of(7, "mvh".index(name), start, num, place=t)
            statistics |= {f"{name}, {k}": u * other for k, other in others.items()}
            statistics[f"{name}, variance"] = (u * u - 1) / 0.8**0.5
            for lag in (1, 2, 3, 4, 8, 16, 64, 256, 768, 3072, 2**16):
                statistics[f"{name}, {lag} apart"] = u[lag:] * u[:-lag]
                statistics[f"{name}, {lag} apart, steps"] = u[lag:] * later[:-lag]
        for name, found in statistics.items():
            assert abs(found.mean()) * len(found) ** 0.5 < SIGMAS, (t, name)


def test_the_number_of_an_element_may_be_int32_or_int64():
    index = torch.tensor([0, 1, 65535, 65536, 2**31 - 1])
    key = numerics.step_key(torch.tensor([3.0]), torch.tensor([7]))
    for number in range(3):
        wide = numerics.noise(index, key, number)
        assert torch.equal(numerics.noise(index.int(), key, number), wide)
        assert torch.equal(numerics.noise(index + 2**32, key, number), wide)


# ---- averages ------------------------------------------------------------------------


def test_averages_are_unbiased_where_rounding_to_nearest_stands_still():
    """v of AdamW with beta2 = 0.999, whose steps are below half a unit of bfloat16."""
    rule, steps = marsopt.rule("adamw", betas=(0.9, 0.999), **NARROW), 300
    exact = marsopt.rule("adamw", betas=(0.9, 0.999))
    params, g = [torch.zeros(128, 512)], generator(0)
    state, wanted, nearest = rule.init(params), exact.init(params), None
    for t in range(steps):
        scale = 1.0 if t < 50 else 0.1
        grads = [scale * torch.randn(params[0].shape, generator=g)]
        _, state = rule.step(params, grads, state, lr=0.0)
        _, wanted = exact.step(params, grads, wanted, lr=0.0)
        before = torch.zeros(128, 512) if nearest is None else nearest.float()
        nearest = (0.999 * before + 0.001 * grads[0] ** 2).to(BF16)
    for name in ("m", "v"):
        got, want = getattr(state, name)[0].double(), getattr(wanted, name)[0].double()
        assert getattr(state, name)[0].dtype == BF16
        error = got - want
        assert error.std() < 0.05 * want.square().mean().sqrt()
        assert abs(error.mean()) < 4 * error.std() / error.numel() ** 0.5, name
    lost = nearest.double() - wanted.v[0].double()
    assert abs(lost.mean()) > 50 * lost.std() / lost.numel() ** 0.5


# ---- rules and layouts ---------------------------------------------------------------


def walk(
    mars_type, correction, start, options, compile=False, params=None, steps=STEPS,
    **more,
):  # fmt: skip
    """Steps of the class; parameters and state by name."""
    if params is None:
        params = {n: nn.Parameter(x) for n, x in start.items()}
    optimizer = MARS(
        params.items(),
        lr=0.01,
        lr_1d=0.01,
        mars_type=mars_type,
        correction=correction,
        max_norm=3.0,
        ns_dtype=torch.float32,
        compile=compile,
        **{**NARROW, **options, **more},
    )
    for t in range(steps):
        if correction == "exact":
            give(params, 100 + t)
            optimizer.update_previous_grad()
        give(params, t)
        optimizer.step()
        if correction == "exact":
            optimizer.update_last_grad()
    return params, {n: optimizer.state[p] for n, p in params.items()}


def cut(whole, mesh, placements):
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def give(params, seed):
    gradients = tree(1000 + seed, 0.1)
    for n, p in params.items():
        g = gradients[n]
        if isinstance(p, DTensor):
            g = cut(g, p.device_mesh, p.placements)
        p.grad = g


def almost_equal(got, want, share=0.002):
    """All but a share of elements to the bit, and those one unit apart at most."""
    assert got.dtype == want.dtype == BF16
    far = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert far.max() <= 1
    assert (far > 0).double().sum() <= max(1, share * far.numel())


KINDS = [
    (name, kind)
    for name, rule in REGISTRY.items()
    for kind in (("approximate", "exact") if rule.is_mars else (None,))
]


# counts, and buffers of the owners of whole matrices, which round nothing so
WHOLE = {"step", "stage_count"} | {
    buffer.key
    for kind in (marsopt.NorMuon, marsopt.SOAP)
    for buffer in kind.keeps.values()
    if buffer.home == "owner"
}


@pytest.mark.parametrize(("mars_type", "correction"), KINDS)
def test_every_rule_keeps_bfloat16_near_float32(mars_type, correction):
    params, state = walk(mars_type, correction, tree(0), {})
    wide = dict(state_dtype=None, stochastic_rounding=False)
    wanted, exact = walk(mars_type, correction, tree(0), wide)
    for name, p in params.items():
        if "lion" not in mars_type:  # where rounding turns a sign, a whole step differs
            assert (p - wanted[name]).abs().max() < 5e-3
        for key, value in state[name].items():
            whole = exact[name][key]
            if key in WHOLE:
                assert value.dtype == torch.float32, key
                continue
            assert value.dtype == BF16, key
            assert value.shape == whole.shape
            error = (value.float() - whole).abs()
            # 2^-8 is a unit; averages have the errors of all steps
            assert (error <= STEPS * 2**-7 * whole.abs().max() + 1e-12).all(), key
    kept = [v for s in state.values() for k, v in s.items() if k == "exp_avg"]
    for value in kept:  # in no narrower a format, and not nearest alone
        assert value.unique().numel() > 1


@pytest.mark.parametrize("shape", [(16, 8), (128, 64)], ids=str)
def test_tensors_of_equal_values_round_apart(shape):
    """By each door; an optimizer packs the smaller tensors."""
    x, g = torch.ones(shape), torch.full(shape, 0.3)
    rule, pairs = marsopt.rule("adamw", **NARROW), []
    for pack in (dict, FlatGroup.pack):
        tree, grads = pack(dict(a=x, b=x)), pack(dict(a=g, b=g))
        m = rule.step(tree, grads, rule.init(tree), lr=0.01)[1].m
        pairs.append((m.unpack() if isinstance(m, FlatGroup) else m).values())
    params = [nn.Parameter(x.clone()) for _ in range(2)]
    optimizer = MARS(params, mars_type="adamw", compile=False, **NARROW)
    for p in params:
        p.grad = g
    optimizer.step()
    pairs.append(optimizer.state[p]["exp_avg"] for p in params)
    for one, two in pairs:
        assert one.unique().numel() == 2  # 0.03 is no bfloat16
        assert 0.1 < (one != two).double().mean() < 0.5


def test_functions_and_flat_groups_agree():
    start, rule = tree(0), marsopt.rule("mars-adamw", max_norm=3.0, **NARROW)
    flat = FlatGroup.pack(start)
    loose, packed = (start, rule.init(start)), (flat, rule.init(flat))
    for t in range(STEPS):
        grads = tree(1000 + t, 0.1)
        kept = [x.clone() for x in loose[1].m.values()]
        before = loose
        loose = rule.step(loose[0], grads, loose[1], lr=0.01)
        assert all(map(torch.equal, kept, before[1].m.values()))  # pure
        again = rule.step(before[0], grads, before[1], lr=0.01)
        torch.testing.assert_close(again[1], loose[1], rtol=0, atol=0)
        packed = rule.step(packed[0], FlatGroup.pack(grads), packed[1], lr=0.01)
    for name in start:
        for symbol, own in loose[1].buffers.items():
            assert torch.equal(own[name], packed[1].buffers[symbol].unpack()[name])


def test_compiled_equals_eager():
    """The gradient before, and both averages."""
    start = {"tall": tree(0)["tall"]}
    _, state = walk("mars-adamw", None, start, {})
    _, other = walk("mars-adamw", None, start, {}, compile=True)
    for name, own in state.items():
        for key in own.keys() - WHOLE:
            almost_equal(other[name][key], own[key], share=0.01)


def test_parameters_of_bfloat16_round_their_state_and_not_themselves():
    start = {n: x.to(BF16) for n, x in tree(0).items()}
    plain = marsopt.rule("adamw")
    rule, g = marsopt.rule("adamw", stochastic_rounding=True), tree(1)
    grads = {n: x.to(BF16) for n, x in g.items()}
    new, state = rule.step(start, grads, rule.init(start), lr=0.01)
    same, nearest = plain.step(start, grads, plain.init(start), lr=0.01)
    assert all(map(torch.equal, new.values(), same.values()))
    assert not all(map(torch.equal, state.m.values(), nearest.m.values()))
    for m, near in zip(state.m.values(), nearest.m.values(), strict=True):
        assert (m.view(torch.int16).int() - near.view(torch.int16)).abs().max() <= 1


def test_rounding_lets_gradients_through():
    rule, params = marsopt.rule("adamw", **NARROW), [torch.ones(6, 4)]
    lr = torch.tensor(0.1, requires_grad=True)
    state, grads = rule.init(params), [torch.full((6, 4), 0.3)]
    x, state = rule.step(params, grads, state, lr=lr)
    grads = [0.3 * x[0]]
    x, state = rule.step(x, grads, state, lr=0.1)
    x, state = rule.step(x, grads, state, lr=0.1)
    (found,) = torch.autograd.grad(x[0].sum(), lr)
    assert found.isfinite()
    assert found < 0


# ---- skipped, refused ----------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e25, 1e60])
@pytest.mark.parametrize("options", [NARROW, dict(stochastic_rounding=True)], ids=len)
def test_a_step_whose_moments_bfloat16_cannot_hold_is_skipped(scale, options):
    params = [nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))]
    optimizer = MARS(params, mars_type="adamw", lr=0.01, compile=False, **options)
    params[0].grad = torch.full_like(params[0], scale)
    optimizer.step()
    assert optimizer.num_skipped == (options is NARROW)  # float64 state holds it
    params[0].grad.fill_(1.0)
    optimizer.step()
    assert params[0].isfinite().all() and (params[0] < 0).all()


def test_state_of_float16_is_refused():
    params = [nn.Parameter(torch.zeros(3, 2))]
    own = dict(preconditioner=marsopt.AdamW())
    for name, last in (
        ("state_dtype", partial(marsopt.Algorithm, **own)),
        ("h_dtype", marsopt.Approximate),
    ):
        one = partial(marsopt.rule, "mars-adamw")
        for build in (partial(MARS, params), marsopt.mars, one, last):
            said = f"got {name}=torch.float16, expected a dtype with the range of fl"
            with pytest.raises(ValueError, match=said):
                build(**{name: torch.float16})
    half = [torch.zeros(3, 2, dtype=torch.float16)]
    state = marsopt.rule("adamw", stochastic_rounding=True).init(half)
    assert state.m[0].dtype == torch.float32  # as that of float32 parameters
    state = marsopt.rule("adamw", **NARROW).init(half)
    assert state.m[0].dtype == BF16


# ---- sharded -------------------------------------------------------------------------


# the mesh, and the placements of matrices and of vectors
ROWS, COLUMNS, COPY = Shard(0), Shard(1), Replicate()
PLACES = {
    "1 rank": ((1,), [ROWS], [ROWS]),
    "3 ranks": ((3,), [ROWS], [ROWS]),
    "columns": ((2,), [COLUMNS], [ROWS]),
    "HSDP": ((2, 2), [COPY, ROWS], [COPY, ROWS]),
    "two axes": ((2, 2), [ROWS, COLUMNS], [ROWS, COPY]),
}
RULES = "mars-adamw", "mars-m", "mars-normuon"
HALF_WAY = 1 + 2**-8  # between neighbours


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def rounded(values):
    """Parameters, and what was rounded of the state, whole."""
    params, state = values
    return {n: whole(p.detach()) for n, p in params.items()}, {
        f"{n} {key}": whole(value)
        for n, own in state.items()
        for key, value in own.items()
        if key not in WHOLE
    }


def sharded(rank, world, name):
    """Return steps of each rule, and a moment of equal elements after one step."""
    mesh_shape, of_matrices, of_vectors = PLACES[name]
    mesh = init_device_mesh("cpu", mesh_shape)
    options = dict(collectives=MeshCollectives(mesh))

    def start():
        pieces = {
            n: cut(x, mesh, of_matrices if x.ndim > 1 else of_vectors)
            for n, x in tree(0).items()
        }
        return {n: nn.Parameter(piece) for n, piece in pieces.items()}

    found = []
    for rule in RULES:
        twice = [rounded(walk(rule, None, None, options, params=start())) for _ in "ab"]
        torch.testing.assert_close(*twice, rtol=0, atol=0)  # replayed to the bit
        found.append(twice[0])
    p = start()["wide"]
    p.grad = torch.full_like(p, 10 * HALF_WAY)
    own = dict(betas=(0.9, 0.95), compile=False, **NARROW, **options)
    optimizer = MARS([p], mars_type="adamw", **own)
    optimizer.step()
    found.append(whole(optimizer.state[p]["exp_avg"]))
    dist.barrier()
    return found


@cache
def alone(rule):
    wide = dict(state_dtype=None, stochastic_rounding=False)
    return [rounded(walk(rule, None, tree(0), own)) for own in ({}, wide)]


@pytest.mark.processes
@pytest.mark.parametrize("name", PLACES)
def test_shards_round_by_noise_of_their_own_and_replicas_alike(name):
    """As one process does, to the errors of bfloat16; with one rank to the bit."""
    first, *others = spawn(sharded, torch.Size(PLACES[name][0]).numel(), name)
    for found in others:  # replicas are among them
        torch.testing.assert_close(found, first, rtol=0, atol=0)
    *found, m = first
    for rule, (params, state) in zip(RULES, found, strict=True):
        same, (wanted, exact) = alone(rule)
        if name == "1 rank":
            torch.testing.assert_close((params, state), same, rtol=0, atol=0)
        for n, p in params.items():
            torch.testing.assert_close(p, wanted[n], rtol=0, atol=5e-3)
        for key, value in state.items():
            assert value.dtype == BF16, key
            most = STEPS * 2**-7 * exact[key].abs().max()
            torch.testing.assert_close(value.float(), exact[key], rtol=0, atol=most)
    assert abs(m.double().mean() - HALF_WAY) < SIGMAS * 2**-8 / m.numel() ** 0.5
    for dim in (0, 1):  # no row or column has the noise of another
        assert m.unique(dim=dim).shape == m.shape
