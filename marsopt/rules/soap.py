"""SOAP (Vyas et al., arXiv 2409.11321, Algorithm 3, as nikhilvyas/SOAP's soap.py has
it): Adam in the eigenbasis of Shampoo's factors; on MARS's corrected gradient:
MARS-SOAP; with an orthogonalized step: SOAP-Muon.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.checks import Number, Weight
from marsopt.rules.component import (
    Buffer,
    MatrixInput,
    MatrixOutput,
    MatrixPreconditioner,
    Numbers,
    Tensors,
)
from marsopt.rules.matrices import LARGE, Matrices
from marsopt.rules.newton_schulz import NewtonSchulz
from marsopt.rules.numerics import (
    complement,
    full_float32,
    nonzero,
    product,
    root,
    working,
)
from marsopt.rules.options import number, structure
from marsopt.rules.orthogonal import MATCH_RMS_ADAMW, SCALES, lr_scale
from marsopt.rules.registry import NamedRule, register

if TYPE_CHECKING:  # shapes, which tests/library/test_shapes.py checks
    from jaxtyping import Float, Int

    Matrix = Float[Tensor, "*batch rows cols"]
    Left = Float[Tensor, "*batch left left"]  # rows or, without a factor, 0
    Right = Float[Tensor, "*batch right right"]

Sides = Literal["both", "short"]


def _false_or_weight(name: str, value: Any) -> None:
    """False, a number in [0, 1], or a value that knows its step."""
    if value is True:
        raise ValueError(
            f"got {name}=True for SOAP, expected False or a number in [0, 1]: SOAP has "
            "no Nesterov form; pass a weight of the gradient, such as 0.2"
        )
    checks.gradient_weight(name, value)


FIRST, REFRESH = "first", "refresh"  # stages


class Kept(NamedTuple):
    """An owner's buffers of a matrix, or of a batch of them, in the order of
    ``SOAP.keeps``. A side without a factor has matrices (0, 0).
    """

    m: Tensor  # (..., rows, cols), in the basis, as v
    v: Tensor
    row_factor: Tensor  # (..., rows, rows): L, and its basis
    row_basis: Tensor
    col_factor: Tensor  # (..., cols, cols): R, and its basis
    col_basis: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class SOAP(MatrixPreconditioner):
    """With G = c the gradient, or MARS's c, and Q_L, Q_R orthogonal, the bases of the
    factors L and R:

        the first step:
            L <- (1 - b) G G^T,  R <- (1 - b) G^T G
            Q_L, Q_R <- their eigenvectors, descending;  x stays
        all later ones, counted by t:
            G' = Q_L^T G Q_R
            m <- beta1 m + (1 - beta1) G'
            v <- beta2 v + (1 - beta2) G'^2
            o = Q_L (m / (sqrt(v) + eps)) Q_R^T
            x <- (1 - lr weight_decay) (x - lr sqrt(1 - beta2^t) / (1 - beta1^t) o)
            L <- b L + (1 - b) G G^T,  R <- b R + (1 - b) G^T G
        and where t is a multiple of precondition_frequency (``MARS`` counts skipped
        steps too, after the first that was not), for L as for R:
            order Q_L by diag(Q_L^T L Q_L), descending, and the rows of v with it
            Q_L <- the orthogonal factor of QR(L Q_L);  m follows into the new basis

    With ``orthogonalize``, o is the orthogonal factor of that (SOAP-Muon), and

            x <- (1 - lr weight_decay) x - lr scale(rows, cols) o

    Factors, bases and all products with them are in float32 without TF32, in float64
    for parameters of that dtype: their spectrum is wider than half precision holds. A
    matrix that gets its first gradient later than the rest starts in the basis of its
    own rows and columns, until the next refresh.

    Source: Vyas et al., arXiv 2409.11321, Algorithm 3, as its authors' code has it.

    Args:
        betas: decay rates of m and v.
        eps: added to the root of v; with 0, too, 0 / 0 is 0.
        shampoo_beta: b, decay rate of the factors; None = betas[1].
        nesterov: a number w in [0, 1]: (1 - w) m/(1 - beta1^t) + w G' stands for the
            debiased m.
        sides: which have a factor: "both", or only the "short" one (of a square, the
            columns): less state and fewer products, 10.7 bytes a parameter and 0.3 of
            Newton-Schulz's FLOPs for GPT-2 small.
        precondition_frequency: steps from one refresh of the bases to the next.
        max_dim: a side longer than this, as a vocabulary's, has no factor.
        stagger: let tensors refresh one after the other, not all in the same step:
            every step then takes the same time.
        orthogonalize: step along the orthogonal factor.
        adjust_lr_fn: scale by shape, with ``orthogonalize``: as ``Orthogonal``'s.
        ns: how steps are orthogonalized.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> soap = marsopt.SOAP(sides="short")
        >>> rule = marsopt.Rule(matrix=marsopt.Algorithm(preconditioner=soap))
        >>> state = rule.init({"w": torch.ones(4, 2)})
        >>> for symbol, buffer in state.buffers.items():
        ...     print(symbol, tuple(buffer["w"].shape))
        m (1, 4, 2)
        v (1, 4, 2)
        L (1, 0, 0)
        QL (1, 0, 0)
        R (1, 2, 2)
        QR (1, 2, 2)
    """

    betas: tuple[Number, Number] = number((0.95, 0.95), checks.betas)
    eps: Number = number(1e-8, checks.epsilon)
    weight_decay: Number = number(0.01, checks.at_least_zero)
    shampoo_beta: Number | None = number(None, checks.none_or(checks.decay_rate))
    nesterov: Weight = number(False, _false_or_weight)
    sides: Sides = structure("both", checks.one_of(get_args(Sides)))
    precondition_frequency: int = structure(10, checks.count)
    max_dim: int = structure(10_000, checks.count)
    stagger: bool = False
    orthogonalize: bool = False
    adjust_lr_fn: str = structure(MATCH_RMS_ADAMW, checks.one_of(SCALES))
    ns: NewtonSchulz = NewtonSchulz()

    keeps = {
        "m": Buffer("exp_avg_in_basis", home="owner", is_debiased=True),
        "v": Buffer("exp_avg_sq_in_basis", home="owner", is_debiased=True),
        "L": Buffer("row_factor", home="owner", dtype="working"),
        "QL": Buffer("row_basis", home="owner", dtype="working", start="identity"),
        "R": Buffer("col_factor", home="owner", dtype="working"),
        "QR": Buffer("col_basis", home="owner", dtype="working", start="identity"),
    }

    def beta1(self, n: Numbers) -> Number:
        beta1: Number = n.betas[0]
        return beta1

    @property
    def buffers(self) -> dict[str, Buffer]:
        shapes = dict.fromkeys(("L", "QL"), partial(self._square, 0))
        shapes |= dict.fromkeys(("R", "QR"), partial(self._square, 1))
        return {
            symbol: buffer._replace(shape=shapes.get(symbol, buffer.shape))
            for symbol, buffer in self.keeps.items()
        }

    def _square(self, side: int, shape: torch.Size, matrices: Matrices) -> torch.Size:
        size = shape[side] if self.cost.has_factor(*shape)[side] else 0
        return torch.Size([size, size])

    @property
    def cost(self) -> SOAPCost:
        ns = self.ns if self.orthogonalize else None
        return SOAPCost(self.sides, self.precondition_frequency, self.max_dim, ns)

    def scalars(self, t: Tensor, n: Numbers) -> tuple[Number, ...]:
        (beta1, beta2), log_time = n.betas, n.log_time
        b = beta2 if n.shampoo_beta is None else n.shampoo_beta
        moves = (t > 1).to(t.dtype)  # not in the first step
        decay = 1 - moves * n.lr * n.weight_decay
        # m and v begin with the second gradient, the factors with the first
        weight_f, t = complement(b, t, log_time), t - 1
        weight_m, weight_v = (moves * complement(beta, t, log_time) for beta in n.betas)
        t = t.clamp(min=1)
        debias = 1 / (1 - product(beta1, t, log_time))
        rate = moves * n.lr
        if not self.orthogonalize:
            rate = rate * (1 - product(beta2, t, log_time)).sqrt()
            if n.nesterov is False:
                rate = rate * debias
        # beside a first gradient m and v are zero
        eps = nonzero(n.eps) + (1 - moves)
        common = rate, decay, moves, weight_m, weight_v, weight_f, eps
        if n.nesterov is False:
            return common
        return *common, n.nesterov, (1 - n.nesterov) * debias

    def update(
        self, x: Tensor, c: Tensor, buffers: Tensors, s: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        return c, {}

    def scale(self, rows: int, cols: int) -> float:
        return lr_scale(self.adjust_lr_fn, rows, cols) if self.orthogonalize else 1.0

    def apply(
        self, x: Tensor, o: Tensor, s: tuple[Tensor, ...], scale: Number
    ) -> Tensor:
        rate, decay, *_ = s
        if self.orthogonalize:
            step = (rate * scale) * o
            return self.decay_of(x, step, decay) * x - step
        step = rate * o
        return self.decay_of(x, step, decay) * (x - step)

    # ---- whole matrices --------------------------------------------------------------

    @property
    def every(self) -> int:
        return self.precondition_frequency

    def stage(self, count: int, number: int) -> Hashable:
        if count == 0:
            return FIRST
        if self.stagger:
            count += number
        return REFRESH if count % self.precondition_frequency == 0 else None

    def at_owner(
        self, matrices: Sequence[MatrixInput], stage: Hashable
    ) -> list[MatrixOutput]:
        batches = _together(matrices)
        g = [working(batch.matrix) for batch, _ in batches]
        kept = [Kept(*batch.owned) for batch, _ in batches]
        with full_float32():
            o, new = [], []
            for (batch, _), matrix, buffers in zip(batches, g, kept, strict=True):
                direction, changes = _adam(matrix, buffers, batch.s, stage)
                o.append(direction)
                # None is a buffer that this step leaves as it is
                new.append([changes.get(field) for field in Kept._fields])
            if self.orthogonalize:
                o = self.ns.many(o)
        results = [MatrixOutput(matrices[0].matrix)] * len(matrices)
        for (_, members), direction, after in zip(batches, o, new, strict=True):
            if len(members) == 1:
                results[members[0]] = MatrixOutput(direction, tuple(after))
                continue
            columns = [[None] * len(members) if x is None else x for x in after]
            for i, o_i, *each in zip(members, direction, *columns, strict=True):
                results[i] = MatrixOutput(o_i, tuple(each))
        return results


# ---- over batches of matrices (..., rows, cols) --------------------------------------


def _adam(
    g: Tensor, kept: Kept, s: Sequence[Tensor], stage: Hashable
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return o, before it is orthogonalized, and the buffers that change, by field.

    Args:
        g: the gradients.
        kept: the buffers of their owner.
        s: ``SOAP.scalars``, 0-D or as factors of a batch (num, 1, 1).
        stage: of these matrices in this step.
    """
    _, _, moves, weight_m, weight_v, weight_f, eps, *w = (x.to(g.dtype) for x in s)
    m, v = kept.m.to(g.dtype), kept.v.to(g.dtype)
    bases = kept.row_basis, kept.col_basis
    new: dict[str, Tensor] = {}
    o = torch.zeros_like(g)
    if stage != FIRST:
        turned = _into(g, *bases)
        m = torch.lerp(m, turned, weight_m)
        v = torch.lerp(v, turned * turned, weight_v)
        u = w[1] * m + w[0] * turned if w else m
        o = _back(u / (root(v) + eps), *bases)
        new |= dict(m=m, v=v)
    factors = [
        torch.lerp(factor, gram, weight_f)
        for factor, gram in zip(
            (kept.row_factor, kept.col_factor), _grams(g, kept), strict=True
        )
    ]
    new |= dict(row_factor=factors[0], col_factor=factors[1])
    if stage == FIRST:
        left, right = map(_eigenvectors, factors)
        bases = (
            torch.where(moves == 0, left, kept.row_basis),
            torch.where(moves == 0, right, kept.col_basis),
        )
    elif stage == REFRESH:
        m = _back(m, *bases)
        (left, rows), (right, cols) = map(_refreshed, factors, bases)
        v = v if rows is None else _in_order(v, rows, -2)
        v = v if cols is None else _in_order(v, cols, -1)
        bases = left, right
        new |= dict(m=_into(m, *bases), v=v)
    if stage is not None:
        new |= dict(row_basis=bases[0], col_basis=bases[1])
    return o, new


def gram_matrix(
    x: Float[Tensor, "*batch rows cols"],
) -> Float[Tensor, "*batch cols cols"]:
    """Return X^T X of (rows, cols), or of a batch of them."""
    return x.mT @ x


def _together(matrices: Sequence[MatrixInput]) -> list[tuple[MatrixInput, list[int]]]:
    """Return small matrices of one shape as a batch, with their positions; large
    matrices by themselves.
    """
    alike: dict[tuple[Hashable, ...], list[int]] = {}
    for i, whole in enumerate(matrices):
        x = whole.matrix
        alone = x.ndim > 2 or x.numel() >= LARGE
        key = (i,) if alone else (x.shape, x.dtype, *(o.shape for o in whole.owned))
        alike.setdefault(key, []).append(i)
    batches = []
    for members in alike.values():
        first = matrices[members[0]]
        if len(members) > 1:
            wholes = [matrices[i] for i in members]
            owned = zip(*(w.owned for w in wholes), strict=True)
            scalars = zip(*(w.s for w in wholes), strict=True)
            first = MatrixInput(
                torch.stack([w.matrix for w in wholes]),
                tuple(torch.stack(buffer) for buffer in owned),
                tuple(torch.stack(column)[:, None, None] for column in scalars),
            )
        batches.append((first, members))
    return batches


def _grams(g: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
    """Return G G^T and G^T G, each if it has a factor."""
    return (
        gram_matrix(g.mT) if _exists(kept.row_factor) else kept.row_factor,
        gram_matrix(g) if _exists(kept.col_factor) else kept.col_factor,
    )


def _exists(factor: Tensor) -> bool:
    return factor.shape[-1] > 0


def _into(x: Matrix, left: Left, right: Right) -> Matrix:
    """Return Q_L^T X Q_R."""
    x = left.mT @ x if _exists(left) else x
    return x @ right if _exists(right) else x


def _back(x: Matrix, left: Left, right: Right) -> Matrix:
    """Return Q_L X Q_R^T."""
    x = left @ x if _exists(left) else x
    return x @ right.mT if _exists(right) else x


def _in_order(x: Matrix, order: Int[Tensor, "*batch size"], dim: int) -> Matrix:
    """Return rows (dim -2) or columns (-1) of matrices in an order (..., size)."""
    if order.ndim == 1:
        return x.index_select(dim, order)
    other = -1 if dim == -2 else -2
    return torch.take_along_dim(x, order.unsqueeze(other), dim)


def _eigenvectors(factor: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch k k"]:
    """Return eigenvectors of symmetric matrices, of the largest eigenvalue first."""
    if not _exists(factor):
        return factor
    # a gradient that is not finite has no decomposition; its result is not kept
    factor = torch.nan_to_num(factor, 0.0, 0.0, 0.0)
    try:
        q: Tensor = torch.linalg.eigh(factor).eigenvectors
    except torch.linalg.LinAlgError:  # which float32 may lead to
        q = torch.linalg.eigh(factor.double()).eigenvectors.to(factor.dtype)
    return q.flip(-1)


def _refreshed(
    factor: Float[Tensor, "*batch k k"], basis: Float[Tensor, "*batch k k"]
) -> tuple[Float[Tensor, "*batch k k"], Int[Tensor, "*batch k"] | None]:
    """Return the basis after one orthogonal iteration, and its order of the old basis;
    None if there is no factor.
    """
    if not _exists(factor):
        return basis, None
    product = factor @ basis
    order = (basis * product).sum(-2).argsort(-1, descending=True)
    return torch.linalg.qr(_in_order(product, order, -1)).Q, order


# ---- cost ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SOAPCost:
    """The cost of SOAP for a matrix; ``ns`` if the step is orthogonalized."""

    sides: Sides
    precondition_frequency: int
    max_dim: int
    ns: NewtonSchulz | None

    def on(self, device_type: str) -> SOAPCost:
        ns = None if self.ns is None else self.ns.on(device_type)
        return replace(self, ns=ns)

    @property
    def is_float32(self) -> bool:
        return True

    def payload(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def returned(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        return self.payload(dtype) if self.ns is None else self.ns.returned(dtype)

    def has_factor(self, rows: int, cols: int) -> tuple[bool, bool]:
        """Return whether the rows have a factor, and whether the columns have one."""
        two_sided = self.sides == "both"
        return (
            rows <= self.max_dim and (two_sided or rows < cols),
            cols <= self.max_dim and (two_sided or cols <= rows),
        )

    def num_flops(self, rows: int, cols: int) -> int:
        """Return FLOPs of a step on average: the refresh divided by its frequency."""
        flops = 0.0 if self.ns is None else self.ns.num_flops(rows, cols)
        has = self.has_factor(rows, cols)
        for size, exists in zip((rows, cols), has, strict=True):
            if not exists:
                continue
            turn = 2 * rows * cols * size
            # the Gram matrix of g; g in and o out; where refreshed, m out and in, a
            # product, and a QR with its orthogonal factor
            refresh = 2 * turn + (2 + 8 / 3) * size**3
            flops += 3 * turn + refresh / self.precondition_frequency
        return round(flops)


RULES = (
    NamedRule("soap", SOAP, False, "adamw", source="arXiv 2409.11321"),
    NamedRule(
        "mars-soap",
        SOAP,
        True,
        "adamw",
        source="MARS, Algorithm 1, before arXiv 2409.11321",
    ),
    NamedRule(
        "soap-muon",
        SOAP,
        False,
        "adamw",
        dict(orthogonalize=True),
        "arXiv 2409.11321, then K. Jordan, Muon, 2024",
    ),
    NamedRule(
        "mars-soap-muon",
        SOAP,
        True,
        "adamw",
        dict(orthogonalize=True),
        "MARS, Algorithm 1, before SOAP-Muon",
    ),
)
for _row in RULES:
    register(_row)
