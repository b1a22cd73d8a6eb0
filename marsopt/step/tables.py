"""Tables of a step: numbers of groups in, the decision and scalars of parts out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, MutableMapping, Sequence
from dataclasses import fields, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from marsopt.rules import rounding
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.checks import Number
from marsopt.rules.decay import at
from marsopt.rules.dtypes import root
from marsopt.rules.hyperparameters import static, with_numbers
from marsopt.rules.registry import BUILT_IN
from marsopt.rules.rounding import HALF
from marsopt.step.parts import Parts

if TYPE_CHECKING:  # shapes, which tests/library/test_shapes.py checks
    from jaxtyping import Bool, Float

# ---- formulas ------------------------------------------------------------------------

FORMULAS: MutableMapping[Algorithm, Formula] = WeakKeyDictionary()
SHARED: MutableMapping[Hashable, Formula] = WeakValueDictionary()


class Formula:
    """The formulas of algorithms that differ only in the values of their
    hyperparameters: param groups of one formula are moved together. Compared and hashed
    by identity.

    Args:
        algorithm: one of them, to be asked for formulas.
        is_shared: whether several algorithms may have this formula. Reading a number
            from its algorithm raises then.
    """

    def __init__(self, algorithm: Algorithm, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.algorithm = (
            with_numbers(algorithm, repeat(...)) if is_shared else replace(algorithm)
        )


def formula(algorithm: Algorithm) -> Formula:
    """Return the formula of an algorithm. A user's component may read its own fields in
    a graph: such an algorithm shares its formula with no other.
    """
    cached = FORMULAS.get(algorithm)
    if cached is None:
        parts = algorithm.preconditioner, algorithm.correction
        is_shared = {type(part) for part in parts} <= BUILT_IN
        cached = Formula(algorithm, is_shared=is_shared)  # does not hold its weak key
        if is_shared:
            of_state = algorithm.state_dtype, algorithm.stochastic_rounding
            key = (*map(_structure, parts), *of_state, algorithm.matrices)
            cached = SHARED.setdefault(key, cached)
        FORMULAS[algorithm] = cached
    return cached


def _structure(component: Any) -> Hashable:
    """Return a component's type and its structure."""
    if component is None:
        return None
    values = [(f, getattr(component, f.name)) for f in fields(component)]
    return type(component), *(
        static(value) if f.metadata.get("number") else value for f, value in values
    )


# ---- numbers in ----------------------------------------------------------------------


class Index(NamedTuple):
    """Which rows of a formula's tables belong together: N norms of its tensors, and
    their P parts here. None stands for the identity: one part a norm, one norm a
    tensor.
    """

    num_norms: int  # N
    norm_of_part: Tensor | None  # (P,) int64
    parts_of_norm: Tensor | None  # (N, most) int64, filled up with P
    tensor_of_norm: Tensor | None  # (N,) int64
    first_norm: Tensor | None  # of each tensor, int64
    # (P,) factors of the learning rate by the shapes of matrices; None: of an
    # elementwise algorithm
    scales: Tensor | None

    def sums(self, products: Tensor) -> Tensor:
        """Return the sums of norms (N, pairs), from the sums of parts (P, pairs)."""
        if self.parts_of_norm is None:
            return products
        return F.pad(products, (0, 0, 0, 1))[self.parts_of_norm].sum(1)

    def of_norms(self, values: Tensor) -> Tensor:
        """Return a value of each norm (N,), from one of each tensor."""
        return values if self.tensor_of_norm is None else values[self.tensor_of_norm]

    def of_parts(self, values: Tensor) -> Tensor:
        """Return a value, or row, of each part, from one of each norm."""
        return values if self.norm_of_part is None else values[self.norm_of_part]

    def of_tensors(self, values: Tensor) -> Tensor:
        """Return a value of each tensor, from one of each norm: its first."""
        return values if self.first_norm is None else values[self.first_norm]


def index_of(
    parts: Sequence[Parts],
    nums: Sequence[int],
    scales: Iterable[float] | None,
    device: torch.device,
) -> Index:
    """Return the index of a formula's tensors.

    Args:
        parts: of each leaf.
        nums: tensors of each leaf.
        scales: of each part; None: of an elementwise algorithm.
        device: of the tables.
    """
    norms: list[int] = []  # Dynamo traces this, but no list[int]()
    tensors: list[int] = []
    firsts: list[int] = []
    for of_leaf, num in zip(parts, nums, strict=True):
        norms += [len(tensors) + number for number in of_leaf.norms]
        for _ in range(num):
            firsts.append(len(tensors))
            tensors += [len(firsts) - 1] * (of_leaf.num_norms // num)
    by_norm = table = None
    if norms != list(range(len(tensors))):
        by_norm = _on(device, norms)
        rows: list[list[int]] = [[] for _ in tensors]
        for part, norm in enumerate(norms):
            rows[norm].append(part)
        most = max(map(len, rows))
        table = _on(device, [r + [len(norms)] * (most - len(r)) for r in rows])
    is_each = firsts == tensors
    factors = None
    if scales is not None:
        factors = torch.tensor([*scales], dtype=scalar_dtype(device), device=device)
    return Index(
        len(tensors),
        by_norm,
        table,
        None if is_each else _on(device, tensors),
        None if is_each else _on(device, firsts),
        factors,
    )


def _on(device: torch.device, numbers: Sequence[Any]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


class Inputs(NamedTuple):
    """The arguments of ``decide`` of one formula."""

    algorithm: Algorithm  # with its hyperparameters, as lr and gamma:
    lr: Number  # a number, a 0-D tensor, or (N,) with a value of each norm
    gamma: Number
    rows: Index
    t: Tensor  # (tensors,) steps that each tensor has taken
    dtype: torch.dtype  # working dtype of its tensors, and of its table

    def read(self) -> Inputs:
        return self


class GroupInputs(NamedTuple):
    """``Inputs`` with the hyperparameters as a graph reads them: a row of a table for
    each of G param groups.
    """

    formula: Formula
    values: Tensor  # (G, K): lr, gamma, and the numbers of the algorithm in their order
    group_of_norm: Tensor | None  # (N,) int64; None: there is one group
    rows: Index
    t: Tensor
    dtype: torch.dtype

    def read(self) -> Inputs:
        """Return the columns."""
        if self.group_of_norm is None:
            lr, gamma, *rest = self.values[0].unbind()
        else:
            lr, gamma, *rest = self.values[self.group_of_norm].unbind(1)
        algorithm = with_numbers(self.formula.algorithm, iter(rest))
        return Inputs(algorithm, lr, gamma, self.rows, self.t, self.dtype)


# ---- scalars out ---------------------------------------------------------------------


class StepScalars(NamedTuple):
    """The scalars of a step (clip factors, rates, bias corrections) as columns, (P, 1)
    each.
    """

    ok: Tensor  # bool: the step is finite and the tensor has a gradient
    global_clip: Tensor | None  # factor of a gradient that becomes h; None: none does
    weights: tuple[Tensor, ...]  # of the gradient and, if there is one, of h
    key: Tensor | None  # of the noise, int64; None: nothing is rounded stochastically
    rule: tuple[Tensor, ...]  # the preconditioner's: rates and bias corrections
    scale: Tensor | None  # of the learning rate, by the shape of a matrix

    @classmethod
    def read(
        cls, algorithm: Algorithm, ok: Tensor, columns: Sequence[Tensor]
    ) -> StepScalars:
        """Return the scalars from the columns of a table."""
        global_clip = key = scale = None
        rest = list(columns)
        if algorithm.matrix_only:
            scale = rest.pop()
        if algorithm.h_from == "step":
            global_clip = rest.pop(0)
        num_weights = 1 if algorithm.h_from is None else 2
        weights, rest = rest[:num_weights], rest[num_weights:]
        if algorithm.stochastic_rounding:
            high, low, *rest = rest
            key = (high.to(torch.int64) << 16) | low.to(torch.int64)
        return cls(ok, global_clip, tuple(weights), key, tuple(rest), scale)


def num_columns(algorithm: Algorithm) -> int:
    """Return how many scalars a part has."""
    one = torch.ones(1, device="cpu")
    index = Index(1, *[None] * 5)
    numbers = with_numbers(algorithm, repeat(one))
    read = Inputs(numbers, one, one, index, one, one.dtype)
    weights = (one,) if algorithm.h_from is None else (one, one)
    return len(_columns(read, one, weights)) + algorithm.matrix_only


class Decision(NamedTuple):
    """The decision of a step from all gradient statistics; lists have an entry for each
    formula.
    """

    grad_norm: Tensor  # 0-D, global norm of the gradient before any clip
    finite: Tensor  # 0-D bool; False means that nothing changes
    t: list[Tensor]  # (tensors,), after the step
    ok: list[Tensor]  # (tensors,) bool: which of them move
    ok_parts: list[Tensor]  # (P,) bool
    tables: list[Tensor]  # (P, S) scalars of each part, which ``StepScalars`` reads


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Scalars are float64, since 1 - beta^t cancels; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def sums_of_norms(
    inputs: Sequence[Inputs | GroupInputs],
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
    sums = [i.rows.sums(p) for i, p in zip(inputs, products, strict=True)]
    width = max(s.shape[1] for s in sums)
    sums = [F.pad(s, (0, width - s.shape[1])) for s in sums]
    whole = F.pad(sums[0] if len(sums) == 1 else torch.cat(sums), (0, 1), value=1.0)
    if has_grad is not None:
        whole[:, -1] = has_grad
    return whole


def global_clip_of(grad_norm: Float[Tensor, ""], max_norm: Number) -> Float[Tensor, ""]:
    """Return torch.nn.utils.clip_grad_norm_'s factor on every gradient, its 1e-6
    included.
    """
    return (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)


class Clips(NamedTuple):
    """The clips of a step, and the sums that they are made of."""

    sums: Tensor  # (norms, pairs + 1) in the dtype of scalars
    g_square: Tensor  # () of the norm of all gradients
    global_clip: Tensor  # () factor of every gradient
    by_formula: Sequence[Tensor]  # the rows of ``sums`` of every formula
    weights: list[tuple[Tensor, ...]]  # of every formula, (N,) of g and h in c
    c_squares: list[Tensor]  # of every formula, of the norms of c (N,)


def clips_of(inputs: Sequence[Inputs], sums: Tensor, max_norm: Number | None) -> Clips:
    """Return the clips by complete sums; a tensor that has a gradient on no rank has
    sums of zero.
    """
    # not a product: 0 times infinity is no zero
    sums = torch.where(sums[:, -1:] == 0, 0.0, sums)
    sums = sums.to(scalar_dtype(sums.device))
    g_square = sums[:, 0].sum()
    global_clip = torch.ones_like(g_square)
    if max_norm is not None:
        global_clip = global_clip_of(root(g_square), max_norm)
    by_formula = sums.split([i.rows.num_norms for i in inputs])
    pairs = zip(inputs, by_formula, strict=True)
    weighed = [_weights(i, of_i, global_clip) for i, of_i in pairs]
    weights = [of_c for of_c, _ in weighed]
    c_squares = [squares for _, squares in weighed]
    return Clips(sums, g_square, global_clip, by_formula, weights, c_squares)


def decide(
    inputs: Sequence[Inputs | GroupInputs], sums: Tensor, max_norm: Number | None
) -> Decision:
    """Decide about a step from the complete sums: the clips, whether everything is
    finite (learning rates in tensors, too), and each formula's table of scalars, for
    all its parts at once.

    The squared norm of c bounds every c^2, and so every second moment: if it fits the
    narrowest dtype of the state, all of the state does.

    A tensor that has a gradient on no rank stays as it is; if some ranks have none,
    theirs counts as zero, so that all ranks go on with equal values.
    """
    read = [i.read() for i in inputs]
    clips = clips_of(read, sums, max_norm)
    finite = torch.isfinite(clips.sums).all()
    for i, squares in zip(read, clips.c_squares, strict=True):
        if isinstance(i.lr, Tensor):
            finite = finite & torch.isfinite(i.lr).all()
        finite = finite & (squares <= largest_square(i.algorithm, i.dtype)).all()
    decision = Decision(clips.g_square.sqrt(), finite, [], [], [], [])
    for i, part, weights in zip(read, clips.by_formula, clips.weights, strict=True):
        moves = (part[:, -1] > 0) & finite
        ok = i.rows.of_tensors(moves)
        decision.t.append(i.t + ok.to(i.t.dtype))
        decision.ok.append(ok)
        decision.ok_parts.append(i.rows.of_parts(moves))
        columns = _columns(i, clips.global_clip, weights)
        decision.tables.append(_table(i.rows, columns).to(i.dtype))
    return decision


def decide_alone(
    inputs: Sequence[Inputs | GroupInputs],
    products: Sequence[Tensor],
    has_grad: Tensor | None,
    max_norm: Number | None,
) -> tuple[Tensor, Decision]:
    """Return the complete sums, and ``decide`` from them, if one process has
    everything.
    """
    sums = sums_of_norms(inputs, products, has_grad)
    return sums, decide(inputs, sums, max_norm)


def clip_factors(
    inputs: Sequence[Inputs | GroupInputs], sums: Tensor, max_norm: Number | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the factors of all clips that ``decide`` makes of the same arguments: the
    sums of gradients (norms, pairs + 1), the factor of the global clip, 0-D, and for
    every formula the factor of each norm's own clip (N,).
    """
    read = [i.read() for i in inputs]
    clips = clips_of(read, sums, max_norm)
    factors = []
    for i, part, (of_g, *_) in zip(read, clips.by_formula, clips.weights, strict=True):
        correction = i.algorithm.active_correction
        coefficient: Number = 1.0
        if correction is not None:
            beta1 = _beta1(i, part.dtype)
            coefficient, *_ = correction.coefficients(beta1, i.gamma)
        # 0 / 0 if the global clip of an infinite norm is 0
        factor = of_g / (clips.global_clip * coefficient)
        factors.append(torch.where(of_g == 0, 1.0, factor))
    return clips.sums, clips.global_clip, factors


def largest_square(algorithm: Algorithm, dtype: torch.dtype) -> float:
    """Return the largest square that the state can hold; ``dtype`` is the working dtype
    of the parameters.
    """
    correction = algorithm.active_correction
    h_dtype = None if correction is None else correction.h_dtype
    narrow = {torch.bfloat16 if dtype == torch.float32 else dtype}
    narrow |= {torch.bfloat16} & {algorithm.state_dtype, h_dtype}
    return min(torch.finfo(dtype).max for dtype in narrow)


def _weights(
    inputs: Inputs, sums: Tensor, global_clip: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the weights of g and h in c, and the squared norms of c, or of g where c
    is that, before the global clip.
    """
    correction = inputs.algorithm.active_correction
    if correction is None:
        return (global_clip * torch.ones_like(sums[:, 0]),), sums[:, 0]
    beta1 = _beta1(inputs, sums.dtype)
    return correction.weights(beta1, inputs.gamma, global_clip, sums[:, :-1])


def _steps(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """Return the number of this step, t = 1, 2, ..., of each norm (N,)."""
    return inputs.rows.of_norms(inputs.t.to(dtype) + 1)


def _beta1(inputs: Inputs, dtype: torch.dtype) -> Number:
    """Return the decay of the first moment in this step, a number or (N,)."""
    preconditioner = inputs.algorithm.preconditioner
    t = _steps(inputs, dtype)
    beta1: Number = at(preconditioner.beta1, t, preconditioner.log_time)
    return beta1


def _columns(
    inputs: Inputs, global_clip: Tensor, weights: tuple[Tensor, ...]
) -> list[Tensor]:
    """Return the columns of a table, each 0-D or (N,), as ``StepScalars`` reads them,
    but for ``scale``.
    """
    algorithm, t = inputs.algorithm, _steps(inputs, global_clip.dtype)
    columns = [global_clip] if algorithm.h_from == "step" else []
    columns += weights
    if algorithm.stochastic_rounding:  # 16 bits are exact in every working dtype
        key = rounding.step_key(t)
        columns += [half.to(global_clip.dtype) for half in (key >> 16, key & HALF)]
    unit = torch.ones_like(global_clip)
    rule = algorithm.scalars(t, inputs.lr, inputs.gamma)
    return columns + [value * unit for value in rule]


def _table(index: Index, columns: Sequence[Tensor]) -> Tensor:
    """Return the table of scalars (P, S)."""
    columns = [column.expand(index.num_norms) for column in columns]
    columns = [index.of_parts(column) for column in columns]
    if index.scales is not None:
        columns.append(index.scales)
    if not torch.compiler.is_compiling():
        return torch.stack(columns, 1)
    # inductor copies the columns that it concatenates: a launch each
    place = torch.arange(len(columns), device=columns[0].device)
    table = columns[0][:, None]
    for i, column in enumerate(columns):
        table = torch.where(place == i, column[:, None], table)
    return table
