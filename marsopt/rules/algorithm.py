"""An algorithm: a correction of the gradient, then a preconditioner of its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction, H
from marsopt.rules.dtypes import default_state_dtype, working_dtype
from marsopt.rules.matrices import Matrices
from marsopt.rules.preconditioner import MatrixPreconditioner, Preconditioner
from marsopt.rules.rounding import NARROW

# An average has three names in a state, so that none is taken for another: of corrected
# gradients (its own key); "momentum_buffer" in a plain matrix rule, as torch.optim.Muon
# has it; and "grad_avg" for averages of plain gradients in place of corrected
# gradients.
MOMENTUM, GRADIENTS = "momentum_buffer", "grad_avg"


@dataclass(frozen=True, kw_only=True, eq=False)
class Algorithm:
    """A correction and a preconditioner of one tensor. Every correction works with
    every preconditioner.

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

    def __post_init__(self) -> None:
        checks.state_dtype_or_none("state_dtype", self.state_dtype)
        checks.true_or_false("stochastic_rounding", self.stochastic_rounding)

    def __str__(self) -> str:
        return self.name or type(self.preconditioner).__name__

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
    def is_quasi_hyperbolic(self) -> bool:
        """Whether the average of g stands for the one of c (see ``Average``)."""
        return (
            self.correction is not None
            and self.correction.is_linear
            and self.preconditioner.averages
        )

    @property
    def active_correction(self) -> Correction | None:
        """The correction, if a step makes c by it."""
        return None if self.is_quasi_hyperbolic else self.correction

    @property
    def h_from(self) -> Literal["step", "caller"] | None:
        """The writer of h, as ``Correction`` has it; None: there is no h."""
        return None if self.active_correction is None else self.active_correction.h_from

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The buffers of each tensor beside it and its gradient, by symbol."""
        buffers = dict(self.preconditioner.buffers)
        if "m" in buffers and self.is_quasi_hyperbolic:
            buffers["m"] = buffers["m"]._replace(key=GRADIENTS)
        elif "m" in buffers and self.is_momentum and self.correction is None:
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
        narrow = (
            None if self.active_correction is None else self.active_correction.h_dtype
        )
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

    def scalars(self, t: Tensor, lr: Number, gamma: Number) -> tuple[Number, ...]:
        """Return the preconditioner's numbers for tensors at their steps t (N,)."""
        if self.is_quasi_hyperbolic:
            return self.preconditioner.scalars(t, lr, gamma)
        return self.preconditioner.scalars(t, lr)

    @property
    def makes_matrix(self) -> bool:
        """Whether the owners of matrices get another tensor than m."""
        return self.matrix_only and (
            self.matrix_preconditioner.makes_matrix or self.is_quasi_hyperbolic
        )
