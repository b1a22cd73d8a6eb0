"""NorMuon (Li et al., arXiv 2510.05491, Algorithm 1): Muon with a second moment for
each row of the orthogonal factor; on MARS's corrected gradient: MARS-NorMuon.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.component import (
    Average,
    Buffer,
    MatrixInput,
    MatrixOutput,
    Numbers,
    Tensors,
)
from marsopt.rules.matrices import Matrices
from marsopt.rules.newton_schulz import batched
from marsopt.rules.numerics import at, complement, nonzero, root, working_dtype
from marsopt.rules.options import number, structure
from marsopt.rules.orthogonal import MATCH_RMS_ADAMW, SCALES, MatrixAverage

OF_ROWS = 3  # scalars of a step that the owner reads: eps, beta2, 1 - beta2


def one_per_row(shape: torch.Size, matrices: Matrices) -> torch.Size:
    """Return (rows,) of a matrix (rows, cols)."""
    return shape[:1]


@dataclass(frozen=True, kw_only=True, eq=False)
class NorMuon(MatrixAverage):
    """With c the gradient, or MARS's c, and NS Newton-Schulz:

        m <- mu m + (1 - mu) c
        o = NS(w c + (1 - w) m)                w = 1 - mu with nesterov, else 0
        r <- beta2 r + (1 - beta2) mean over columns of o^2
        o' = o / (sqrt(r) + eps), row by row
        x <- (1 - lr weight_decay) x - lr scale(rows, cols) o' ||o||_F / ||o'||_F

    The paper divides by ||o'||_F and multiplies by 0.2 sqrt(rows cols), which is
    scale(rows, cols) ||o||_F if o is exactly orthogonal and the scale is
    "match_rms_adamw", the default here.

    With beta2 = 0, r is the mean square of each row itself, so that all rows of o' have
    one norm: Muon with its factor normalized by rows ("Muon+" calls that
    post-normalization), at the same one number a row of state.

    Source: Li et al., arXiv 2510.05491, Algorithm 1.

    Args:
        beta2: decay rate of r.
        eps: added to the root of r; with 0, too, 0 / 0 is 0.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> rowwise = marsopt.NorMuon(beta2=0.0)        # "Muon+"
        >>> rule = marsopt.Rule(matrix=marsopt.Algorithm(preconditioner=rowwise))
        >>> params = {"w": torch.tensor([[3.0, 0.0], [0.0, 2.0]])}
        >>> params, _ = rule.step(params, params, rule.init(params), lr=0.1)
        >>> rows = (params["w"] - torch.diag(torch.tensor([3.0, 2.0]))).norm(dim=1)
        >>> bool((rows[0] - rows[1]).abs() < 1e-6)
        True
    """

    adjust_lr_fn: str = structure(MATCH_RMS_ADAMW, checks.one_of(SCALES))
    beta2: Number = number(0.95, checks.decay_rate, beta=1)
    eps: Number = number(1e-8, checks.epsilon)

    keeps = {
        **Average.keeps,
        "r": Buffer(
            "row_exp_avg_sq",
            one_per_row,
            home="owner",
            dtype="working",
        ),
    }
    averaged = "m", "r"

    def scalars(self, t: Tensor, n: Numbers) -> tuple[Number, ...]:
        memory = n.beta2, t, n.log_time
        # 0 / (sqrt(0) + eps) is 0, with eps = 0 too
        eps = nonzero(n.eps)
        return eps, at(*memory), complement(*memory), *super().scalars(t, n)

    def update(
        self, x: Tensor, c: Tensor, buffers: Tensors, s: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        return super().update(x, c, buffers, s[OF_ROWS:])

    def apply(
        self, x: Tensor, o: Tensor, s: tuple[Tensor, ...], scale: Number
    ) -> Tensor:
        return super().apply(x, o, s[OF_ROWS:], scale)

    def at_owner(
        self, matrices: Sequence[MatrixInput], stage: Hashable
    ) -> list[MatrixOutput]:
        factors = [factor.matrix for factor in super().at_owner(matrices, stage)]
        alike: dict[Hashable, list[int]] = {}
        for i, o in enumerate(factors):
            key = (o.shape, o.dtype) if o.ndim == 2 else i  # a batch by itself
            alike.setdefault(key, []).append(i)
        results = [MatrixOutput(o) for o in factors]
        for members in alike.values():
            rows = [matrices[i].s[:OF_ROWS] for i in members]
            if len(members) == 1:
                (i,) = members
                w, r = _factors_of_rows(factors[i], matrices[i].owned[0], *rows[0])
                results[i] = _scaled(factors[i], w, r)
                continue
            s = (torch.stack(column)[:, None] for column in zip(*rows, strict=True))
            r = torch.stack([matrices[i].owned[0] for i in members])
            o = batched([factors[i] for i in members])
            w, r = _factors_of_rows(o, r, *s)
            for i, *row in zip(members, w.unbind(), r.unbind(), strict=True):
                results[i] = _scaled(factors[i], *row)
        return results


def _factors_of_rows(
    o: Tensor, r: Tensor, eps: Tensor, beta2: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the factors of the rows of o' ||o||_F / ||o'||_F beside o, and the new r,
    both (..., rows).
    """
    squares = torch.linalg.vector_norm(o, dim=-1, dtype=working_dtype(o)).square()
    r = beta2 * r + weight * squares / max(1, o.shape[-1])
    w = 1 / (root(r) + eps)
    before = squares.sum(-1, keepdim=True)  # ||o||^2
    after = (squares * w * w).sum(-1, keepdim=True)  # ||o'||^2
    tiny = torch.finfo(after.dtype).tiny  # a zero matrix stays zero
    return w * root(before / after.clamp(min=tiny)), r


def _scaled(o: Tensor, w: Tensor, r: Tensor) -> MatrixOutput:
    """Return the rows of o by their factors."""
    return MatrixOutput((w[..., None] * o).to(o.dtype), (r,))
