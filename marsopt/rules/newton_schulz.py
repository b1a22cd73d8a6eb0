"""Newton-Schulz: the orthogonal factor of a matrix, from matrix products only."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from marsopt.rules import checks
from marsopt.rules.dtypes import nonzero
from marsopt.rules.hyperparameters import check_fields, structure
from marsopt.rules.matrices import LARGE

if TYPE_CHECKING:  # shapes, which tests/library/test_shapes.py checks
    from jaxtyping import Float

log = logging.getLogger(__name__)

# Amsel, Persson, Musco, Gower, "The Polar Express" (arXiv 2505.16932), Algorithm 1:
# minimax quintics for singular values in [1e-3, 1], cushion 0.02407327424182761;
# recomputed in tests/library/test_newton_schulz.py.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
# The Taylor coefficients of 1/sqrt at 1, order two (Higham, "Functions of Matrices",
# 2008, section 8.3): converges to the exact factor, slowly from small singular values.
_TAYLOR = (1.875, -1.25, 0.375)

# Each set lists (a, b, c) per iteration of X <- aX + b(XX^T)X + c(XX^T)^2 X; the last
# triple repeats.
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    # K. Jordan, "Muon" (2024), and the MARS authors' optimizers/mars.py: largest slope
    # at zero that keeps singular values within about 0.7..1.2.
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # damped by 1.01, the paper's safety factor, up to the fixed point
    "polar_express": (
        *((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS),
        _TAYLOR,
    ),
    "taylor": (_TAYLOR,),
}

# ---- products ------------------------------------------------------------------------


def gram_matrix(
    x: Float[Tensor, "*batch rows cols"],
) -> Float[Tensor, "*batch cols cols"]:
    """Return X^T X of (rows, cols), or of a batch of them."""
    return x.mT @ x


def _products(x: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the product, and the sum with a product, of matrices or of batches. The
    latter rounds once where a sum of products rounds twice: half the error.
    """
    return (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)


def _may_write(x: Tensor) -> bool:
    """Return whether products may be written into buffers (``out=``): autograd,
    torch.func, tensor subclasses and inductor have products only in new tensors.
    A tensor without memory gets the answer of the tensor for which it stands.
    """
    return not (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter, FakeTensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(x)  # nothing public asks it
        or (x.requires_grad and torch.is_grad_enabled())
        or forward_ad.unpack_dual(x).tangent is not None
    )


# ---- the fastest precision of this machine -------------------------------------------

# Rate of half precision over float32's, where there are instructions for it: 4.2 on an
# AMD EPYC (avx512_bf16), 4.1 on an Intel Xeon (amx_bf16).
HALF_RATE = 4


def cpu_dtype() -> torch.dtype:
    """Return the precision that this CPU iterates in unless it is told another: bf16
    where it has instructions for it, else float32, of which bf16 would be emulated.
    """
    return found_dtype()


# What torch.compiler.assume_constant_result sets; that would import dynamo.
cpu_dtype._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def found_dtype() -> torch.dtype:
    """Ask the CPU, once, and say what came out: dynamo traces into no cache."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        capabilities = torch.cpu.get_capabilities()
        has = any(capabilities.get(key) for key in ("avx512_bf16", "amx_bf16"))
    else:  # nothing public says whether oneDNN was built for Arm's instructions
        has = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.bfloat16 if has else torch.float32
    log.info(
        "marsopt: Newton-Schulz on this CPU in %s, which has %s instructions for "
        "bfloat16; on Gram matrices in float32 where that is faster (ns_dtype and "
        "ns_gram say otherwise)",
        dtype,
        "the" if has else "no",
    )
    return dtype


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute products of float32 in float32: TF32 or bf16 would lose digits that a
    Gram matrix, formed once, needs.
    """
    if torch.compiler.is_compiling():  # which has no such region
        yield
        return
    # torch documents mkldnn.matmul, but gives it no type
    kinds = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    for kind in kinds:
        kind.fp32_precision = "ieee"
    try:
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


# ---- the iteration -------------------------------------------------------------------

PIECE = 2**20  # elements that a CPU divides at a time


@dataclass(frozen=True)
class NewtonSchulz:
    """How matrices are orthogonalized: a value that rules hold and collectives carry
    out.

    Args:
        steps: number of iterations.
        coefficients: "quintic" (Muon's and the authors'), "polar_express" or "taylor".
        dtype: working precision of the iteration. The input is normalized before it is
            cast. None = the fastest on the device: bfloat16; on a CPU without
            instructions for that, float32.
        eps: added to the Frobenius norm that divides the input, so that a zero matrix
            stays zero, also with eps=0. The authors add 1e-8 to the norm of
            m/(1 - beta1); for m itself that is 5e-10 at beta1 = 0.95.
        gram: iterate on the Gram matrix of the short side (``from_gram``) where that is
            faster: in ``dtype`` where it takes fewer operations, 0.56 of them for a 4:1
            matrix; for half precision in float32, a quarter as fast, where it takes
            less than a quarter of them, as for an embedding. Digits that a Gram matrix
            loses are lost for good (``python -m benchmarks.newton_schulz``). None =
            on a CPU, where ``dtype`` is None too.

    Raises:
        ValueError: fewer than one step or more than 100, an unknown set of
            coefficients, a ``dtype`` that is not floating point.

    Example:
        >>> ns = marsopt.NewtonSchulz(steps=10, dtype=torch.float64)
        >>> factor = ns(torch.diag(torch.tensor([3.0, 2.0], dtype=torch.float64)))
        >>> bool((factor.diag() - 1).abs().max() < 0.3)
        True
    """

    steps: int = structure(5, checks.iterations, name="ns_steps", whole=True)
    coefficients: str = structure(
        "quintic",
        checks.one_of(tuple(sorted(COEFFICIENTS))),
        name="ns_coefficients",
        whole=True,
    )
    dtype: torch.dtype | None = structure(
        None, checks.floating_or_none, name="ns_dtype", whole=True
    )
    eps: float = structure(5e-10, checks.epsilon, name="ns_eps", whole=True)
    gram: bool | None = structure(None, name="ns_gram", whole=True)

    def __post_init__(self) -> None:
        check_fields(self)

    # ---- precision and form ----------------------------------------------------------

    def on(self, device_type: str) -> NewtonSchulz:
        """Return this iteration with the device's choices for fields that are None.
        Ranks that work together have to agree on it.
        """
        dtype, gram = self._chosen(device_type)
        return replace(self, dtype=dtype, gram=gram)

    def _chosen(self, device_type: str) -> tuple[torch.dtype, bool]:
        """Return dtype and gram on such a device."""
        if self.dtype is not None:
            return self.dtype, bool(self.gram)
        if device_type != "cpu":
            return torch.bfloat16, bool(self.gram)
        return cpu_dtype(), self.gram is None or self.gram

    def _takes_gram(self, rows: int, cols: int, dtype: torch.dtype, gram: bool) -> bool:
        slower = HALF_RATE if dtype.itemsize < 4 else 1
        return gram and slower * self._gram_flops(rows, cols) < self._flops(rows, cols)

    # ---- factors ---------------------------------------------------------------------

    def __call__(self, matrices: Tensor) -> Tensor:
        """The approximate polar factor of ``matrices`` (..., rows, cols), in their own
        dtype.
        """
        if matrices.ndim < 2:
            raise ValueError(
                f"got a tensor of shape {tuple(matrices.shape)}, expected (..., rows, "
                "cols): "
                "give tensors that are not matrices to an elementwise rule"
            )
        x = matrices
        if x.ndim > 3:
            x = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
        return self._factors(x).reshape(matrices.shape).to(matrices.dtype)

    def _factors(
        self, matrices: Float[Tensor, "*batch rows cols"]
    ) -> Float[Tensor, "*batch rows cols"]:
        """Of a matrix (rows, cols), or a batch (num, rows, cols), in the precision that
        they are computed in.
        """
        dtype, gram = self._chosen(matrices.device.type)
        rows, cols = matrices.shape[-2:]
        if self._takes_gram(rows, cols, dtype, gram):
            return self._by_gram(matrices, dtype)
        # no name here holds the first iterate: it is written over
        return self._iterate(self._normalized(matrices, dtype))

    def _normalized(
        self, matrices: Float[Tensor, "*batch rows cols"], dtype: torch.dtype
    ) -> Float[Tensor, "*batch rows cols"]:
        """The first iterate, a new tensor."""
        norm: Tensor = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
        norm = norm + nonzero(self.eps)
        if dtype == matrices.dtype or not _may_write(matrices):
            return (matrices / norm).to(dtype)
        out = torch.empty_like(
            matrices, dtype=dtype, memory_format=torch.contiguous_format
        )
        pieces = [(matrices, norm, out)]
        if matrices.device.type == "cpu" and matrices.numel() > PIECE:
            # quotients of a CPU are all in their own precision before they are cast
            pieces = [
                (m, n, o)
                for triple in zip(*map(_each, (matrices, norm, out)), strict=True)
                for m, n, o in _rows(*triple)
            ]
        for m, n, o in pieces:
            torch.div(m, n, out=o)
        return out

    def _iterate(
        self, x: Float[Tensor, "*batch rows cols"]
    ) -> Float[Tensor, "*batch rows cols"]:
        """All iterations on a normalized matrix, or a batch of them, which is written
        over: on an iterate and the next, a Gram matrix and its polynomial.
        """
        rows, cols = x.shape[-2:]
        tall, writes = rows > cols, _may_write(x)
        product, add_product = _products(x)
        first = second = after = None
        if writes:
            size = min(rows, cols)
            first, second = x.new_empty(2, *x.shape[:-2], size, size).unbind()
        for a, b, c in self._polynomials():
            gram = product(*((x.mT, x) if tall else (x, x.mT)), out=first)
            p = add_product(gram, gram, gram, beta=b, alpha=c, out=second)
            factors = (x, p) if tall else (p, x)
            iterate = add_product(x, *factors, beta=a, out=after)
            x, after = iterate, x if writes else None
        return x

    def _by_gram(
        self, x: Float[Tensor, "*batch rows cols"], dtype: torch.dtype
    ) -> Float[Tensor, "*batch rows cols"]:
        x = x.to(torch.promote_types(dtype, torch.float32))
        tall = x.shape[-2] > x.shape[-1]
        with full_float32():
            q = self.from_gram(gram_matrix(x if tall else x.mT))
            if dtype == x.dtype or not _may_write(x):
                return (x @ q if tall else q.mT @ x).to(dtype)
            out = torch.empty_like(x, dtype=dtype)
            long = -2 if tall else -1
            num = max(1, PIECE // q.shape[-1])
            for piece, o in zip(x.split(num, long), out.split(num, long), strict=True):
                o.copy_(piece @ q if tall else q.mT @ piece)
            return out

    def from_gram(
        self, gram: Float[Tensor, "*batch k k"]
    ) -> Float[Tensor, "*batch k k"]:
        """Q (..., k, k) with X Q the factor of X, from only X^T X (..., k, k).

        Every iterate is X times a polynomial in X^T X. Q is computed in the dtype of
        ``gram``, which has to be float32 or wider: a Gram matrix has the square of the
        condition number. The norm of X has to be below the root of the largest number.
        """
        shape = gram.shape
        norm = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=0).sqrt()
        norm = norm + nonzero(self.eps)
        norm = norm[..., None, None]
        gram = gram / norm / norm
        if gram.ndim > 3:
            gram = gram.reshape(shape[:-2].numel(), *shape[-2:])
        _, add_product = _products(gram)
        q = gram
        polynomials = self._polynomials()
        for i, (a, b, c) in enumerate(polynomials):
            p = add_product(gram, gram, gram, beta=b, alpha=c)
            p.diagonal(dim1=-2, dim2=-1).add_(a)
            q = q @ p if i else p
            if i < len(polynomials) - 1:
                gram = p @ gram @ p
        return q.reshape(shape) / norm

    def _polynomials(self) -> list[tuple[float, float, float]]:
        table = COEFFICIENTS[self.coefficients]
        return [table[min(i, len(table) - 1)] for i in range(self.steps)]

    def many(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalize a list of matrices (rows, cols) and batches of them (num, rows,
        cols): one batched iteration per shape and dtype; on a CPU large ones one by
        one. Factors are in the precision that they were computed in.
        """
        batches: dict[tuple[Hashable, ...], list[int]] = {}
        for i, x in enumerate(matrices):
            batches.setdefault((*x.shape, x.dtype, x.device), []).append(i)
        out: list[Tensor] = list(matrices)
        # largest first: their temporaries are freed before most factors are there
        for members in sorted(
            batches.values(), key=lambda indices: -matrices[indices[0]].numel()
        ):
            first = matrices[members[0]]
            size = first.shape[-2:].numel()
            if first.device.type == "cpu" and size >= LARGE:
                for i in members:
                    factors = [self._factors(x) for x in _each(matrices[i])]
                    out[i] = factors[0] if first.ndim == 2 else torch.stack(factors)
            elif len(members) == 1 or first.ndim > 2:
                for i in members:
                    out[i] = self._factors(matrices[i])
            else:
                batch = batched([matrices[i] for i in members])
                for i, o in zip(members, self._factors(batch).unbind(), strict=True):
                    out[i] = o
        return out

    # ---- cost ------------------------------------------------------------------------

    def payload(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """The dtype in which a matrix of ``dtype`` may travel before it is normalized.

        bf16 where the iteration is bf16: it has the range of float32, so that
        normalizing can wait until the whole matrix is together. fp16 has not.
        """
        return torch.bfloat16 if self.dtype in (None, torch.bfloat16) else dtype

    def returned(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """The dtype in which its factor travels: it was computed in that."""
        return self.dtype or torch.bfloat16

    @property
    def is_float32(self) -> bool:
        """Whether it iterates in float32, or wider."""
        return self.dtype is not None and self.dtype.itemsize >= 4

    def num_flops(self, rows: int, cols: int) -> int:
        """Of the iteration on one matrix; for the device that ``on`` was told."""
        gram = self._takes_gram(
            rows, cols, self.dtype or torch.bfloat16, bool(self.gram)
        )
        return (self._gram_flops if gram else self._flops)(rows, cols)

    def _flops(self, rows: int, cols: int) -> int:
        """A Gram matrix, its square and a product with the matrix, in every
        iteration.
        """
        short, long = sorted((rows, cols))
        return self.steps * (4 * long * short**2 + 2 * short**3)

    def _gram_flops(self, rows: int, cols: int) -> int:
        """A Gram matrix and a product with the matrix, once; all else is short x
        short.
        """
        short, long = sorted((rows, cols))
        return 4 * long * short**2 + (8 * self.steps - 6) * short**3


def batched(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices of one shape as a batch (num, rows, cols): where they are the
    rows of a batch, one after the other, a view of it; else a copy.
    """
    first = matrices[0]
    if not _may_write(first) or not all(x.is_contiguous() for x in matrices):
        return torch.stack(list(matrices))
    storage, start = first.untyped_storage()._cdata, first.storage_offset()
    places = [(x.untyped_storage()._cdata, x.storage_offset()) for x in matrices]
    size = first.numel()
    if places != [(storage, start + i * size) for i in range(len(matrices))]:
        return torch.stack(list(matrices))
    shape = len(matrices), *first.shape
    return first.as_strided(shape, (size, *first.stride()), start)


def _each(x: Tensor) -> tuple[Tensor, ...]:
    """Return the matrices of a batch; of one matrix, itself."""
    return (x,) if x.ndim == 2 else x.unbind()


def _rows(x: Tensor, norm: Tensor, out: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut a matrix and its quotient into pieces of some rows."""
    num = max(1, PIECE // max(1, x.shape[-1]))
    for m, o in zip(x.split(num), out.split(num), strict=True):
        yield m, norm, o


def newton_schulz(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: str = "quintic",
    dtype: torch.dtype | None = None,
    eps: float = 5e-10,
) -> Tensor:
    """Approximate the orthogonal factor U V^T of ``matrices`` = U S V^T (..., rows,
    cols), batched over leading dims.

    With X_0 = M / (||M||_F + eps), iterates X <- aX + b(XX^T)X + c(XX^T)^2 X on the
    short side (MARS paper, arXiv 2411.10438, section 3.3; the authors'
    ``zeropower_via_newtonschulz5``). "quintic" with five steps, the default, leaves
    singular values in about 0.7..1.2. Zero rows and columns stay zero.

    Args:
        matrices: (..., rows, cols), real and floating point, of any dtype and device.
        steps: number of iterations.
        coefficients: a, b, c of every iteration, by a name in
            ``marsopt.rules.newton_schulz.COEFFICIENTS``.
        dtype: working precision, as in ``NewtonSchulz``: None = bfloat16 where the
            device has instructions for it, else float32.
        eps: added to the norm that divides the input.

    Returns:
        The factor, in the shape and dtype of ``matrices``.

    Raises:
        ValueError: fewer than two dims, an unknown coefficient set, a non-positive
            ``steps``, a non-float ``dtype``.

    Example:
        >>> m = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
        >>> o = marsopt.newton_schulz(m, dtype=torch.float32)
        >>> bool((torch.linalg.svdvals(o) - 1).abs().max() < 0.35)
        True
        >>> bool((o[:, 2] == 0).all())
        True
    """
    return NewtonSchulz(steps, coefficients, dtype, eps)(matrices)


def polar_factor(matrices: Tensor) -> Tensor:
    """The exact orthogonal factor U V^T by SVD (..., rows, cols): the reference that
    Newton-Schulz approximates.

    Directions whose singular value is zero stay zero, as Newton-Schulz leaves them.

    Args:
        matrices: (..., rows, cols), float32 or float64.

    Returns:
        The factor, in the shape and dtype of ``matrices``.

    Raises:
        RuntimeError: fewer than two dims, or a dtype of which torch has no SVD, as half
            precision (NotImplementedError).

    Example:
        >>> marsopt.polar_factor(torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]]))
        tensor([[1., 0., 0.],
                [0., 1., 0.]])
    """
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    tolerance = (
        torch.finfo(s.dtype).eps * max(matrices.shape[-2:]) * s.amax(-1, keepdim=True)
    )
    factor: Tensor = (u * (s > tolerance).to(s.dtype).unsqueeze(-2)) @ vh
    return factor
