"""The orthogonal factor of an average: Muon (K. Jordan, 2024), Moonlight (arXiv
2502.16982), and on MARS's corrected gradient MARS-Shampoo (arXiv 2411.10438, Algorithm
4) and MARS-M (arXiv 2510.21800).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.checks import Number, Weight
from marsopt.rules.component import (
    Average,
    MatrixInput,
    MatrixOutput,
    MatrixPreconditioner,
    Numbers,
    Tensors,
)
from marsopt.rules.newton_schulz import NewtonSchulz
from marsopt.rules.numerics import complement, product
from marsopt.rules.options import number, structure

SCALES = ORIGINAL, MATCH_RMS_ADAMW = "original", "match_rms_adamw"  # as torch's Muon


def lr_scale(adjust_lr_fn: str, rows: int, cols: int) -> float:
    """Return the factor of the learning rate for a whole matrix of this shape."""
    if adjust_lr_fn == ORIGINAL:
        return float(max(1, rows / max(1, cols)) ** 0.5)
    return float(0.2 * max(rows, cols) ** 0.5)


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixAverage(Average, MatrixPreconditioner):
    """An average with an orthogonalized direction: with u = w c + (1 - w) m, and w = 0
    by default, o = NS(u), and

        x <- (1 - lr weight_decay) x - lr scale(rows, cols) o

    Args:
        nesterov: True: w = 1 - mu. A number in [0, 1]: w itself, beside the debiased
            average m/(1 - mu^t).
        adjust_lr_fn: scale by shape, in torch.optim.Muon's words. "original":
            sqrt(max(1, rows/cols)) (K. Jordan, Muon, 2024); "match_rms_adamw": 0.2
            sqrt(max(rows, cols)), an orthogonal step of AdamW's root mean square
            (Moonlight, arXiv 2502.16982, eq. 4).
        ns: how matrices are orthogonalized.
    """

    nesterov: Weight = number(False, checks.gradient_weight)
    adjust_lr_fn: str = structure(ORIGINAL, checks.one_of(SCALES))
    ns: NewtonSchulz = NewtonSchulz()

    @property
    def debiases(self) -> bool:
        return not isinstance(self.nesterov, bool)

    @property
    def makes_matrix(self) -> bool:
        return self.nesterov is not False

    @property
    def cost(self) -> NewtonSchulz:
        return self.ns

    def scalars(self, t: Tensor, n: Numbers) -> tuple[Number, ...]:
        memory = n.momentum, t, n.log_time
        if n.nesterov is False:
            return super().scalars(t, n)
        if n.nesterov is True:
            w = complement(*memory)
            return *super().scalars(t, n), w, 1 - w
        w = n.nesterov
        return *super().scalars(t, n), w, (1 - w) / (1 - product(*memory))

    def update(
        self, x: Tensor, c: Tensor, buffers: Tensors, s: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        _, _, mu, weight, *w = s
        m = mu * buffers["m"] + weight * c
        return (w[0] * c + w[1] * m if w else None), {"m": m}

    def at_owner(
        self, matrices: Sequence[MatrixInput], stage: Hashable
    ) -> list[MatrixOutput]:
        factors = self.ns.many([m.matrix for m in matrices])
        return [MatrixOutput(o) for o in factors]

    def scale(self, rows: int, cols: int) -> float:
        return lr_scale(self.adjust_lr_fn, rows, cols)

    def apply(
        self, x: Tensor, o: Tensor, s: tuple[Tensor, ...], scale: Number
    ) -> Tensor:
        lr, decay, *_ = s
        step = (lr * scale) * o
        return self.decay_of(x, step, decay) * x - step


@dataclass(frozen=True, kw_only=True, eq=False)
class Orthogonal(MatrixAverage):
    """With c the gradient, or MARS's c, and NS Newton-Schulz:

        m <- mu m + (1 - mu) c
        o = NS(w c + (1 - w) m)            w = 1 - mu with nesterov, else 0
        x <- (1 - lr weight_decay) x - lr scale(rows, cols) o

    A number for ``nesterov`` is w itself, and m/(1 - mu^t) stands for m. Newton-Schulz
    normalizes its input: averages and the sums of other codes (b <- mu b + g, and
    NS(g + mu b)) have the same factor. Muon is nesterov with the scale "original",
    Moonlight with "match_rms_adamw"; MARS-Shampoo and MARS-M are Muon and Moonlight
    without nesterov.

    Source: K. Jordan, Muon, 2024; Moonlight, arXiv 2502.16982; MARS-Shampoo, arXiv
    2411.10438, Algorithm 4; MARS-M, arXiv 2510.21800.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> muon = marsopt.Orthogonal(momentum=0.9, nesterov=True)
        >>> rule = marsopt.Rule(matrix=marsopt.Algorithm(preconditioner=muon))
        >>> params = {"w": torch.tensor([[3.0, 0.0], [0.0, 2.0]])}
        >>> new, _ = rule.step(params, params, rule.init(params), lr=0.1)
        >>> steps = torch.linalg.svdvals(params["w"] - new["w"])
        >>> bool(((steps > 0.065) & (steps < 0.125)).all())     # lr times 0.7 to 1.2
        True
    """
