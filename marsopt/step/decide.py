"""The decision of a step: inner products and numbers of groups in; the clips, whether
everything is finite, and a row of scalars for every part out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from marsopt.rules import numerics
from marsopt.rules.checks import Number
from marsopt.rules.component import Algorithm, Numbers
from marsopt.rules.formats import CODED
from marsopt.rules.numerics import HALF, at, root, scalar_dtype
from marsopt.step.leaf import Index

if TYPE_CHECKING:  # shapes, which tests/library/test_shapes.py checks
    from jaxtyping import Bool, Float


class Inputs(NamedTuple):
    """The tables of one formula's tensors before a step."""

    algorithm: Algorithm
    numbers: Tensor  # (G, K) of G param groups, in the order of ``algorithm.columns``
    group_of_norm: Tensor | None  # (N,) int64; None: there is one group
    rows: Index
    t: Tensor  # (tensors,) steps that each tensor has taken
    dtype: torch.dtype  # working dtype of its tensors, and of its table of scalars

    def read(self) -> Numbers:
        """Return the numbers of each norm by name, 0-D or (N,)."""
        if self.group_of_norm is None:
            return self.algorithm.read(self.numbers[0].unbind())
        return self.algorithm.read(self.numbers[self.group_of_norm].unbind(1))


class StepScalars(NamedTuple):
    """The scalars of a step (clip factors, rates, bias corrections) as columns, (P, 1)
    each.
    """

    global_clip: Tensor | None  # factor of a gradient that becomes h; None: none does
    weights: tuple[Tensor, ...]  # of the gradient and, if there is one, of h
    key: Tensor | None  # of the noise, int64; None: nothing is rounded stochastically
    rule: tuple[Tensor, ...]  # the preconditioner's: rates and bias corrections
    scale: Tensor | None  # of the learning rate, by the shape of a matrix

    @classmethod
    def read(cls, algorithm: Algorithm, columns: Sequence[Tensor]) -> StepScalars:
        """Return the scalars from the columns of a table."""
        global_clip = key = scale = None
        rest = list(columns)
        if algorithm.matrix_only:
            scale = rest.pop()
        if algorithm.h_from == "step":
            global_clip = rest.pop(0)
        num_weights = 1 if algorithm.h_from is None else 2
        weights, rest = rest[:num_weights], rest[num_weights:]
        if algorithm.has_noise:
            high, low, *rest = rest
            key = (high.to(torch.int64) << 16) | low.to(torch.int64)
        return cls(global_clip, tuple(weights), key, tuple(rest), scale)


class Scalars(NamedTuple):
    """The scalars of a formula's parts in a step."""

    ok: Tensor  # (P,) bool: which of them are updated
    table: Tensor  # (P, S), which ``StepScalars`` reads


class Decision(NamedTuple):
    """The decision of a step from all gradient statistics; lists have an entry for each
    formula.
    """

    grad_norm: Tensor  # 0-D, global norm of the gradient before any clip
    finite: Tensor  # 0-D bool; False means that nothing changes
    skipped: Tensor  # 0-D bool, its opposite, which is added to a counter
    t: list[Tensor]  # (tensors,), after the step
    ok: list[Tensor]  # (tensors,) bool: which of them are updated
    scalars: list[Scalars]


def sums_of_norms(
    inputs: Sequence[Inputs],
    products: Sequence[Float[Tensor, "_ _"]],
    has_grad: Bool[Tensor, " n"] | None,
) -> Float[Tensor, "n width"]:
    """Return (norms of all formulas, pairs + 1): the inner products, and in the last
    column how many ranks have a gradient. A tensor without a gradient here has zeros in
    the place of g, but its h counts: another rank may have a gradient of it.

    Args:
        inputs: of every formula.
        products: of every formula, (P, pairs) by ``step.products``.
        has_grad: (norms,) whether the tensor has a gradient; None = all have one.
    """
    sums, width = [], 1
    for i, of_parts in zip(inputs, products, strict=True):
        sums.append(i.rows.sums(of_parts))
        width = max(width, of_parts.shape[1])
    for number, of_norms in enumerate(sums):
        sums[number] = F.pad(of_norms, (0, width - of_norms.shape[1]))
    whole = F.pad(sums[0] if len(sums) == 1 else torch.cat(sums), (0, 1), value=1.0)
    if has_grad is not None:
        whole[:, -1] = has_grad
    return whole


def global_clip_of(grad_norm: Float[Tensor, ""], max_norm: Number) -> Float[Tensor, ""]:
    """Return torch.nn.utils.clip_grad_norm_'s factor on every gradient, its 1e-6
    included.
    """
    return (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)


class FormulaClips(NamedTuple):
    """The clips of one formula's tensors, with the numbers and sums behind them."""

    n: Numbers
    t: Tensor  # (N,) the number of this step, 1, 2, ...
    beta1: Number  # decay of the first moment in this step, a number or (N,)
    sums: Tensor  # (N, pairs + 1) in the dtype of scalars
    weights: tuple[Tensor, ...]  # (N,) of g and h in c
    c_squares: Tensor  # (N,) of the norms of c


def clips_of(
    inputs: Sequence[Inputs], sums: Tensor, max_norm: Number | None
) -> tuple[Tensor, Tensor, list[FormulaClips]]:
    """Return the square of the global norm, the factor of the global clip, and the
    clips of each formula, by complete sums; a tensor that has a gradient on no rank has
    sums of zero.
    """
    # not a product: 0 times infinity is no zero
    sums = torch.where(sums[:, -1:] == 0, 0.0, sums)
    sums = sums.to(scalar_dtype(sums.device))
    g_square = sums[:, 0].sum()
    global_clip = torch.ones_like(g_square)
    if max_norm is not None:
        global_clip = global_clip_of(root(g_square), max_norm)
    clips, first = [], 0
    for i in inputs:
        part = sums[first : first + i.rows.num_norms]
        first += i.rows.num_norms
        t = i.rows.of_norms(i.t.to(part.dtype) + 1)
        clips.append(clips_of_formula(i.algorithm, i.read(), t, part, global_clip))
    return g_square, global_clip, clips


def clips_of_formula(
    algorithm: Algorithm, n: Numbers, t: Tensor, sums: Tensor, global_clip: Tensor
) -> FormulaClips:
    """Return the clips of one formula, by its complete sums; ``t`` (N,) is the number
    of this step.
    """
    beta1 = at(algorithm.preconditioner.beta1(n), t, n.log_time)
    weights: tuple[Tensor, ...] = (global_clip.expand(len(sums)),)
    squares = sums[:, 0]
    if algorithm.correction is not None:
        weigh = algorithm.correction.weights
        weights, squares = weigh(beta1, n, global_clip, sums[:, :-1])
    return FormulaClips(n, t, beta1, sums, weights, squares)


def fits(algorithm: Algorithm, dtype: torch.dtype, clip: FormulaClips) -> Tensor:
    """Return whether everything of each norm is finite, and fits the state (N,).

    Args:
        algorithm: of the formula.
        dtype: working dtype of its tensors.
        clip: its clips.
    """
    fits = clip.c_squares <= largest_square(algorithm, dtype)
    for column in clip.sums.unbind(1):
        fits = fits & torch.isfinite(column)
    return fits & torch.isfinite(clip.n.lr)


def decide(inputs: Sequence[Inputs], sums: Tensor, max_norm: Number | None) -> Decision:
    """Decide about a step from the complete sums: the clips, whether everything is
    finite (learning rates, too), and each formula's table of scalars, for all its parts
    at once.

    The squared norm of c bounds every c^2, and so every second moment: if it fits the
    narrowest dtype of the state, all of the state does.

    A tensor that has a gradient on no rank stays as it is; if some ranks have none,
    theirs counts as zero, so that all ranks go on with equal values.
    """
    g_square, global_clip, clips = clips_of(inputs, sums, max_norm)
    finite = torch.isfinite(g_square)
    for i, clip in zip(inputs, clips, strict=True):
        finite = finite & fits(i.algorithm, i.dtype, clip).all()
    skipped = finite.logical_not()
    decision = Decision(g_square.sqrt(), finite, skipped, [], [], [])
    for i, clip in zip(inputs, clips, strict=True):
        is_updated = (clip.sums[:, -1] > 0) & finite
        ok = i.rows.of_tensors(is_updated)
        decision.t.append(i.t + ok.to(i.t.dtype))
        decision.ok.append(ok)
        columns = columns_of(i.algorithm, i.rows, clip, global_clip)
        table = torch.stack(columns, 1).to(i.dtype)
        decision.scalars.append(Scalars(i.rows.of_parts(is_updated), table))
    return decision


def decide_alone(
    inputs: Sequence[Inputs],
    products: Sequence[Tensor],
    has_grad: Tensor | None,
    max_norm: Number | None,
) -> tuple[Tensor, Decision]:
    """Return the complete sums, and ``decide`` from them, if one process has
    everything.
    """
    sums = sums_of_norms(inputs, products, has_grad)
    return sums, decide(inputs, sums, max_norm)


# ---- one tensor, as a kernel computes it ---------------------------------------------


class Form(NamedTuple):
    """The form of one formula's decision, if each of its tensors has one norm and one
    part: everything but numbers.
    """

    algorithm: Algorithm
    dtype: torch.dtype  # of its table of scalars
    num_products: int
    has_groups: bool  # whether tensors have several rows of numbers
    of_index: tuple[tuple[str, torch.dtype], ...]  # columns that it has, with dtypes

    @classmethod
    def of(cls, inputs: Inputs) -> Form:
        """Return the form of a formula."""
        columns = dict(scales=inputs.rows.scales, seeds=inputs.rows.seeds)
        index = tuple((n, x.dtype) for n, x in columns.items() if x is not None)
        has_groups = inputs.group_of_norm is not None
        num = 1 if inputs.algorithm.h_from is None else 3
        return cls(inputs.algorithm, inputs.dtype, num, has_groups, index)


def decide_row(form: Form, values: dict[str, Tensor]) -> list[Tensor]:
    """Return whether everything of a tensor is finite and fits, and its row of scalars:
    ``decide`` for n tensors, by columns.

    Args:
        form: the form of their formula.
        values: by name (1, n): products "s0", ..., zero where there is no gradient;
            "count", 1 where there is one; numbers "n0", ...; "t", steps taken; columns
            of the index. (1, 1): "square" of the global norm and, if it is clipped, its
            "threshold".
    """
    columns = {name: value.view(-1) for name, value in values.items()}
    square, num = columns["square"].view(()), len(columns["t"])
    global_clip = torch.ones_like(square)
    if "threshold" in columns:
        global_clip = global_clip_of(root(square), columns["threshold"].view(()))
    algorithm = form.algorithm
    n = algorithm.read([columns[f"n{k}"] for k in range(len(algorithm.columns))])
    products = [columns[f"s{k}"] for k in range(form.num_products)]
    sums = torch.stack([*products, columns["count"]], 1)
    t = columns["t"].to(square.dtype) + 1
    clip = clips_of_formula(algorithm, n, t, sums, global_clip)
    scales, seeds = columns.get("scales"), columns.get("seeds")
    index = Index(num, None, None, None, None, scales, seeds)
    row = columns_of(algorithm, index, clip, global_clip)
    return [fits(algorithm, form.dtype, clip), *row]


def clip_factors(
    inputs: Sequence[Inputs], sums: Tensor, max_norm: Number | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the factors of all clips that ``decide`` makes of the same arguments: the
    sums of gradients (norms, pairs + 1), the factor of the global clip, 0-D, and for
    every formula the factor of each norm's own clip (N,).
    """
    _, global_clip, clips = clips_of(inputs, sums, max_norm)
    factors = []
    for i, clip in zip(inputs, clips, strict=True):
        of_g, *_ = clip.weights
        coefficient: Number = 1.0
        if i.algorithm.correction is not None:
            of_c = i.algorithm.correction.coefficients(clip.beta1, clip.n)
            coefficient, *_ = of_c
        # 0 / 0 if the global clip of an infinite norm is 0
        factor = of_g / (global_clip * coefficient)
        factors.append(torch.where(of_g == 0, 1.0, factor))
    return torch.cat([clip.sums for clip in clips]), global_clip, factors


def largest_square(algorithm: Algorithm, dtype: torch.dtype) -> float:
    """Return the largest square that the state can hold; ``dtype`` is the working dtype
    of the parameters.
    """
    h_dtype = None if algorithm.correction is None else algorithm.correction.h_dtype
    narrow = {torch.bfloat16, CODED} & {algorithm.state_dtype, h_dtype}
    of_x = torch.finfo(torch.bfloat16 if dtype == torch.float32 else dtype).max
    return min(of_x, torch.finfo(torch.bfloat16).max) if narrow else of_x


def columns_of(
    algorithm: Algorithm, index: Index, clip: FormulaClips, global_clip: Tensor
) -> list[Tensor]:
    """Return the scalars of each part, (P,) each, as ``StepScalars`` reads them."""
    columns: list[Any] = [global_clip] if algorithm.h_from == "step" else []
    columns += clip.weights
    at_key = len(columns)
    unit = torch.ones_like(global_clip)
    columns += algorithm.preconditioner.scalars(clip.t, clip.n)
    for number, column in enumerate(columns):
        of_norms = (column * unit).to(unit.dtype).expand(index.num_norms)
        columns[number] = index.of_parts(of_norms)
    if index.seeds is not None:  # 16 bits are exact in every working dtype
        steps = index.of_parts(clip.t.expand(index.num_norms))
        key = numerics.step_key(steps, index.seeds)
        columns[at_key:at_key] = [k.to(unit.dtype) for k in (key >> 16, key & HALF)]
    if index.scales is not None:
        columns.append(index.scales)
    return columns


def num_columns(algorithm: Algorithm) -> int:
    """Return how many scalars a part has."""
    one = torch.ones(1, device="cpu")
    seeds = one.to(torch.int64) if algorithm.has_noise else None
    index = Index(1, None, None, None, None, None, seeds)
    numbers = torch.ones(1, len(algorithm.columns), device="cpu")
    inputs = Inputs(algorithm, numbers, None, index, one, one.dtype)
    n = inputs.read()
    weights = (one,) if algorithm.h_from is None else (one, one)
    clip = FormulaClips(n, one, 1.0, one, weights, one)
    return len(columns_of(algorithm, index, clip, one[0])) + algorithm.matrix_only
