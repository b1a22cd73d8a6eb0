"""Master weights: with 32 bits a run over bfloat16 parameters is, bit for bit, a
float32 run whose model reads its weights rounded to bfloat16. With 24 bits the rounding
is small and right on average. test_kernels.py runs this file in Triton's interpreter,
too.
"""

from __future__ import annotations

import copy
import os
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import marsopt
from marsopt import REGISTRY, FlatGroup
from marsopt.rules.formats import CUT, LARGEST_24, joined, low_bits, low_symbols, split
from tests.library.test_layouts import shifted, transposed, with_gaps
from tests.table import steady

BF16, F32 = torch.bfloat16, torch.float32
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LR = 1e-2


def rounded(weight):
    """The nearest bfloat16, of two the larger in size, by arithmetic on values."""
    nearest = weight.to(BF16)
    other = torch.where(nearest.float().abs() < weight.abs(), up(nearest), nearest)
    is_tie = (other.float() - weight).abs() == (weight - nearest.float()).abs()
    return torch.where(is_tie, other, nearest)


def up(x):
    """The neighbour of bfloat16 numbers that is farther from zero."""
    return (x.view(torch.int16) + 1).view(BF16)


# ---- one number ----------------------------------------------------------------------


def weights():
    """Of all exponents, in equal shares; and numbers on the edges."""
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**18,), generator=g)
    info = torch.finfo(F32)
    edges = [
        0.0,
        info.max,
        info.tiny,
        info.smallest_normal,
        1e-45,
        1.00390625,
        LARGEST_24,
    ]
    edges += [torch.inf, torch.nan, *(-x for x in (*edges, torch.inf))]
    found = torch.cat([bits.to(torch.int32).view(F32), torch.tensor(edges)])
    return torch.where(found.isnan(), torch.nan, found)  # of the usual bits


def test_a_weight_of_32_bits_comes_back_to_the_bit():
    weight = weights()
    x, *low = split(weight, 32, None)
    assert [t.dtype for t in (x, *low)] == [BF16, torch.int8, torch.int8]
    assert torch.equal(joined(x, low).view(torch.int32), weight.view(torch.int32))
    is_number = weight.isfinite()
    wanted = rounded(weight[is_number])
    assert torch.equal(x[is_number].view(torch.int16), wanted.view(torch.int16))
    assert torch.equal(x.isnan(), weight.isnan())


@pytest.mark.parametrize("exponent", [-140, -126, -40, 0, 40, 126])
def test_the_mean_of_24_bits_over_all_noise_is_the_weight(exponent):
    g, noise = torch.Generator().manual_seed(0), torch.arange(2**16).int()
    for weight in torch.randn(16, generator=g) * 2.0**exponent:
        if weight.abs() > LARGEST_24:
            continue
        x, *low = split(weight.expand(2**16), 24, noise)
        assert [t.dtype for t in (x, *low)] == [BF16, torch.int8]
        found = joined(x, low)
        assert found.double().mean() == weight.double()
        assert ((found.view(torch.int32) & CUT) == 0).all()
        spacing = max(2.0**-15 * 2.0 ** weight.abs().log2().floor(), 2.0**-141)
        assert ((found - weight).abs() < spacing).all()


def test_24_bits_keep_what_they_can_hold_and_stay_finite():
    weight = weights()
    for number in (0, 2**16 - 1):
        noise = torch.full(weight.shape, number, dtype=torch.int32)
        x, *low = split(weight, 24, noise)
        found = joined(x, low)
        assert torch.equal(found.isnan(), weight.isnan())
        assert torch.equal(found.isinf(), weight.isinf())
        assert torch.equal(found.signbit(), weight.signbit())
        x, *low = split(found, 24, noise)
        again = joined(x, low)
        assert torch.equal(again.view(torch.int32), found.view(torch.int32))


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_an_element_that_is_set_to_zero_has_a_weight_of_almost_zero(bits, zero):
    low = [torch.arange(-128, 128).to(torch.int8) for _ in low_symbols(bits)]
    found = joined(torch.full((256,), zero, dtype=BF16), low)
    assert (found.abs() < 1e-38).all()


# ---- a run ---------------------------------------------------------------------------

# below and above 4,096 elements, which a CPU packs or takes in place, and with gaps
FORMS = [
    *(((24, 16), form) for form in (torch.clone, transposed, shifted, with_gaps)),
    *(((96, 64), form) for form in (torch.clone, transposed, shifted)),
    ((7,), torch.clone),
]


def values(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def twins(compile=False, forms=FORMS, **options):
    """An optimizer over bfloat16 parameters, and over equal parameters of float32."""
    starts = [form(values(shape, i)) for i, (shape, form) in enumerate(forms)]
    own = dict(lr=LR, max_norm=1.0, compile=compile) | options
    narrow, wide = ([nn.Parameter(copy.copy(x)) for x in starts] for _ in range(2))
    wide = [nn.Parameter(x.detach().to(F32)) for x in wide]
    first = marsopt.MARS(narrow, master_weight_bits=32, **own)
    return (first, narrow), (marsopt.MARS(wide, **own), wide)


def give(narrow, wide, seed):
    """Gradients of a loss of the rounded weights; in the third step a NaN."""
    for i, (p, q) in enumerate(zip(narrow, wide, strict=True)):
        g = values(p.shape, 100 * seed + i) + rounded(q.detach()) / 4
        if seed == 2 and i == 0:
            g[0] = torch.nan
        p.grad, q.grad = g, g.float()


def check_run(compile=False, num_steps=5, **options):
    (first, narrow), (second, wide) = twins(compile, **options)
    for seed in range(num_steps):
        give(narrow, wide, 50 + seed)
        first.update_previous_grad()
        second.update_previous_grad()
        give(narrow, wide, seed)
        first.step()
        second.step()
        first.update_last_grad()
        second.update_last_grad()
        for p, q in zip(narrow, wide, strict=True):
            assert torch.equal(p, rounded(q.detach()))
            state = first.state[p]
            for key, value in second.state[q].items():
                assert torch.equal(state[key], value), key
    assert first.num_skipped == second.num_skipped == 1
    masters = first.master_weights()
    assert [*masters] == [f"group0.{i}" for i in range(len(narrow))]
    for found, q in zip(masters.values(), wide, strict=True):
        assert found.dtype == F32 and torch.equal(found, q)
    assert any(not torch.equal(p, q) for p, q in zip(narrow, wide, strict=True))


CASES = {
    f"{name} {correction}": dict(mars_type=name, correction=correction, **steady(name))
    for name, row in REGISTRY.items()
    for correction in ("approximate", "exact")
    if row.is_mars or correction == "approximate"
}
CASES["adamw cautious"] = dict(mars_type="adamw", amsgrad=True, weight_decay=0.1)
CASES["adamw cautious"] |= dict(cautious_weight_decay=True)
CASES["averages of 16 bits"] = dict(state_dtype=BF16, stochastic_rounding=True)
CASES["averages of 8 bits"] = dict(state_dtype=torch.int8)
CASES["results of float64"] = dict(mars_type="moonlight", ns_dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_32_bits_are_a_float32_run(case):
    check_run(**CASES[case])


def test_32_bits_are_a_float32_run_compiled_or_interpreted():
    """Graphs of AdamW, packed and in place, and of matrices with h; or kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy interprets
        compile = None if IS_INTERPRETED else True
        check_run(compile, num_steps=4, mars_type="mars-m", ns_dtype=F32)


def trees(seed, dtype=BF16):
    shapes = {"w": (24, 16), "b": (7,)}
    return {n: values(s, seed).to(dtype) for n, s in shapes.items()}


@pytest.mark.parametrize("case", CASES)
def test_32_bits_are_a_float32_run_of_pure_functions(case):
    own = CASES[case]
    first = marsopt.mars(master_weight_bits=32, **own)
    second = marsopt.mars(**own)
    narrow, wide = trees(0), trees(0, F32)
    one, two = first.init(narrow), second.init(wide)
    for seed in range(1, 5):
        g = {n: x + rounded(wide[n]) / 4 for n, x in trees(seed).items()}
        h = trees(seed + 50)
        is_exact = own.get("correction") == "exact"
        steps = []
        for rule, x, state, cast in (
            (first, narrow, one, BF16), (second, wide, two, F32),
        ):  # fmt: skip
            gs, hs = ({n: t.to(cast) for n, t in tree.items()} for tree in (g, h))
            more = dict(reference=hs) if is_exact else {}
            steps.append(rule.step(x, gs, state, lr=LR, **more))
        (narrow, one), (wide, two) = steps
        assert all(torch.equal(narrow[n], rounded(wide[n])) for n in wide)


# ---- 24 bits -------------------------------------------------------------------------


@pytest.mark.parametrize("mars_type", ["mars-adamw", "moonlight"])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "interp"])
def test_24_bits_are_close_and_replay(mars_type, compile):
    """To a unit of 16 binary digits a step, and to the bit if taken again."""
    if compile and (not IS_INTERPRETED or mars_type != "moonlight"):
        pytest.skip("kernels of both formulas are Moonlight's and its AdamW's")
    compile = None if compile else False
    options = dict(mars_type=mars_type, lr=LR, compile=compile, ns_dtype=F32)

    def run(bits, num=4):
        params = [nn.Parameter(values(s, i)) for i, s in enumerate([(70, 60), (9,)])]
        optimizer = marsopt.MARS(params, master_weight_bits=bits, **options)
        for seed in range(num):
            for p in params:
                p.grad = values(p.shape, seed + 5)
            optimizer.step()
        return optimizer.master_weights()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found, again, exact = run(24), run(24), run(32)
    for name, weight in found.items():
        assert torch.equal(weight, again[name])
        error = (weight - exact[name]).abs() / exact[name].abs().clamp(min=0.1)
        assert 0 < error.max() < 4 * 2**-15


@pytest.mark.parametrize("mars_type", ["adamw", "moonlight"])
def test_24_bits_are_right_on_average(mars_type):
    """Elements of equal values and gradients differ in their noise alone."""
    rule = marsopt.rule(mars_type, master_weight_bits=24)
    exact = marsopt.rule(mars_type, master_weight_bits=32)
    num = 2**16
    x = {"w": torch.ones(256, 256, dtype=BF16)}
    g = {"w": torch.ones(256, 256, dtype=BF16) * 0.5}

    def walk(rule):
        params, state = x, rule.init(x)
        for _ in range(3):
            params, state = rule.step(params, g, state, lr=1.7e-3)
        low = [tree["w"] for tree in low_bits(state.buffers)]
        return joined(params["w"], low).double()

    found, want = walk(rule), walk(exact)
    spread = 3**0.5 * 2.0**-16  # of three roundings, at most half of 2^-15 each
    assert found.std() > 0.1 * spread
    assert abs(found.mean() - want.mean()) < 5 * spread / num**0.5


# ---- a state -------------------------------------------------------------------------


def model_and(bits, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    options = dict(lr=LR, compile=False, master_weight_bits=bits) | options
    return model, marsopt.for_model(model, "mars-m", **options)


def train(model, optimizer, seeds):
    for seed in seeds:
        for p in model.parameters():
            p.grad = values(p.shape, seed)
        optimizer.step()


def test_a_run_without_master_weights_goes_on_with_them():
    """They begin at its parameters; the moments become float32."""
    model, optimizer = model_and(None)
    train(model, optimizer, range(3))
    twin, masters = model_and(32)
    twin.load_state_dict(model.state_dict())
    masters.load_state_dict(optimizer.state_dict())
    for name, weight in masters.master_weights().items():
        assert torch.equal(weight, twin.get_parameter(name).float())


def test_state_of_torch_begins_with_the_parameters():
    model, optimizer = model_and(32)
    train(model, optimizer, range(2))
    adamw = torch.optim.AdamW(model.parameters())
    train(model, adamw, range(3))
    plain = marsopt.MARS(
        model.parameters(), mars_type="adamw", master_weight_bits=32, compile=False
    )
    plain.load_state_dict(adamw.state_dict())
    for p in model.parameters():
        assert torch.equal(plain.state[p]["exp_avg"], adamw.state[p]["exp_avg"].float())
        assert [x.any() for x in low_bits(plain.state[p])] == [False, False]


def test_24_bits_go_on_with_32():
    model, optimizer = model_and(24)
    train(model, optimizer, range(2))
    twin, masters = model_and(32)
    twin.load_state_dict(model.state_dict())
    masters.load_state_dict(optimizer.state_dict())
    want = optimizer.master_weights()
    for name, weight in masters.master_weights().items():
        assert torch.equal(weight, want[name])


def test_bits_that_would_be_lost_are_refused():
    saved = model_and(32)
    train(*saved, range(2))
    with pytest.raises(ValueError, match="got lowest_bits of parameter '0.*', bits"):
        model_and(24)[1].load_state_dict(saved[1].state_dict())
    with pytest.raises(ValueError, match="got low_bits and lowest_bits of parameter"):
        model_and(None)[1].load_state_dict(saved[1].state_dict())
    rules = {b: marsopt.rule("adamw", master_weight_bits=b) for b in (24, 32)}
    x = trees(0)
    with pytest.raises(ValueError, match=r"got a state of .*'lowest_bits'.*, expected"):
        rules[24].step(x, x, rules[32].init(x), lr=LR)
    broken = rules[32].init(x)
    broken.buffers["low_bits"]["w"] = torch.zeros(24, 16)
    with pytest.raises(ValueError, match=r"got state.low_bits\['w'\] of torch.float32"):
        rules[32].step(x, x, broken, lr=LR)
    broken = saved[1].state_dict()
    broken["state"][0]["low_bits"] = broken["state"][0]["low_bits"].to(BF16)
    with pytest.raises(ValueError, match="got low_bits of torch.bfloat16 for param"):
        model_and(32)[1].load_state_dict(broken)


@pytest.mark.parametrize("bits", [16, 24.5, 24.0, True, "32", 0])
def test_other_numbers_of_bits_are_refused(bits):
    p = values((2, 2), 0)
    for build in (
        partial(marsopt.Algorithm, preconditioner=marsopt.AdamW()),
        partial(marsopt.rule, "lion"),
        marsopt.mars,
        partial(marsopt.MARS, [nn.Parameter(p)]),
        partial(marsopt.for_model, nn.Linear(2, 2).bfloat16()),
    ):
        with pytest.raises(ValueError, match=r"expected None, 24 or 32: "):
            build(master_weight_bits=bits)


@pytest.mark.parametrize("dtype", [F32, torch.float16, torch.float64])
def test_other_parameters_are_refused(dtype):
    p = nn.Parameter(torch.ones(2, 2, dtype=dtype))
    match = rf"got master_weight_bits=32 for .* of {dtype}, expected bfloat16: "
    with pytest.raises(ValueError, match=match):
        marsopt.MARS([p], master_weight_bits=32)
    with pytest.raises(ValueError, match=match):
        marsopt.rule("adamw", master_weight_bits=32).init({"w": p.detach()})
    with pytest.raises(ValueError, match=match):
        marsopt.rule_for(nn.Linear(2, 2).to(dtype), master_weight_bits=32).init(
            dict(nn.Linear(2, 2).to(dtype).named_parameters())
        )


def test_an_optimizer_without_master_weights_has_none():
    with pytest.raises(
        RuntimeError, match="got master_weights\\(\\) of an optimizer w"
    ):
        model_and(None)[1].master_weights()
    with pytest.raises(ValueError, match="master_weight_bits=32 in group 0"):
        marsopt.to_torch(model_and(32)[1])


def test_bytes_of_state():
    """AdamW: 2 of the parameter, 2 or 1 below it, 8 of moments, 4 if rounded."""
    for bits, options, num in (
        (32, {}, 12), (24, {}, 11),
        (24, dict(state_dtype=BF16, stochastic_rounding=True), 7),
    ):  # fmt: skip
        p = nn.Parameter(values((8, 8), 0))
        options = dict(mars_type="adamw", master_weight_bits=bits) | options
        optimizer = marsopt.MARS([p], **options)
        tensors = [p, *optimizer.state[p].values()]
        assert sum(x.nbytes for x in tensors if x.ndim) == num * p.numel()


def test_flat_groups_have_low_bits():
    rule = marsopt.rule("mars-adamw", clip=None, master_weight_bits=32)
    x = {n: values((6, 4), i) for i, n in enumerate("ab")}
    flat = FlatGroup.pack(x)
    new, _ = rule.step(flat, FlatGroup.pack(x), rule.init(flat), lr=LR)
    want, _ = rule.step(x, x, rule.init(x), lr=LR)
    assert all(torch.equal(new.unpack()[n], want[n]) for n in x)
