"""SOAP against its authors' algorithm, and what it promises beside: eigenvectors once,
refreshes as they are spread, float32 whatever the rest is, the state and the products
that its docstring counts, and what shards send.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import marsopt
from marsopt import MARS, SOAP, NewtonSchulz
from marsopt.parallel import MeshCollectives
from marsopt.rules.component import MatrixInput, Numbers, number_fields
from tests.conformance.oracle import Oracle
from tests.messages import Messages, pretended
from train.forecast import models
from train.forecast.step import planned

WIDE, TALL, SQUARE = (6, 10), (10, 6), (8, 8)


def drawn(shape, seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


# ---- the authors' algorithm ----------------------------------------------------------


@pytest.mark.parametrize("frequency", [1, 3, 10])
@pytest.mark.parametrize("kind", ["soap", "mars-soap", "soap-muon"])
def test_forty_steps_are_the_authors(kind, frequency):
    own = dict(ns_dtype=torch.float64) if kind == "soap-muon" else {}
    rule = marsopt.rule(kind, precondition_frequency=frequency, weight_decay=0.1, **own)
    x = [drawn(SQUARE, 0)]
    oracle = Oracle(x[0].numpy(), kind, beta2=0.95, wd=0.1, frequency=frequency)
    state = rule.init(x)
    for t in range(40):
        g = [drawn(SQUARE, 1 + t)]
        x, state = rule.step(x, g, state, lr=0.01)
        want = oracle.step(g[0].numpy(), 0.01)
    assert np.abs(x[0].numpy() - want).max() < 1e-6
    # the first step is none: 39 of about the rate each
    assert (x[0] - drawn(SQUARE, 0)).abs().max() > 0.05


@pytest.mark.parametrize("shape", [WIDE, TALL])
def test_a_long_side_starts_in_any_eigenvectors_and_goes_on_as_the_authors(shape):
    """Of 10 dims the first gradient says 6: the rest is left to the library that finds
    eigenvectors, so that the oracle takes over ours once they are found to be some.
    """
    rule = marsopt.rule("soap", precondition_frequency=4)
    x = [drawn(shape, 0)]
    oracle = Oracle(x[0].numpy(), "soap", beta2=0.95, wd=0.01, frequency=4)
    state = rule.init(x)
    for t in range(40):
        g = [drawn(shape, 1 + t)]
        x, state = rule.step(x, g, state, lr=0.01)
        want = oracle.step(g[0].numpy(), 0.01)
        if t == 0:
            for axis, (factor, basis) in enumerate((("L", "QL"), ("R", "QR"))):
                gg, q = (state.buffers[s][0][0].numpy() for s in (factor, basis))
                np.testing.assert_allclose(gg, oracle.gg[axis], atol=1e-12)
                values = q.T @ gg @ q
                diagonal = np.diag(values)
                np.testing.assert_allclose(values, np.diag(diagonal), atol=1e-12)
                np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-12)
                assert (np.diff(diagonal) < 1e-12).all()
                oracle.q[axis] = q
    assert np.abs(x[0].numpy() - want).max() < 1e-6


def test_a_side_above_max_dim_has_no_factor():
    x, g = [drawn(WIDE, 0)], [drawn(WIDE, 1)]
    rule = marsopt.rule("soap", max_dim=8, precondition_frequency=2)
    oracle = Oracle(x[0].numpy(), "soap", beta2=0.95, wd=0.01, frequency=2, max_dim=8)
    state = rule.init(x)
    assert state.buffers["R"][0].shape == state.buffers["QR"][0].shape == (1, 0, 0)
    for t in range(5):
        g = [drawn(WIDE, 1 + t)]
        x, state = rule.step(x, g, state, lr=0.01)
        want = oracle.step(g[0].numpy(), 0.01)
    assert np.abs(x[0].numpy() - want).max() < 1e-6
    both = marsopt.rule("soap", max_dim=5)  # Adam, a step behind
    assert all(not both.init(x).buffers[s][0].numel() for s in ("L", "QL", "R", "QR"))


def test_shampoo_beta_is_that_of_the_factors():
    x, g = [drawn(SQUARE, 0)], [drawn(SQUARE, 1)]
    for own, b in (({}, 0.9), (dict(shampoo_beta=0.5), 0.5)):
        rule = marsopt.rule("soap", betas=(0.95, 0.9), **own)
        _, state = rule.step(x, g, rule.init(x), lr=0.01)
        want = (1 - b) * g[0] @ g[0].mT
        torch.testing.assert_close(state.buffers["L"][0][0], want)


# ---- many runs, and tensors that join ------------------------------------------------


@pytest.mark.parametrize("name", ["mars_soap", "soap_muon"])
def test_many_runs_at_once_are_each_of_them(name):
    """By vmap, which has torch's QR and its eigenvectors."""
    rule = marsopt.rule(name, precondition_frequency=2, ns_dtype=torch.float64)
    starts = drawn((3, *SQUARE), 0)
    grads = [drawn((3, *SQUARE), 1 + t) for t in range(5)]

    def run(x, grads, counts=(None,) * 5):
        x, state = [x], rule.init([x])
        for g, count in zip(grads, counts, strict=True):
            x, state = rule.step(x, [g], state, lr=0.01, count=count)
        return x[0]

    found = torch.func.vmap(lambda x, g: run(x, g, range(5)))(starts, grads)
    each = [run(x, [g[i] for g in grads]) for i, x in enumerate(starts)]
    torch.testing.assert_close(found, torch.stack(each), rtol=0, atol=1e-9)


def test_a_tensor_that_joins_later_starts_as_the_others_did():
    """In the basis of its first gradient, which moves nothing: the count of steps is
    its own.
    """
    early, late = (nn.Parameter(drawn(SQUARE, i)) for i in range(2))
    late.requires_grad_(False)
    alone = nn.Parameter(late.detach().clone())
    kw = dict(mars_type="soap", lr=0.01, weight_decay=0.1, compile=False)
    optimizer, other = MARS([early, late], **kw), MARS([alone], **kw)
    for t in range(1, 15):
        early.grad = drawn(SQUARE, t)
        if t >= 3:
            late.requires_grad_(True)
            late.grad = alone.grad = drawn(SQUARE, 100 + t)
            other.step()
        optimizer.step()
        torch.testing.assert_close(late, alone, rtol=0, atol=1e-12)


# ---- when, and in which precision ----------------------------------------------------


class Decompositions(TorchDispatchMode):
    """Counts those of a step: matrices, by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for kind in ("linalg_eigh", "linalg_qr"):
            if kind in function.name():
                self.found[kind] += args[0].shape[:-2].numel()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [SQUARE, (264, 264)], ids=["stacked", "apart"])
@pytest.mark.parametrize("stagger", [False, True])
def test_eigenvectors_once_and_refreshes_in_their_rhythm(stagger, shape):
    """Over all tensors, also where a CPU moves large ones some at a time."""
    params = [nn.Parameter(drawn(shape, i)) for i in range(6)]
    own = dict(sides="short", precondition_frequency=3, stagger=stagger)
    optimizer = MARS(params, mars_type="soap", lr=0.01, compile=True, **own)
    found = []
    for t in range(8):
        for i, p in enumerate(params):
            p.grad = drawn(shape, 10 * t + i)
        with Decompositions() as mode:  # under which nothing is compiled
            optimizer.step()
        found.append((mode.found["linalg_eigh"], mode.found["linalg_qr"]))
    all_at_once = [(0, 0), (0, 0), (0, 6)]
    each = [(0, 2)] * 7 if stagger else 3 * all_at_once
    assert found == [(6, 0), *each[:7]]


def test_products_are_float32_whatever_others_ask_for():
    """bfloat16 in their place, which "medium" allows, would be another step."""
    found = []
    for precision in ("highest", "medium"):
        rule = marsopt.rule("soap", precondition_frequency=2)
        x = [drawn(SQUARE, 0).float()]
        state, before = rule.init(x), torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            for t in range(5):
                g = [drawn(SQUARE, 1 + t).float()]
                x, state = rule.step(x, g, state, lr=0.01)
        finally:
            torch.set_float32_matmul_precision(before)
        found.append(x[0])
    assert torch.equal(*found)


def test_factors_of_half_precision_are_float32():
    x = [drawn(SQUARE, 0, torch.bfloat16)]
    state = marsopt.rule("soap").init(x)
    assert state.buffers["m"][0].dtype == torch.bfloat16
    kinds = {state.buffers[s][0].dtype for s in ("L", "QL", "R", "QR")}
    assert kinds == {torch.float32}


# ---- what it costs -------------------------------------------------------------------


@pytest.mark.parametrize("sides", ["both", "short"])
@pytest.mark.parametrize("orthogonalize", [False, True])
def test_flops_are_those_of_its_products(sides, orthogonalize):
    """Over one round of refreshes; QR, which torch does not count, is left out."""
    every = 4
    soap = SOAP(
        sides=sides,
        precondition_frequency=every,
        orthogonalize=orthogonalize,
        ns=NewtonSchulz(dtype=torch.float32),
    )
    for shape in ((300, 640), (512, 512), (640, 300)):
        shapes = [b.shape(torch.Size(shape), None) for b in soap.buffers.values()]
        meta = [torch.empty(s, device="meta") for s in (shape, *shapes)]
        t = torch.ones(1, device="meta")
        n = Numbers(lr=0.1, **number_fields(soap))
        s = tuple(x * t.sum() for x in soap.scalars(t, n))
        given = [MatrixInput(meta[0], tuple(meta[1:]), s)]
        with FlopCounterMode(display=False) as counter:
            for count in range(1, every + 1):
                soap.at_owner(given, soap.stage(count, 0))
        sizes = {s[0] for s in shapes[-4:]} - {0} if sides == "short" else set(shape)
        num = 2 if sides == "both" and len(sizes) == 1 else 1
        qr = sum(num * 8 / 3 * size**3 for size in sizes)
        want = every * soap.cost.on("meta").num_flops(*shape) - qr
        assert counter.get_total_flops() == pytest.approx(want, rel=1e-6), shape


def test_gpt2_small_takes_the_state_and_the_products_that_are_said():
    """10.7 bytes a parameter and 0.3 of Newton-Schulz's FLOPs, of the matrices that are
    no embeddings.
    """
    (job,) = models.jobs("gpt2-small", ["muon"])
    hidden = [(m.rows, m.cols) for m in job.matrices().values()]
    soap, ns = SOAP(sides="short"), NewtonSchulz(dtype=torch.bfloat16)
    shapes = [
        buffer.shape(torch.Size(shape), None)
        for shape in hidden
        for buffer in soap.buffers.values()
    ]
    num_params = sum(rows * cols for rows, cols in hidden)
    num_bytes = 4 * sum(map(torch.Size.numel, shapes)) / num_params
    assert num_bytes == pytest.approx(10.7, abs=0.05)
    flops = [sum(c.num_flops(*s) for s in hidden) for c in (soap.cost, ns)]
    assert flops[0] / flops[1] == pytest.approx(0.3, abs=0.05)


def test_owners_have_equal_work_with_its_refreshes():
    for sides, often in (("both", 10), ("both", 1), ("short", 10)):
        soap = SOAP(sides=sides, precondition_frequency=often).cost
        (job,) = models.jobs("gpt2-small", ["muon"])
        matrices = [*job.matrices().values()]
        flops = [soap.num_flops(m.rows, m.cols) for m in matrices]
        loads = [0] * 8
        for bucket in planned(matrices, 8, soap):
            for owner, members in enumerate(bucket):
                loads[owner] += sum(flops[i] for i in members)
        assert sum(loads) == pytest.approx(sum(flops))
        assert max(loads) < 1.1 * sum(loads) / 8


# ---- what shards send ----------------------------------------------------------------


def sent(rule, shape, ranks):
    """(kind, bytes) of the collectives of a later step of one rank, norms left out."""
    with pretended(0, (ranks,)) as mesh:
        p = nn.Parameter(distribute_tensor(drawn(shape, 0).float(), mesh, [Shard(0)]))
        collectives = MeshCollectives(mesh)
        own = dict(sides="short") if "soap" in rule else {}
        optimizer = MARS(
            [p], mars_type=rule, lr=0.1, collectives=collectives, compile=False,
            ns_dtype=torch.float32, **own,
        )  # fmt: skip
        for _ in range(2):
            p.grad = distribute_tensor(drawn(shape, 1).float(), mesh, [Shard(0)])
            with Messages() as messages:
                optimizer.step()
    return messages.sent[1:]


@pytest.mark.parametrize("before", [dict(mars_type="moonlight"), dict(sides="both")])
def test_what_changes_its_bases_starts_anew(before):
    """As a fresh optimizer would; its state is that of one, too."""
    torch.manual_seed(0)
    (p,) = params = [torch.nn.Parameter(torch.randn(6, 4))]
    kw = dict(lr=0.05, compile=False, betas=(0.5, 0.9), weight_decay=0.1)
    soap = kw | dict(mars_type="soap", sides="short")
    optimizer = marsopt.MARS(params, **kw, **{"mars_type": "soap"} | before)
    grads = torch.randn(8, 6, 4).unbind()
    for g in grads[:3]:
        p.grad = g
        optimizer.step()
    optimizer.param_groups[0].update(mars_type="soap", sides="short")
    q = torch.nn.Parameter(p.detach().clone())
    fresh = marsopt.MARS([q], **soap)
    for g in grads[3:]:
        p.grad = q.grad = g
        optimizer.step(), fresh.step()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    fresh.load_state_dict(optimizer.state_dict())


def test_what_owners_exchange_is_what_newton_schulz_does():
    for shape in ((64, 64), (32, 128)):
        want = sent("muon", shape, 4)
        assert [kind for kind, _ in want] == ["all-to-all"] * 2
        for rule in ("soap", "soap-muon"):
            assert sent(rule, shape, 4) == want
