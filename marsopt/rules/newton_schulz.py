"""Newton-Schulz: the orthogonal factor of a matrix by matrix products alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marsopt.rules.hyperparameters import structure

# Amsel, Persson, Musco, Gower, "The Polar Express" (arXiv 2505.16932), Algorithm 1:
# minimax quintics for singular values in [1e-3, 1], cushion 0.02407327424182761;
# recomputed in tests/test_newton_schulz.py.
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


@dataclass(frozen=True)
class NewtonSchulz:
    """How matrices are orthogonalized: a value that rules hold and collectives carry
    out.

    Args:
        steps: number of iterations.
        coefficients: a name in ``COEFFICIENTS``.
        dtype: working precision of the iteration. The input is normalized before it is
            cast.
        eps: added to the Frobenius norm that divides the input, so that a zero matrix
            stays zero. The authors add 1e-8 to the norm of m/(1 - beta1); for m itself
            that is 5e-10 at beta1 = 0.95.
        gram: iterate on the Gram matrix of the short side (``from_gram``) where that
            takes fewer operations: 0.58 of them for a 4:1 matrix, 0.69 for 3:1, and
            none are saved for a square one. float32 and wider only: what is lost of a
            Gram matrix is lost for good (``python -m benchmarks.newton_schulz``).
    """

    steps: int = structure(5, name="ns_steps", whole=True)
    coefficients: str = structure("quintic", name="ns_coefficients", whole=True)
    dtype: torch.dtype = structure(torch.bfloat16, name="ns_dtype", whole=True)
    eps: float = structure(5e-10, name="ns_eps", whole=True)
    gram: bool = structure(False, name="ns_gram", whole=True)

    def __post_init__(self) -> None:
        if self.coefficients not in COEFFICIENTS:
            raise ValueError(
                f"got coefficients={self.coefficients!r}, expected one of "
                f"{sorted(COEFFICIENTS)}: "
                "choose one of these names"
            )
        if self.steps < 1:
            raise ValueError(
                f"got steps={self.steps}, expected at least 1: pass a positive number "
                "of iterations"
            )
        if not self.dtype.is_floating_point:
            raise ValueError(
                f"got dtype={self.dtype}, expected a floating point type: pass e.g. "
                "torch.bfloat16"
            )
        if self.gram and self.dtype.itemsize < 4:
            raise ValueError(
                f"got gram=True with dtype={self.dtype}, expected float32 or float64: "
                "half precision would lose the small singular values"
            )

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
        # no name here holds the first iterate: it is freed when there is a second
        factors = self._iterate(self._normalized(matrices))
        return factors.reshape(matrices.shape).to(matrices.dtype)

    def _normalized(self, matrices: Tensor) -> Tensor:
        """The first iterate, in the working precision: (rows, cols), or a batch (num,
        rows, cols).
        """
        norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
        x = (matrices / (norm + self.eps)).to(self.dtype)
        return x if x.ndim == 2 else x.reshape(x.shape[:-2].numel(), *x.shape[-2:])

    def _iterate(self, x: Tensor) -> Tensor:
        """All iterations on a normalized matrix (rows, cols), or a batch of them; the
        Gram matrix is that of the short side.
        """
        tall = x.shape[-2] > x.shape[-1]
        if self._takes_gram(*x.shape[-2:]):
            q = self.from_gram(x.mT @ x if tall else x @ x.mT)
            return x @ q if tall else q @ x
        # they round once where a sum of products rounds twice: half the error
        add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
        table = COEFFICIENTS[self.coefficients]
        for i in range(self.steps):
            a, b, c = table[min(i, len(table) - 1)]
            gram = x.mT @ x if tall else x @ x.mT
            p = add_product(gram, gram, gram, beta=b, alpha=c)
            x = add_product(x, x, p, beta=a) if tall else add_product(x, p, x, beta=a)
        return x

    def _takes_gram(self, rows: int, cols: int) -> bool:
        return self.gram and self._gram_flops(rows, cols) < self._flops(rows, cols)

    def from_gram(self, gram: Tensor) -> Tensor:
        """Q (..., k, k) with X Q the factor of X, from X^T X (..., k, k) alone.

        Every iterate is X times a polynomial in X^T X, so that a matrix cut into rows
        needs its Gram matrix summed once, and no other exchange. Q is computed in the
        dtype of ``gram``, which has to be float32 or wider: a Gram matrix has the
        square of the condition number.
        """
        k = gram.shape[-1]
        one = torch.eye(k, dtype=gram.dtype, device=gram.device)
        norm = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=0).sqrt() + self.eps
        norm = norm[..., None, None]
        gram, q = gram / norm / norm, one / norm
        table = COEFFICIENTS[self.coefficients]
        for i in range(self.steps):
            a, b, c = table[min(i, len(table) - 1)]
            p = a * one + b * gram + c * gram @ gram
            q = q @ p
            if i < self.steps - 1:
                gram = p @ gram @ p
        return q

    def payload(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """What a matrix of ``dtype`` may travel in before it is normalized.

        bf16 where the iteration is bf16: it has the range of float32, so that
        normalizing can wait until the whole matrix is together. fp16 has not.
        """
        return torch.bfloat16 if self.dtype == torch.bfloat16 else dtype

    def num_flops(self, rows: int, cols: int) -> int:
        """Of the iteration on one matrix."""
        if self._takes_gram(rows, cols):
            return self._gram_flops(rows, cols)
        return self._flops(rows, cols)

    def _flops(self, rows: int, cols: int) -> int:
        """Two products with the matrix and one Gram square, in every iteration."""
        short, long = sorted((rows, cols))
        return self.steps * (4 * long * short**2 + 2 * short**3)

    def _gram_flops(self, rows: int, cols: int) -> int:
        """Two products with the matrix; all else is short x short."""
        short, long = sorted((rows, cols))
        return 4 * long * short**2 + (self.steps * 8 - 4) * short**3

    def num_gram_flops(self, rows: int, cols: int, num_ranks: int) -> int:
        """Of the Gram form on one of ``num_ranks``: its share of rows, and k x k."""
        short, long = sorted((rows, cols))
        return 4 * long * short**2 // num_ranks + (self.steps * 8 - 4) * short**3

    def many(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalize a list of matrices (rows, cols) and batches of them (num, rows,
        cols): one batched iteration per shape and dtype.

        On a CPU oblong matrices are iterated one by one: each occupies all cores, and
        fits better into their caches.
        """
        batches: dict[tuple, list[int]] = {}
        for i, x in enumerate(matrices):
            batches.setdefault((*x.shape, x.dtype, x.device), []).append(i)
        out: list[Tensor] = list(matrices)
        for members in batches.values():
            first = matrices[members[0]]
            oblong = first.shape[-2] != first.shape[-1]
            one_by_one = oblong and first.device.type == "cpu"
            if one_by_one and first.ndim > 2 and len(first):
                factors: Iterable[Tensor] = [
                    torch.stack([self(x) for x in matrices[i].unbind()])
                    for i in members
                ]
            elif len(members) == 1 or one_by_one or first.ndim > 2:
                factors = [self(matrices[i]) for i in members]
            else:
                factors = self(torch.stack([matrices[i] for i in members])).unbind()
            for i, o in zip(members, factors, strict=True):
                out[i] = o
        return out


def newton_schulz(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: str = "quintic",
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 5e-10,
) -> Tensor:
    """Approximate the orthogonal factor U V^T of ``matrices`` = U S V^T (..., rows,
    cols), batched over leading dims.

    With X_0 = M / (||M||_F + eps), iterates X <- aX + b(XX^T)X + c(XX^T)^2 X on the
    short side (MARS paper, arXiv 2411.10438, section 3.3; the authors'
    ``zeropower_via_newtonschulz5``). "quintic" with five steps, the default, leaves
    singular values in about 0.7..1.2. Zero rows and columns stay zero. Returns the
    input's dtype.

    Raises:
        ValueError: fewer than two dims, an unknown coefficient set, a non-positive
            ``steps``, a non-float ``dtype``.
    """
    return NewtonSchulz(steps, coefficients, dtype, eps)(matrices)


def polar_factor(matrices: Tensor) -> Tensor:
    """The exact orthogonal factor U V^T by SVD (..., rows, cols): the reference that
    Newton-Schulz approximates.

    Directions whose singular value is zero stay zero, as Newton-Schulz leaves them.
    """
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    tolerance = (
        torch.finfo(s.dtype).eps * max(matrices.shape[-2:]) * s.amax(-1, keepdim=True)
    )
    return (u * (s > tolerance).to(s.dtype).unsqueeze(-2)) @ vh
