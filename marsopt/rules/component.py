"""The components of a rule: buffers, a correction, a preconditioner, and the algorithm
that has both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    cast,
    get_args,
)

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.formats import (
    CODED,
    LOW_DTYPE,
    SCALE,
    SCALE_DTYPE,
    low_symbols,
    scales_shape,
    takes_codes,
)
from marsopt.rules.matrices import Matrices
from marsopt.rules.numerics import (
    NARROW,
    at,
    complement,
    default_state_dtype,
    working_dtype,
)
from marsopt.rules.options import NO_OPTION, check_fields, number, structure

if TYPE_CHECKING:  # shapes, which tests/library/test_shapes.py checks
    from jaxtyping import Float

Shape = Callable[[torch.Size, Matrices], torch.Size]


def like_x(shape: torch.Size, matrices: Matrices) -> torch.Size:
    """Return the shape of the parameter, or of the matrix, itself."""
    return shape


def like_scales(shape: torch.Size, matrices: Matrices) -> torch.Size:
    """Return the shape of the scales of codes in the shape of the parameter."""
    return scales_shape(shape)


class Buffer(NamedTuple):
    """A tensor that the state keeps for each parameter.

    Args:
        key: its name in ``optimizer.state[p]``, as in torch.optim if that has the
            buffer. No two components share a key, but for tensors that mean the same.
        shape: with home "owner", its shape from (rows, cols) of one whole matrix.
        start: its value before the first step: zeros, or an identity matrix.
        home: "shard": beside each piece of the parameter, in its shape. "owner": on the
            rank that holds whole matrices, (number of matrices owned here, *shape);
            flat, matrix after matrix, if the matrices of a parameter have several
            shapes.
        dtype: "state": the ``state_dtype`` of the algorithm, or the parameter's own,
            float32 for float16 (with home "owner" the wider of both);
            "gradient": the same, unless the correction's ``h_dtype`` says otherwise;
            "working": the parameter's own or float32, whichever is wider; or a dtype.
        is_debiased: whether the rule divides it by 1 - beta^t. It restarts whenever the
            count of steps does.
        codes: how ``state_dtype=torch.int8`` stores it: "numbers" with a sign,
            "squares", which stay above zero, or None: in float32.
    """

    key: str
    shape: Shape = like_x
    start: Literal["zeros", "identity"] = "zeros"
    home: Literal["shard", "owner"] = "shard"
    dtype: torch.dtype | Literal["state", "gradient", "working"] = "state"
    is_debiased: bool = False
    codes: Literal["numbers", "squares"] | None = "numbers"


def owned_shapes(
    matrices: Matrices, shape: torch.Size, buffer: Buffer
) -> list[torch.Size]:
    """Return the shapes of an owner's ``buffer`` of the matrices in a tensor of this
    shape: of those in one batch (rows, cols).
    """
    return [buffer.shape(size, matrices) for size in matrices.part_shapes(shape)]


def owned_parts(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of these shapes of an owner's buffer of matrices that have several
    shapes: it is flat, matrix after matrix.
    """
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class Numbers:
    """The numbers of a step as attributes: ``lr``, and the fields of an algorithm's
    components that are made by ``number``. Each is a number, or a tensor with an entry
    for each of N norms; a pair of numbers is a tuple.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no component has the number {name!r}")


def number_fields(component: Any) -> dict[str, Any]:
    """Return the fields made by ``number``, with their values."""
    return {
        f.name: getattr(component, f.name)
        for f in fields(component)
        if f.metadata.get("number")
    }


def is_built_in(component: object) -> bool:
    """Return whether a component, or its absence, is of this package."""
    return component is None or type(component).__module__.startswith("marsopt.")


def form_of(component: Any) -> Hashable:
    """Return a component's class and structure, which its formulas depend on. The
    formulas of a user's class may read ``self``: two instances share none.
    """
    if component is None or not is_built_in(component):
        return id(component)
    structural = [f for f in fields(component) if not f.metadata.get("number")]
    return type(component), *[getattr(component, f.name) for f in structural]


Per = Literal["matrix", "tensor"]
MasterBits = Literal[24, 32] | None

H = Buffer("last_grad", dtype="gradient")  # the reference gradient h in a state


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction(ABC):
    """The corrected gradient c that a preconditioner gets in place of the gradient g:

        c = w_0 g + w_1 h                     h: a reference gradient
        c <- c / max(1, ||c||_F / clip)       per matrix or tensor

    A subclass gives the coefficients, and in ``h_from`` the writer of h. "step": each
    step writes h for the next step (``next_h``). "caller": the caller hands h to every
    step, by ``MARS.update_previous_grad`` and ``update_last_grad`` or as the
    ``reference`` of ``Rule.step``. None: there is no h.

    Args:
        gamma: scale of the variance reduction; 0 turns it off, and a negative gamma,
            for experiments, moves c the opposite way.
        clip: threshold of the norm of c; None = off.
        clip_per: the unit that is clipped to its own norm: "matrix", if a tensor is
            made of several (``Matrices``), or "tensor".
        h_dtype: dtype of h in the state; None = the dtype of the other buffers.
            torch.bfloat16 saves memory and traffic, and rounds it by up to 2^-9.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> class Damped(marsopt.Correction):
        ...     name = "damped"
        ...     def coefficients(self, beta1, n):
        ...         return (1 - n.gamma,)
        >>> algorithm = marsopt.Algorithm(
        ...     preconditioner=marsopt.Lion(), correction=Damped(gamma=0.5)
        ... )
        >>> rule, params = marsopt.Rule(matrix=algorithm), {"w": torch.ones(2)}
        >>> _, state = rule.step(params, params, rule.init(params), lr=0.1)
        >>> state.buffers["m"]["w"]
        tensor([0.0050, 0.0050])
    """

    gamma: Number = number(0.025, checks.finite)
    clip: Number | None = number(1.0, checks.positive_or_none)
    clip_per: Per = structure("matrix", checks.one_of(get_args(Per)))
    h_dtype: torch.dtype | None = structure(
        None, checks.state_dtype_or_none, whole=True
    )

    name: ClassVar[str]
    h_from: ClassVar[Literal["step", "caller"] | None] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def coefficients(self, beta1: Number, n: Numbers) -> tuple[Number, ...]:
        """Return the coefficients of g and of h, if the correction has h, before the
        clip.

        Args:
            beta1: decay rate of the preconditioner's first moment in this step,
                whatever its paper calls it: Lion's betas[1].
            n: the numbers of this step: ``gamma``, and the subclass's.
        """

    def next_h(self, g: Tensor, h: Tensor) -> Tensor:
        """Return h of the next step, if the step writes it: a new tensor, or ``g``.

        Args:
            g: the gradient after the global clip.
            h: of this step.
        """
        return g

    def weights(
        self,
        beta1: Number,
        n: Numbers,
        global_clip: Float[Tensor, ""],
        products: Float[Tensor, "n pairs"],
    ) -> tuple[tuple[Float[Tensor, " n"], ...], Float[Tensor, " n"]]:
        """Return (N,) weights of g and h in c, for N tensors or matrices, and the
        squared norms of c.

        Args:
            beta1: decay rate of the first moment in this step, a number or (N,).
            n: the numbers of this step: ``gamma`` and ``clip``.
            global_clip: factor of the global clip on g, 0-D.
            products: (N, pairs) inner products (g, g) and, if there is h, (g, h) and
                (h, h), complete over shards.

        Raises:
            ValueError: ``coefficients`` returns another number of them.
        """
        ones = torch.ones_like(products[:, 0])
        coefficients = self.coefficients(beta1, n)
        if len(coefficients) != (num := 1 if self.h_from is None else 2):
            raise ValueError(
                f"got {len(coefficients)} coefficients of {type(self).__name__}, "
                f"expected {num}, since it has h_from={self.h_from!r}: return one of "
                "the gradient, and one of h if there is one"
            )
        w = [value * ones for value in coefficients]
        w[0] = w[0] * global_clip
        # ||c||^2 expanded: neither c nor a second pass over g and h is needed
        cc = w[0] * w[0] * products[:, 0]
        if self.h_from is not None:
            _, w_h = w
            cc = cc + 2 * w[0] * w_h * products[:, 1] + w_h * w_h * products[:, 2]
        if n.clip is None:
            return tuple(w), cc
        # clamped before the root: its derivative at 0 is infinite
        s = n.clip / cc.clamp(min=n.clip * n.clip).sqrt()
        return tuple(s * value for value in w), s * s * cc


Tensors = Mapping[str, Tensor]  # by symbol


@dataclass(frozen=True, kw_only=True, eq=False)
class Preconditioner(ABC):
    """Makes a step from the corrected gradient c, over parts (P, n) of tensors.

    Args:
        weight_decay: decoupled: x <- (1 - lr weight_decay) x - ...
        cautious_weight_decay: decay only those elements of x that the step moves
            towards zero as well: step * x >= 0 ("Cautious Weight Decay", arXiv
            2510.12402; dion's ``cautious_wd``).
        log_time: every decay of this rule is min(beta, t / (t + log_time)) in step t of
            a tensor, so that averages remember a fixed share of the run (log-time
            momentum, arXiv 2602.05298); betas are the caps. None = off.
    """

    weight_decay: Number = number(0.0, checks.at_least_zero)
    cautious_weight_decay: bool = False
    log_time: Number | None = number(None, checks.log_time_or_none)

    keeps: ClassVar[dict[str, Buffer]] = {}  # all that it may keep, by symbol
    matrix_only: ClassVar[bool] = False  # whether it is a ``MatrixPreconditioner``

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def beta1(self, n: Numbers) -> Number:
        """Return the decay of the first moment, which scales MARS's correction: with
        ``log_time`` its cap.
        """

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The buffers that the state keeps, by symbol."""
        return self.keeps

    @abstractmethod
    def scalars(self, t: Tensor, n: Numbers) -> tuple[Number, ...]:
        """Return the scalars of a step from t = 1, 2, ... (N,): each is a number, or a
        tensor with an entry for each norm (N,).

        ``update`` and ``apply`` get them as factors of x, (P, 1), rounded from float64
        to the working dtype: compute 1 - beta here, too.

        Args:
            t: the number of this step, of each norm.
            n: ``lr`` and the numbers among this component's fields, as param groups
                have them now; a field of ``self`` is only their default.
        """

    @abstractmethod
    def update(
        self, x: Tensor, c: Tensor, buffers: Tensors, s: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the new x and all buffers that are at home in shards, as new tensors
        in the dtypes of those that are given; a matrix preconditioner returns in place
        of x the matrix for the owners, None for m itself.
        """

    def decay_of(self, x: Tensor, step: Tensor, decay: Tensor) -> Tensor:
        """Return the factor of x beside the subtraction of ``step``.

        Args:
            x: before the step, (P, n).
            step: the change that is subtracted from x beside the decay, with the
                learning rate in it, in the shape of x.
            decay: 1 - lr weight_decay, as a factor of x.

        Returns:
            ``decay`` itself; with ``cautious_weight_decay``, in the shape of x,
            ``decay`` for elements with step * x >= 0, else 1 (arXiv 2510.12402).
        """
        if not self.cautious_weight_decay:
            return decay
        return torch.where(step * x >= 0, decay, 1.0)


class MatrixInput(NamedTuple):
    """The matrices of one tensor: whole at their owner; in a request, the piece that
    lies in this process.
    """

    matrix: Tensor  # (rows, cols), or a batch (num, rows, cols)
    owned: tuple[Tensor, ...] = ()  # the owner's buffers: (*shape) or (num, *shape)
    # the scalars of the matrix in this step, 0-D each, if owners keep buffers
    s: tuple[Tensor, ...] = ()

    @property
    def is_outweighed(self) -> bool:
        """Whether the owner's buffers have more elements than the matrix."""
        return sum(buffer.numel() for buffer in self.owned) > self.matrix.numel()


class MatrixOutput(NamedTuple):
    """The result of ``at_owner`` for one ``MatrixInput``."""

    matrix: Tensor  # in the shape of the input
    # the owner's buffers after the step, None for a buffer that stays as it is
    owned: tuple[Tensor | None, ...] = ()


class MatrixCost(Protocol):
    """The cost of the work on whole matrices: owners are chosen by it. Matrices of
    equal costs share their exchanges: costs are hashable, and equal on all ranks.
    """

    def __hash__(self) -> int: ...

    def on(self, device_type: str) -> MatrixCost:
        """Return the cost on a type of device, if devices differ."""

    @property
    def is_float32(self) -> bool:
        """Whether its products are of float32, for the model of time."""

    def payload(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """Return the dtype that a matrix of ``dtype`` travels to its owner in."""

    def returned(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """Return the dtype that the owner's result travels back in."""

    def num_flops(self, rows: int, cols: int) -> int:
        """Return the FLOPs of one matrix in one step, on average."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixPreconditioner(Preconditioner):
    """A preconditioner that needs whole matrices: the collectives bring the result of
    ``update`` to the owners, ``at_owner`` turns it into a direction, and ``apply``
    updates x along it.
    """

    matrix_only = True

    @property
    @abstractmethod
    def cost(self) -> MatrixCost:
        """The cost of ``at_owner``."""

    @property
    def owned(self) -> tuple[str, ...]:
        """Return the symbols of the buffers that live with the owners."""
        return tuple(s for s, b in self.buffers.items() if b.home == "owner")

    @property
    def makes_matrix(self) -> bool:
        """Whether ``update`` returns a tensor of its own, and not None for m."""
        return True

    @property
    def every(self) -> int | None:
        """The period of ``stage``, in steps; None = all steps are equal."""
        return None

    def stage(self, count: int, number: int) -> Hashable:
        """Return the extra work of ``at_owner`` in a step, if any. The host decides it,
        so that nothing waits for the device.

        Args:
            count: how many steps were taken before.
            number: of the tensor, among all.
        """
        return None

    @abstractmethod
    def at_owner(
        self, matrices: Sequence[MatrixInput], stage: Hashable
    ) -> list[MatrixOutput]:
        """Return the directions of whole matrices, and the new buffers of owners;
        nothing that is given changes.

        Args:
            matrices: in the dtype that they traveled in, or wider.
            stage: of these matrices in this step.
        """

    def scale(self, rows: int, cols: int) -> float:
        """Return the factor of the learning rate for a whole matrix of this shape."""
        return 1.0

    @abstractmethod
    def apply(
        self, x: Tensor, o: Tensor, s: tuple[Tensor, ...], scale: Number
    ) -> Tensor:
        """Return the new x.

        Args:
            x: (P, n), parts of a piece.
            o: (P, n), the results of ``at_owner``.
            s: this preconditioner's scalars, (P, 1) each.
            scale: ``scale`` of each part's matrix, (P, 1).
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class Average(Preconditioner):
    """One moment: m <- mu m + (1 - mu) c.

    Args:
        momentum: mu, decay rate of m: the authors' betas[0].
    """

    momentum: Number = number(0.95, checks.decay_rate, beta=0)

    keeps = {"m": Buffer("exp_avg")}
    averaged: ClassVar[tuple[str, ...]] = ("m",)  # the symbols of its averages

    def beta1(self, n: Numbers) -> Number:
        momentum: Number = n.momentum
        return momentum

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The buffers that the state keeps, by symbol. An average that reads the count
        of steps starts with it.
        """
        kept = dict(self.keeps)
        for symbol in self.averaged:
            if self.log_time is not None or (symbol == "m" and self.debiases):
                kept[symbol] = kept[symbol]._replace(is_debiased=True)
        return kept

    @property
    def debiases(self) -> bool:
        """Whether u divides m by 1 - mu^t."""
        return False

    def scalars(self, t: Tensor, n: Numbers) -> tuple[Number, ...]:
        memory = n.momentum, t, n.log_time
        return n.lr, 1 - n.lr * n.weight_decay, at(*memory), complement(*memory)


def _is_switch(value: object) -> bool:
    """Return whether a value in the place of a number switches it on or off."""
    return value is None or isinstance(value, bool)


# The average in a plain matrix rule has the name that torch.optim.Muon gives it, so
# that an average of corrected gradients is never taken for it.
MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, kw_only=True, eq=False)
class Algorithm:
    """A correction and a preconditioner of one tensor. Every correction works with
    every preconditioner.

    Algorithms are equal if their formulas are, whatever their numbers: formulas are
    given the numbers of each step as arguments, and a field is their default.

    Args:
        preconditioner: makes a step from c.
        correction: makes c from the gradient; None: c is the gradient.
        state_dtype: dtype of the state buffers; None = the parameter's own, float32 for
            float16 and with ``master_weight_bits``. Not narrower than the parameter:
            moments are averages of small steps, which rounding to nearest would lose;
            but bfloat16 with ``stochastic_rounding``, or torch.int8: codes with a
            bfloat16 scale for 64 neighbours in a row, rounded stochastically. float32
            remains for vectors, tensors below 4,096 elements or with gaps, rows of
            another length than a multiple of 64, the squares of ``amsgrad``, and the
            buffers of owners.
        stochastic_rounding: whether a step rounds stochastically the values that it
            writes into state buffers of bfloat16.
        master_weight_bits: 32: bfloat16 parameters are float32 weights rounded to
            nearest, and a step updates these: the state holds the 16 bits of a weight
            that the parameter lacks. 24: the state holds 8 of them, and a step rounds
            the weight stochastically. None = off. Integers have no derivative: no loop
            differentiates through such steps.
        matrices: which matrices a tensor is made of.
        name: its name in messages.

    Raises:
        ValueError: a ``state_dtype`` that is neither int8 nor floating point, or is
            float16; other ``master_weight_bits``.

    Example:
        >>> algorithm = marsopt.Algorithm(
        ...     preconditioner=marsopt.Lion(), correction=marsopt.Exact(gamma=0.05)
        ... )
        >>> for symbol, buffer in algorithm.buffers.items():
        ...     print(symbol, buffer.key)
        m exp_avg
        h last_grad
    """

    preconditioner: Preconditioner = field(metadata=NO_OPTION)
    correction: Correction | None = field(default=None, metadata=NO_OPTION)
    state_dtype: torch.dtype | None = structure(
        None, checks.coded_or_state_dtype, whole=True
    )
    stochastic_rounding: bool = structure(False, whole=True)
    master_weight_bits: MasterBits = structure(
        None, checks.master_bits_or_none, whole=True
    )
    matrices: Matrices = Matrices()
    name: str = field(default="", metadata=NO_OPTION)

    # The numbers of a step in their order in a table, by name; a number of a pair has
    # its place there.
    columns: ClassVar[tuple[tuple[str, int | None], ...]]
    has_noise: ClassVar[bool]  # whether a step rounds anything stochastically
    _numbers: ClassVar[dict[str, Any]]
    _switches: ClassVar[dict[str, bool | None]]
    _form: ClassVar[tuple[Hashable, ...]]
    # the algorithms of tensors whose state cannot be codes, by working dtype
    _wide: ClassVar[dict[torch.dtype, Algorithm]]

    def __post_init__(self) -> None:
        check_fields(self)
        components = self.correction, self.preconditioner
        # the preconditioner's number counts if a correction has one of its name, too
        numbers = {
            name: value
            for component in components
            if component is not None
            for name, value in number_fields(component).items()
        }
        columns: list[tuple[str, int | None]] = [("lr", None)]
        for name, value in numbers.items():
            if isinstance(value, tuple):
                columns += [(name, i) for i in range(len(value))]
            elif not _is_switch(value):
                columns.append((name, None))
        switches = {name: value for name, value in numbers.items() if _is_switch(value)}
        options = (f.name for f in fields(self) if f.metadata.get("option", True))
        others = [getattr(self, name) for name in options]
        form = *map(form_of, components), *others, *columns, *switches.items()
        has_noise = self.stochastic_rounding or self.master_weight_bits == 24
        has_noise = has_noise or self.state_dtype == CODED
        vars(self).update(columns=tuple(columns), has_noise=has_noise)
        vars(self).update(_numbers=numbers, _switches=switches, _form=form)
        dtypes = (torch.float32, torch.float64) if self.state_dtype == CODED else ()
        vars(self).update(_wide={d: replace(self, state_dtype=d) for d in dtypes})

    def __str__(self) -> str:
        return self.name or type(self.preconditioner).__name__

    # ---- numbers and formulas --------------------------------------------------------

    @property
    def is_built_in(self) -> bool:
        """Whether no component is of a user's class, which may read its own fields."""
        return is_built_in(self.preconditioner) and is_built_in(self.correction)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Algorithm) and self._form == other._form

    def __hash__(self) -> int:
        return hash(self._form)

    def defaults(self, lr: Number, gamma: Number | None) -> list[Number]:
        """Return the numbers of a step by its own fields, in the order of ``columns``;
        ``gamma`` None is the correction's.
        """
        values = {"lr": lr, **self._numbers}
        if gamma is not None and self.correction is not None:
            values["gamma"] = gamma
        return [values[n] if i is None else values[n][i] for n, i in self.columns]

    def read(self, columns: Iterable[Any]) -> Numbers:
        """Return the numbers of a step by name, from values in the order of
        ``columns``.
        """
        values: dict[str, Any] = dict(self._switches)
        for (name, place), value in zip(self.columns, columns, strict=True):
            if place is not None:
                value = *values.get(name, ()), value
            values[name] = value
        return Numbers(**values)

    # ---- structure -------------------------------------------------------------------

    @property
    def matrix_only(self) -> bool:
        """Whether it takes only matrices."""
        return self.preconditioner.matrix_only

    @property
    def matrix_preconditioner(self) -> MatrixPreconditioner:
        """The preconditioner, if it takes only matrices."""
        return cast(MatrixPreconditioner, self.preconditioner)

    @property
    def moments(self) -> tuple[str, ...]:
        """The symbols of the buffers that ``Preconditioner.update`` takes and returns:
        those at home in shards.
        """
        buffers = self.preconditioner.buffers
        return tuple(s for s, b in buffers.items() if b.home == "shard")

    @property
    def owned(self) -> tuple[str, ...]:
        """The symbols of the buffers that live with the owners of matrices."""
        return self.matrix_preconditioner.owned if self.matrix_only else ()

    @property
    def has_stages(self) -> bool:
        """Whether the work on whole matrices differs from step to step."""
        return self.matrix_only and self.matrix_preconditioner.every is not None

    @property
    def h_from(self) -> Literal["step", "caller"] | None:
        """The writer of h, as ``Correction`` has it; None: there is no h."""
        return None if self.correction is None else self.correction.h_from

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The buffers of each tensor beside it and its gradient, by symbol."""
        buffers = dict(self.preconditioner.buffers)
        if "m" in buffers and self.is_momentum and self.correction is None:
            buffers["m"] = buffers["m"]._replace(key=MOMENTUM)
        if self.h_from is not None:
            # no step writes a caller's h, which its caller may read
            buffers["h"] = H if self.h_from == "step" else H._replace(codes=None)
        # after h: the number of a buffer is a number of its noise
        for symbol in low_symbols(self.master_weight_bits):
            buffers[symbol] = Buffer(symbol, dtype=LOW_DTYPE)
        scales: dict[str, Any] = dict(shape=like_scales, dtype=SCALE_DTYPE)
        return buffers | {
            symbol + SCALE: buffer._replace(key=buffer.key + SCALE, **scales)
            for symbol, buffer in buffers.items()
            if self.stores_codes(buffer)
        }

    @property
    def is_momentum(self) -> bool:
        """Whether m is a momentum buffer as in torch's Muon: of a matrix, as it is."""
        return self.matrix_only and self.preconditioner.buffers["m"].home == "shard"

    @property
    def kept(self) -> dict[str, Buffer]:
        """The buffers that the state keeps from one step to the next: all but h that
        the caller hands over.
        """
        handed_over = {"h"} if self.h_from == "caller" else set()
        return {s: b for s, b in self.buffers.items() if s not in handed_over}

    def dtype_of(self, buffer: Buffer, x: Tensor) -> torch.dtype:
        """Return the dtype of a buffer for ``x``."""
        if self.stores_codes(buffer):
            return CODED
        state_dtype = self.state_dtype or default_state_dtype(
            x.dtype, self.master_weight_bits
        )
        if state_dtype == CODED:
            state_dtype = working_dtype(x)
        if buffer.home == "owner":  # not rounded stochastically
            state_dtype = torch.promote_types(state_dtype, x.dtype)
        narrow = None if self.correction is None else self.correction.h_dtype
        if isinstance(buffer.dtype, torch.dtype):
            return buffer.dtype
        by_name = {
            "state": state_dtype,
            "gradient": narrow or state_dtype,
            "working": working_dtype(x),
        }
        return by_name[buffer.dtype]

    def stores_codes(self, buffer: Buffer) -> bool:
        """Return whether a buffer is stored as codes, with scales in another buffer."""
        h_dtype = None if self.correction is None else self.correction.h_dtype
        is_state = buffer.dtype == "state" or (
            buffer.dtype == "gradient" and h_dtype is None
        )
        has_codes = buffer.codes is not None and buffer.home == "shard"
        return self.state_dtype == CODED and is_state and has_codes

    def of_tensor(self, x: Tensor, shape: torch.Size) -> Algorithm:
        """Return the algorithm of a tensor: itself, or if its state has codes and the
        tensor's cannot, with state in the working dtype.

        Args:
            x: the tensor, or several of this shape in one.
            shape: of the whole tensor.
        """
        if self.state_dtype != CODED or takes_codes(x, shape):
            return self
        return self._wide[working_dtype(x)]

    def rounds(self, buffer: Buffer, dtype: torch.dtype) -> bool:
        """Return whether a step rounds stochastically when it writes into a buffer of
        this dtype, at home in shards.
        """
        is_state = buffer.dtype in ("state", "gradient")
        return self.stochastic_rounding and is_state and dtype == NARROW

    def num_norms(self, shape: torch.Size) -> int:
        """Return the number of norms of a tensor of this shape: 1, or its matrices if
        they are clipped separately.
        """
        correction = self.correction
        if correction is None or correction.clip is None:
            return 1
        if correction.clip_per == "tensor":
            return 1
        return self.matrices.num_in(shape)

    def cost_on(self, device: torch.device) -> MatrixCost:
        """Return the cost of the owners' work on this kind of device."""
        return self.matrix_preconditioner.cost.on(device.type)

    @property
    def makes_matrix(self) -> bool:
        """Whether the owners of matrices get another tensor than m as it is stored."""
        if not self.matrix_only:
            return False
        preconditioner = self.matrix_preconditioner
        return preconditioner.makes_matrix or self.stores_codes(
            preconditioner.buffers["m"]
        )
