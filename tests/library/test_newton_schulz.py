"""Newton-Schulz against the polar factor, its constants against their sources."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.newton_schulz import matrix as matrix_of
from marsopt import NewtonSchulz, newton_schulz, polar_factor
from marsopt.rules.newton_schulz import COEFFICIENTS, FLOAT16_NORM


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
    ("name", "error"),
    [
        ("random", 4e-3),
        ("low rank", 0.08),
        ("6 decades", 0.03),
        ("3 decades", 0.015),
        ("one large", 8e-3),
    ],
)
@pytest.mark.parametrize("shape", [(64, 256), (64, 192), (256, 64), (64, 64)])
def test_working_precision(name, error, shape):
    """Relative Frobenius error beside float64 with the same polynomial: float16's is
    at most half of bfloat16's, in every form.
    """
    m = matrix_of(name, *shape)
    exact, errors = newton_schulz(m, dtype=torch.float64), []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        o = newton_schulz(m.float(), dtype=dtype)
        assert o.dtype == torch.float32
        errors.append(float((o.double() - exact).norm() / exact.norm()))
    assert errors[0] < error / 100
    assert errors[1] < min(error, errors[2] / 2)
    assert errors[2] < 10 * error


def test_squares_of_gram_matrices_stay_in_float16s_range():
    """For a singular value of any size: a GPU may add partial sums in float16."""
    angle = torch.linspace(0, 1.57, 1000, dtype=torch.float64)
    m = torch.diag_embed(torch.stack([angle.cos(), angle.sin()], -1))
    for name in COEFFICIENTS:
        for steps in range(1, 9):
            o = newton_schulz(m, steps=steps, coefficients=name, dtype=m.dtype)
            assert (FLOAT16_NORM * float(o.max())) ** 4 < 65504, (name, steps)


@pytest.mark.parametrize("shape", [(2, 5, 7), (2, 5, 17), (17, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safe_on_zero_tiny_and_huge(dtype, shape):
    """Normalized before the cast, so that half precision does not overflow."""
    for given in (torch.float64, torch.float32, torch.float16):
        assert not newton_schulz(torch.zeros(shape, dtype=given), dtype=dtype).any()
    huge = torch.randn(shape, dtype=torch.float64).clamp(-5, 5)
    for m in (1e-6 * huge.float(), 1e100 * huge, (1e4 * huge).half()):
        o = newton_schulz(m, dtype=dtype)
        assert torch.isfinite(o).all()
        s = torch.linalg.svdvals(o.double()).max(-1).values
        assert ((s > 0.5) & (s < 1.3)).all()


@pytest.mark.parametrize(
    ("dtype", "cols", "error"), [(torch.float64, 10, 1e-12), (torch.float16, 20, 2e-3)]
)
def test_batched_is_one_by_one_and_zero_rows_stay_zero(dtype, cols, error):
    batch = torch.randn(3, 2, 6, cols, dtype=torch.float64)
    batch[0, 0, 2] = 0
    whole = newton_schulz(batch, dtype=dtype)
    for i in range(3):
        for j in range(2):
            alone = newton_schulz(batch[i, j], dtype=dtype)
            torch.testing.assert_close(whole[i, j], alone, rtol=0, atol=error)
    assert not whole[0, 0, 2].any()
    rest = newton_schulz(batch[0, 0, [0, 1, 3, 4, 5]], dtype=dtype)
    torch.testing.assert_close(whole[0, 0, [0, 1, 3, 4, 5]], rest, rtol=0, atol=error)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_flops_are_those_that_torch_counts(dtype, steps):
    ns = NewtonSchulz(steps, dtype=dtype)
    for rows, cols in ((8, 8), (8, 12), (8, 13), (8, 16), (24, 8), (32, 8)):
        with FlopCounterMode(display=False) as counter:
            ns(torch.empty(3, rows, cols, device="meta"))
        want = ns.on("cuda").num_flops(rows, cols)
        assert counter.get_total_flops() == 3 * want, (rows, cols)
        standard = steps * (4 * rows * cols * 8 + 2 * 8**3)
        shares = dtype == torch.float16 and steps > 1 and max(rows, cols) > 12
        assert want < standard if shares else want == standard, (rows, cols)
    assert NewtonSchulz(dtype=torch.float16).num_flops(4, 1) == 8 * 4 + 28


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
    for call, x in ((ns, m), (NewtonSchulz(dtype=torch.float16), m.mT.float())):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        equal(compiled(x), call(x))
    equal(torch.func.vmap(call)(x), call(x), rtol=0, atol=0.03)  # rounds twice


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
