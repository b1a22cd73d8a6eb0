"""Newton-Schulz against the polar factor, its constants against their sources."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from marsopt import NewtonSchulz, newton_schulz, polar_factor
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


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of jvp, whatever its class
def test_transforms_have_plain_products():
    """Gradients, vmap, forward derivatives and one graph, where buffers cannot be."""
    ns = NewtonSchulz(dtype=torch.float64)
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


@pytest.mark.parametrize("eps", [0.0, 1e-300])
def test_a_zero_matrix_stays_zero_without_eps(eps):
    ns = NewtonSchulz(eps=eps, dtype=torch.float32)
    assert not ns(torch.zeros(8, 2)).any()


def test_the_device_chooses_a_dtype_that_is_left_out():
    for device, default in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        assert NewtonSchulz().on(device) == NewtonSchulz(dtype=default)
        told = NewtonSchulz(dtype=torch.float16)
        assert told.on(device) == told
    assert NewtonSchulz().many([torch.randn(30, 6)])[0].dtype == torch.float32


def test_bad_arguments():
    with pytest.raises(ValueError, match="got ns_coefficients='cubic', expected one"):
        NewtonSchulz(coefficients="cubic")
    with pytest.raises(ValueError, match="expected .*rows, cols"):
        newton_schulz(torch.zeros(3))
    with pytest.raises(ValueError, match="got ns_steps=0"):
        newton_schulz(torch.zeros(3, 3), steps=0)
    with pytest.raises(ValueError, match="expected a floating point type"):
        newton_schulz(torch.zeros(3, 3), dtype=torch.int64)
