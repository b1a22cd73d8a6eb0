"""Newton-Schulz against the polar factor, its constants against their sources."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from marsopt import NewtonSchulz, newton_schulz, polar_factor
from marsopt.rules import newton_schulz as file
from marsopt.rules.newton_schulz import COEFFICIENTS


def matrix(rows, cols, seed=0, dtype=torch.float64, smallest=0.1):
    """Singular values spread evenly over logarithms from ``smallest`` to 1."""
    g = torch.Generator().manual_seed(seed)
    k = min(rows, cols)
    u = torch.linalg.qr(torch.randn(rows, k, generator=g, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(cols, k, generator=g, dtype=torch.float64)).Q
    s = torch.logspace(np.log10(smallest), 0, k, dtype=torch.float64)
    return (u * s @ v.mT).to(dtype)


def optimal_quintic(low, high):
    """Remez: the odd quintic closest to 1 on [low, high]."""
    q, r = (3 * low + high) / 4, (low + 3 * high) / 4
    for _ in range(100):
        rows = [[x, x**3, x**5, (-1) ** i] for i, x in enumerate((low, q, r, high))]
        a, b, c, error = np.linalg.solve(np.array(rows), np.ones(4))
        root = np.sqrt(9 * b * b - 20 * a * c)
        q, r = np.sqrt((-3 * b + np.array([-root, root])) / (10 * c))
    return np.array([a, b, c])


def test_polar_express_coefficients_are_the_papers():
    """Algorithm 1 of arXiv 2505.16932: greedy minimax composition on [1e-3, 1]."""
    cushion, low, high = 0.02407327424182761, 1e-3, 1.0
    for i, stored in enumerate(COEFFICIENTS["polar_express"][:-1]):
        p = optimal_quintic(max(low, cushion * high), high)
        powers = np.array([[x, x**3, x**5] for x in (low, high)])
        p = p * 2 / (powers @ p).sum()  # recentre, since the cushion moved the interval
        low = float(powers[0] @ p)
        high = 2 - low
        damped = p / 1.01 ** np.array([1, 3, 5])
        np.testing.assert_allclose(stored, damped, rtol=1e-4, err_msg=f"iteration {i}")


@pytest.mark.parametrize(
    ("name", "steps", "low", "high"),
    [
        ("quintic", 5, 0.66, 1.22),
        ("polar_express", 6, 0.97, 1.03),
        ("taylor", 12, 0.999, 1.001),
    ],
)
@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_singular_values_end_near_one(name, steps, low, high, shape):
    o = newton_schulz(
        matrix(*shape), coefficients=name, steps=steps, dtype=torch.float64
    )
    s = torch.linalg.svdvals(o)
    assert float(s.min()) > low
    assert float(s.max()) < high


def test_taylor_converges_to_the_polar_factor():
    m = matrix(12, 20)
    o = newton_schulz(m, coefficients="taylor", steps=20, dtype=torch.float64)
    torch.testing.assert_close(o, polar_factor(m), rtol=0, atol=1e-12)


def test_polar_factor_is_orthogonal_and_keeps_zero_directions():
    o = polar_factor(matrix(20, 6))
    torch.testing.assert_close(
        o.mT @ o, torch.eye(6, dtype=o.dtype), rtol=0, atol=1e-12
    )
    m = torch.zeros(3, 4, dtype=torch.float64)
    m[0, 0] = 5.0
    want = torch.zeros_like(m)
    want[0, 0] = 1.0
    torch.testing.assert_close(polar_factor(m), want)


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)],
)
def test_working_precision(dtype, error):
    """Relative Frobenius error against float64 with the same polynomial."""
    m = torch.randn(48, 96, dtype=torch.float64)
    exact = newton_schulz(m, dtype=torch.float64)
    o = newton_schulz(m.float(), dtype=dtype)
    assert o.dtype == torch.float32
    assert float((o.double() - exact).norm() / exact.norm()) < error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safe_on_zero_tiny_and_huge(dtype):
    assert not newton_schulz(torch.zeros(2, 5, 7), dtype=dtype).any()
    for scale in (
        1e-6,
        1e6,
    ):  # normalized before the cast: half precision does not overflow
        o = newton_schulz(scale * torch.randn(5, 7), dtype=dtype)
        assert torch.isfinite(o).all()
        assert 0.5 < float(torch.linalg.svdvals(o.float()).max()) < 1.3


def test_batched_is_one_by_one_and_zero_rows_stay_zero():
    batch = torch.randn(3, 2, 6, 10, dtype=torch.float64)
    batch[0, 0, 2] = 0
    whole = newton_schulz(batch, dtype=torch.float64)
    for i in range(3):
        for j in range(2):
            alone = newton_schulz(batch[i, j], dtype=torch.float64)
            torch.testing.assert_close(whole[i, j], alone, rtol=0, atol=1e-12)
    assert not whole[0, 0, 2].any()


def test_many_are_each_by_itself():
    ns = NewtonSchulz(dtype=torch.float64)
    matrices = [
        torch.randn(s, dtype=torch.float64)
        for s in ((6, 10), (4, 4), (10, 6), (4, 4), (6, 10))
    ]
    for m, o in zip(matrices, ns.many(matrices), strict=True):
        torch.testing.assert_close(o, ns(m), rtol=0, atol=1e-12)


def by_hand(m, dtype, steps=5):
    """Plain products of a matrix on its short side."""
    x = (m / (torch.linalg.vector_norm(m) + 5e-10)).to(dtype)
    tall = m.shape[0] > m.shape[1]
    ((a, b, c),) = COEFFICIENTS["quintic"]
    for _ in range(steps):
        gram = x.mT @ x if tall else x @ x.mT
        p = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, *((x, p) if tall else (p, x)), beta=a)
    return x.to(m.dtype)


@pytest.mark.parametrize(
    "shape", [(0, 3), (3, 0), (1, 1), (40, 8), (512, 512), (513, 640), (700, 520)]
)
@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.bfloat16, 0.0), (torch.float32, 2e-6), (torch.float64, 1e-14)],
)
def test_iterates_are_those_of_plain_products(shape, dtype, error):
    """Bit for bit in bf16, whose sums are rounded to a bit that they agree in."""
    m = torch.randn(shape)
    given = m.clone()
    got, want = newton_schulz(m, dtype=dtype), by_hand(m, dtype)
    assert float((got - want).norm()) <= error * float(want.norm())
    assert torch.equal(m, given)
    both = newton_schulz(torch.stack([m, m]), dtype=dtype)
    assert float((both[1] - want).norm()) <= max(error, 1e-2) * float(want.norm())


def test_operations_are_those_of_whole_products():
    ns, (rows, cols) = NewtonSchulz(dtype=torch.float32), (1280, 768)
    want = 5 * (4 * rows * cols**2 + 2 * cols**3)
    for device in ("cpu", "cuda"):
        assert ns.on(device).num_flops(rows, cols) == want
        assert ns.on(device).num_flops(cols, rows) == want
    by_gram = NewtonSchulz(dtype=torch.float32, gram=True)
    long = 4 * 12 * cols**3 + 34 * cols**3
    assert by_gram.num_flops(12 * cols, cols) == long
    assert by_gram.num_flops(rows, cols) == 4 * rows * cols**2 + 34 * cols**3


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of jvp, whatever its class
@pytest.mark.parametrize("gram", [False, True])
def test_transforms_have_plain_products(gram):
    """Gradients, vmap, forward derivatives and one graph, where buffers cannot be."""
    ns = NewtonSchulz(gram=gram, dtype=torch.float64)
    m = torch.randn(3, 12, 5, dtype=torch.float64)
    want = ns(m)
    assert torch.autograd.gradcheck(ns, m[0].clone().requires_grad_())
    equal = torch.testing.assert_close
    equal(torch.func.vmap(ns)(m), want)
    primal, tangent = torch.func.jvp(ns, (m,), (torch.ones_like(m),))
    equal(primal, want)
    ahead = (ns(m + 1e-6) - ns(m - 1e-6)) / 2e-6
    equal(tangent, ahead, rtol=1e-5, atol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(m, torch.ones_like(m))
        equal(torch.autograd.forward_ad.unpack_dual(ns(dual)).tangent, tangent)
    equal(torch.compile(ns, backend="aot_eager", fullgraph=True)(m), want)


@pytest.mark.parametrize("shape", [(2100, 520), (520, 1200), (40, 8), (3, 30, 9)])
def test_the_gram_form_is_the_iteration(shape):
    m = torch.randn(shape, dtype=torch.float64)
    want = NewtonSchulz(dtype=torch.float64)(m)
    ns = NewtonSchulz(dtype=torch.float64, gram=True)
    torch.testing.assert_close(ns(m), want, rtol=0, atol=1e-11)
    got = NewtonSchulz(dtype=torch.float32, gram=True)(m.float())
    assert float((got - want).norm() / want.norm()) < 1e-5
    assert not ns(torch.zeros(shape)).any()


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-300])
def test_a_zero_matrix_stays_zero_without_eps(gram, eps):
    ns = NewtonSchulz(eps=eps, gram=gram, dtype=torch.float32)
    assert not ns(torch.zeros(8, 2)).any()


def test_an_embedding_takes_the_gram_form_beside_half_precision():
    """In float32, where that is a quarter of the operations, and no less exact."""
    ns, long = NewtonSchulz(dtype=torch.bfloat16, gram=True), (3000, 64)
    plain = NewtonSchulz(dtype=torch.bfloat16)
    assert ns.num_flops(*long) < plain.num_flops(*long) / 4
    assert ns.num_flops(800, 64) == plain.num_flops(800, 64)
    m = torch.randn(long)
    exact = NewtonSchulz(dtype=torch.float64)(m)
    errors = [float((one(m) - exact).norm() / exact.norm()) for one in (ns, plain)]
    assert errors[0] < errors[1] < 3e-2
    assert ns.many([m])[0].dtype == torch.bfloat16


def test_float32_stays_float32_in_the_gram_form():
    """Whatever is said of its products elsewhere: bf16 in place of them would show."""
    ns, m = NewtonSchulz(dtype=torch.float32, gram=True), matrix(300, 20, smallest=1e-3)
    before, want = torch.get_float32_matmul_precision(), ns(m.float())
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(ns(m.float()), want)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_what_is_not_said_is_chosen_by_the_device(monkeypatch, caplog):
    ns, large = NewtonSchulz(), (3000, 64)
    on_gpu = NewtonSchulz(dtype=torch.bfloat16, gram=False)
    assert ns.on("cuda") == on_gpu
    for has in (True, False):
        found = dict(avx512_bf16=False, amx_bf16=has)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        monkeypatch.setattr(file.platform, "machine", lambda: "x86_64")
        file.found_dtype.cache_clear()
        caplog.clear()
        with caplog.at_level("INFO"):
            dtype = torch.bfloat16 if has else torch.float32
            assert ns.on("cpu") == NewtonSchulz(dtype=dtype, gram=True)
            ns.on("cpu")
            assert [r.getMessage() for r in caplog.records] == [
                f"marsopt: Newton-Schulz on this CPU in {dtype}, which has "
                f"{'the' if has else 'no'} instructions for bfloat16; on Gram matrices "
                "in float32 where that is faster (ns_dtype and ns_gram say otherwise)"
            ]
        assert ns.many([torch.randn(large)])[0].dtype == dtype
    file.found_dtype.cache_clear()
    for told in (dict(dtype=torch.float16), dict(dtype=torch.float32, gram=True)):
        own = NewtonSchulz(**told)
        assert own.on("cpu").dtype == own.on("cuda").dtype == told["dtype"]
        assert own.on("cpu").gram == own.on("cuda").gram == told.get("gram", False)


def test_bad_arguments():
    with pytest.raises(ValueError, match="got ns_coefficients='cubic', expected one"):
        NewtonSchulz(coefficients="cubic")
    with pytest.raises(ValueError, match="expected .*rows, cols"):
        newton_schulz(torch.zeros(3))
    with pytest.raises(ValueError, match="got ns_steps=0"):
        newton_schulz(torch.zeros(3, 3), steps=0)
    with pytest.raises(ValueError, match="expected a floating point type"):
        newton_schulz(torch.zeros(3, 3), dtype=torch.int64)
