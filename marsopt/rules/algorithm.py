"""An algorithm: a correction of the gradient, then a preconditioner of its result."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction, H
from marsopt.rules.dtypes import default_state_dtype, working_dtype
from marsopt.rules.hyperparameters import (
    Numbers,
    dynamic,
    form_of,
    is_built_in,
    number_fields,
    without_numbers,
)
from marsopt.rules.matrices import Matrices
from marsopt.rules.preconditioner import MatrixPreconditioner, Preconditioner
from marsopt.rules.rounding import NARROW

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
            float16. Not narrower than the parameter: moments are averages of small
            steps, which rounding to nearest would lose; but bfloat16 with
            ``stochastic_rounding``.
        stochastic_rounding: whether a step rounds stochastically the values that it
            writes into state buffers of bfloat16.
        matrices: which matrices a tensor is made of.
        name: its name in messages.

    Raises:
        ValueError: a ``state_dtype`` that is not floating point, or float16.

    Example:
        >>> algorithm = marsopt.Algorithm(
        ...     preconditioner=marsopt.Lion(), correction=marsopt.Exact(gamma=0.05)
        ... )
        >>> for symbol, buffer in algorithm.buffers.items():
        ...     print(symbol, buffer.key)
        m exp_avg
        h last_grad
    """

    preconditioner: Preconditioner
    correction: Correction | None = None
    state_dtype: torch.dtype | None = None
    stochastic_rounding: bool = False
    matrices: Matrices = Matrices()
    name: str = ""

    _numbers: ClassVar[dict[str, Any]]
    _form: ClassVar[tuple[Hashable, ...]]

    def __post_init__(self) -> None:
        checks.state_dtype_or_none("state_dtype", self.state_dtype)
        checks.true_or_false("stochastic_rounding", self.stochastic_rounding)
        self._keep_numbers()

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

    def _keep_numbers(self) -> None:
        """Keep the components' fields that are numbers, and the form of all else. The
        preconditioner's field counts if a correction has one of its name, too.
        """
        of_c = {} if self.correction is None else number_fields(self.correction)
        numbers = of_c | number_fields(self.preconditioner)
        parts = form_of(self.preconditioner), form_of(self.correction)
        form = *parts, self.state_dtype, self.stochastic_rounding, self.matrices
        object.__setattr__(self, "_numbers", numbers)
        object.__setattr__(self, "_form", form)

    @property
    def formula(self) -> Algorithm:
        """The same algorithm without its numbers, for graphs and kernels to keep."""
        bare = copy.copy(self)
        for name in ("preconditioner", "correction"):
            component = without_numbers(getattr(self, name))
            object.__setattr__(bare, name, component)
        bare._keep_numbers()
        return bare

    @property
    def columns(self) -> list[tuple[str, int | None]]:
        """The numbers of a step in their order in a table, by name; a number of a pair
        has its place there.
        """
        columns: list[tuple[str, int | None]] = [("lr", None)]
        for name, value in self._numbers.items():
            is_pair = isinstance(value, tuple | list)
            num = len(dynamic(value))
            columns += [(name, i if is_pair else None) for i in range(num)]
        return columns

    def defaults(self, lr: Number, gamma: Number | None) -> list[Number]:
        """Return the numbers of a step by its own fields, in the order of ``columns``;
        ``gamma`` None is the correction's.
        """
        values = dict(self._numbers)
        if gamma is not None and self.correction is not None:
            values["gamma"] = gamma
        return [lr, *dynamic(tuple(values.values()))]

    def read(self, columns: Iterator[Any]) -> Numbers:
        """Return the numbers of a step by name, from values in the order of
        ``columns``.
        """
        values: dict[str, Any] = {"lr": next(columns)}
        for name, value in self._numbers.items():
            if isinstance(value, tuple | list):
                value = tuple(islice(columns, len(value)))
            elif value is not None and not isinstance(value, bool):
                value = next(columns)
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
        return buffers if self.h_from is None else {**buffers, "h": H}

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
        state_dtype = self.state_dtype or default_state_dtype(x.dtype)
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

    @property
    def makes_matrix(self) -> bool:
        """Whether the owners of matrices get another tensor than m."""
        return self.matrix_only and self.matrix_preconditioner.makes_matrix
