"""Newton-Schulz: the orthogonal factor of a matrix, from matrix products only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from marsopt.rules import checks
from marsopt.rules.numerics import nonzero
from marsopt.rules.options import check_fields, structure

if TYPE_CHECKING:  # shapes, which tests/library/test_shapes.py checks
    from jaxtyping import Float

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
Polynomial = tuple[float, float, float]  # (a, b, c)

# The forms that a working precision allows, by the number of steps on one Gram matrix;
# other precisions form one in every step. A matrix takes the form of fewest FLOPs.
# Errors by form and spectrum: python -m benchmarks.newton_schulz.
FORMS: dict[torch.dtype, tuple[int, ...]] = {torch.float16: (1, 3)}
# The norm of the first iterate in float16, the largest power of two that keeps squares
# of Gram matrices below 65504. With norm 1 the Gram matrix of a 4096 x 14336 matrix
# lies below 6e-5, where float16 loses digits.
FLOAT16_NORM = 8

# ---- products ------------------------------------------------------------------------


def _products(x: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the product, and the sum with a product, of matrices or of batches. The
    latter rounds once, and a sum of products twice: half the error.
    """
    return (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)


def _may_write(x: Tensor) -> bool:
    """Return whether products may be written into buffers (``out=``): autograd,
    torch.func, tensor subclasses and inductor have products only in new tensors.
    A fake tensor gets the answer of the tensor that it stands for.
    """
    return not (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter, FakeTensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(x)  # nothing public asks it
        or (x.requires_grad and torch.is_grad_enabled())
        or forward_ad.unpack_dual(x).tangent is not None
    )


# ---- forms ---------------------------------------------------------------------------


def _polynomial(
    segment: Sequence[Polynomial], gram: Tensor, norm: float, out: Tensor | None
) -> tuple[float, Tensor]:
    """Return (a, P): the steps of a segment multiply the iterate by aI + P, which is
    the product of their polynomials, each of the Gram matrix that the step before
    leaves. A single step has P without aI: its rounding would cost digits of P.

    Args:
        segment: the polynomials.
        gram: the first Gram matrix times norm^2.
        norm: the factor of the iterates.
        out: memory for P of a single step.
    """
    _, add_product = _products(gram)
    factor = gram  # the first step replaces it
    for i, (a, b, c) in enumerate(segment):
        p = add_product(gram, gram, gram, beta=b / norm**2, alpha=c / norm**4, out=out)
        if len(segment) == 1:
            return a, p
        if i + 1 < len(segment):
            for _ in range(2):  # G <- G (aI + P)^2
                gram = add_product(gram, gram, p, beta=a)
        factor = add_product(factor, factor, p, beta=a) if i else p
        if i == 0:
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
    return 0.0, factor


def _num_flops(form: Sequence[Sequence[Polynomial]], rows: int, cols: int) -> int:
    """Return the FLOPs of a form. A segment takes a Gram matrix, a product with the
    matrix and a square; every further step of it four products of the short side:
    two for the next Gram matrix, its square, and the product of polynomials.
    """
    short, long = min(rows, cols), max(rows, cols)
    small = sum(4 * len(segment) - 3 for segment in form)
    return 4 * len(form) * long * short**2 + 2 * small * short**3


# ---- the iteration -------------------------------------------------------------------


@dataclass(frozen=True)
class NewtonSchulz:
    """How matrices are orthogonalized: a value that rules hold and collectives carry
    out.

    Args:
        steps: number of iterations.
        coefficients: "quintic" (Muon's and the authors'), "polar_express" or "taylor".
        dtype: working precision of the iteration. The input is normalized before it is
            cast. None = bfloat16; on a CPU float32. float16 rounds less than bfloat16,
            and three steps share one Gram matrix if the long side is more than 1.5
            times the short side: five steps on a 4:1 matrix take 0.67 of the FLOPs.
        eps: added to the Frobenius norm that divides the input, so that a zero matrix
            stays zero, also with eps=0. The authors add 1e-8 to the norm of
            m/(1 - beta1); for m itself that is 5e-10 at beta1 = 0.95.

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

    def __post_init__(self) -> None:
        check_fields(self)

    # ---- precision -------------------------------------------------------------------

    def on(self, device_type: str) -> NewtonSchulz:
        """Return this iteration in the precision that it has on a device."""
        return replace(self, dtype=self._dtype_on(device_type))

    def _dtype_on(self, device_type: str) -> torch.dtype:
        default = torch.float32 if device_type == "cpu" else torch.bfloat16
        return self.dtype or default

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
        dtype = self._dtype_on(matrices.device.type)
        # no name here holds the first iterate: it is written over
        return self._iterate(self._normalized(matrices, dtype))

    def _normalized(
        self, matrices: Float[Tensor, "*batch rows cols"], dtype: torch.dtype
    ) -> Float[Tensor, "*batch rows cols"]:
        """The first iterate, a new tensor."""
        # float16 holds no norm above 65504, and no eps
        wide = torch.float32 if matrices.dtype == torch.float16 else None
        norm: Tensor = torch.linalg.vector_norm(
            matrices, dim=(-2, -1), keepdim=True, dtype=wide
        )
        norm = norm + nonzero(self.eps)
        if dtype == torch.float16:
            norm = norm / FLOAT16_NORM
        if not _may_write(matrices):
            return (matrices / norm).to(dtype)
        out = torch.empty_like(
            matrices, dtype=dtype, memory_format=torch.contiguous_format
        )
        return torch.div(matrices, norm, out=out)

    def _iterate(
        self, x: Float[Tensor, "*batch rows cols"]
    ) -> Float[Tensor, "*batch rows cols"]:
        """All iterations on a normalized matrix, or a batch of them, which is written
        over: on an iterate and the next, a Gram matrix and its polynomial. If steps
        share a Gram matrix, products have memory of their own.
        """
        rows, cols = x.shape[-2:]
        segments = self._segments(rows, cols, x.dtype)
        tall, norm = rows > cols, FLOAT16_NORM if x.dtype == torch.float16 else 1
        writes = _may_write(x) and len(segments) == self.steps
        product, add_product = _products(x)
        first = second = after = None
        if writes:
            size = min(rows, cols)
            first, second = x.new_empty(2, *x.shape[:-2], size, size).unbind()
        for segment in segments:
            gram = product(*((x.mT, x) if tall else (x, x.mT)), out=first)
            a, p = _polynomial(segment, gram, norm, out=second)
            scaled = dict(beta=a / norm, alpha=1 / norm, out=after)
            iterate = add_product(x, *((x, p) if tall else (p, x)), **scaled)
            x, after, norm = iterate, x if writes else None, 1
            del gram, p  # before the next segment has its own
        return x

    def _segments(
        self, rows: int, cols: int, dtype: torch.dtype
    ) -> list[list[Polynomial]]:
        """The polynomials of the form of fewest FLOPs that ``dtype`` allows for a
        matrix: a list for each Gram matrix.
        """
        table = COEFFICIENTS[self.coefficients]
        steps = [table[min(i, len(table) - 1)] for i in range(self.steps)]
        nums = FORMS.get(dtype, (1,))
        forms = [[steps[i : i + n] for i in range(0, len(steps), n)] for n in nums]
        best = forms[0]
        for form in forms[1:]:
            if _num_flops(form, rows, cols) < _num_flops(best, rows, cols):
                best = form
        return best

    def many(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalize a list of matrices (rows, cols) and batches of them (num, rows,
        cols): one batched iteration per shape and dtype. Factors are in the precision
        that they were computed in.
        """
        batches: dict[tuple[Hashable, ...], list[int]] = {}
        for i, x in enumerate(matrices):
            batches.setdefault((*x.shape, x.dtype, x.device), []).append(i)
        out: list[Tensor] = list(matrices)
        # largest first: their temporaries are freed before most factors are there
        for members in sorted(
            batches.values(), key=lambda indices: -matrices[indices[0]].numel()
        ):
            if len(members) == 1 or matrices[members[0]].ndim > 2:
                for i in members:
                    out[i] = self._factors(matrices[i])
            else:
                factors = self._factors(batched([matrices[i] for i in members]))
                if factors.device.type == "cuda":  # one copy for all
                    factors = factors.contiguous()
                for i, o in zip(members, factors.unbind(), strict=True):
                    out[i] = o
        return out

    # ---- cost ------------------------------------------------------------------------

    def payload(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """The dtype that a matrix of ``dtype`` may travel in before it is normalized.

        bf16 if the iteration is in bf16: it has the range of float32, so that
        normalizing can wait until the whole matrix is together. fp16 has not.
        """
        return torch.bfloat16 if self.dtype in (None, torch.bfloat16) else dtype

    def returned(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """The dtype of its factor, computed and sent."""
        return self.dtype or torch.bfloat16

    @property
    def is_float32(self) -> bool:
        """Whether it iterates in float32, or wider."""
        return self.dtype is not None and self.dtype.itemsize >= 4

    def num_flops(self, rows: int, cols: int) -> int:
        """Of all products, in the form that the matrix takes."""
        dtype = self.dtype or torch.bfloat16
        return _num_flops(self._segments(rows, cols, dtype), rows, cols)


def batched(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices of one shape as a batch (num, rows, cols): a view of a batch if
    they are its rows, one after the other; else a copy.
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
        dtype: working precision: None = bfloat16; on a CPU float32. float16 takes
            fewer FLOPs on long matrices (``NewtonSchulz``).
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

    Directions with a singular value of zero stay zero, as Newton-Schulz leaves them.

    Args:
        matrices: (..., rows, cols), float32 or float64.

    Returns:
        The factor, in the shape and dtype of ``matrices``.

    Raises:
        RuntimeError: fewer than two dims, or a dtype without an SVD in torch, as half
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
