"""MARS's corrected gradient c (arXiv 2411.10438, Algorithm 1; the authors'
optimizers/mars.py), as every correction makes it: a weighted sum of the gradient and
other operands, clipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.hyperparameters import check_fields, number, structure

if TYPE_CHECKING:  # shapes, which tests/library/test_shapes.py checks
    from jaxtyping import Float

Per = Literal["matrix", "tensor"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction(ABC):
    """The corrected gradient c that a preconditioner gets in place of the gradient g:

        c = w_0 g + w_1 v_1 + w_2 v_2 + ...        v: the operands of this correction
        c <- c / max(1, ||c||_F / clip)            per matrix or tensor

    A subclass says which operands, with which coefficients, and which of them the state
    keeps. Its protocol (``register``) is the work of ``MARS`` beside a step.

    Args:
        gamma: scale of the variance reduction; 0 turns it off, and a negative one, for
            experiments, moves c the opposite way.
        clip: threshold of the norm of c; None = off.
        clip_per: the unit that is clipped to its own norm: "matrix", where a tensor is
            made of several (``Matrices``), or "tensor".
        h_dtype: dtype of a kept gradient; None = the dtype of the other buffers.
            torch.bfloat16 saves memory and traffic, and rounds it by up to 2^-9.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> class Damped(marsopt.Correction):
        ...     name = "damped"
        ...     def coefficients(self, beta1, gamma):
        ...         return (1 - gamma,)
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
    # operands beside the gradient, by symbol: each is a buffer
    operands: ClassVar[tuple[str, ...]] = ()
    # the operand that ``Rule.step``'s ``reference`` stands for: the caller hands it to
    # every step, unless the step writes it
    reference: ClassVar[str | None] = None
    # all that it may keep, by symbol
    keeps: ClassVar[dict[str, Buffer]] = {}
    # those buffers that the step itself writes: see ``kept``
    written: ClassVar[tuple[str, ...]] = ()
    # whether parameters hold a point ahead of the iterate, which is the buffer "x"
    is_ahead: ClassVar[bool] = False
    # whether that buffer is kept even where x follows from the other buffers
    store_iterate: ClassVar[bool] = True
    # whether baselines take it too: it then changes only where gradients are taken
    suits_baselines: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_linear(self) -> bool:
        """Whether the average of c follows from the average of g, so that neither c nor
        an operand has to be there (``Average`` has the formula).
        """
        return False

    @abstractmethod
    def coefficients(self, beta1: Number, gamma: Number) -> tuple[Number, ...]:
        """Return the coefficients of g and of each operand, before the clip.

        Args:
            beta1: decay rate of the preconditioner's first moment in this step,
                whatever its paper calls it: Lion's betas[1].
            gamma: scale of the variance reduction in this step.
        """

    def kept(self, g: Tensor, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that the step itself puts into the buffers of ``written``,
        given the gradient after the global clip, and this correction's present buffers.
        """
        return {}

    def extrapolation(self, beta1: Number, gamma: Number) -> Number | None:
        """Return by how many displacements parameters are ahead of the iterate after a
        step with this ``gamma``; None where ``is_ahead`` is False.
        """
        return None

    def anchored(self, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return the buffers that a full gradient ``g`` at ``x`` sets."""
        raise ValueError(
            f"got a full gradient for correction={self.name!r}, expected one that has "
            'an anchor: choose correction="svrg"'
        )

    def weights(
        self,
        beta1: Number,
        gamma: Number,
        a: Float[Tensor, ""],
        products: Float[Tensor, "n pairs"],
    ) -> tuple[tuple[Float[Tensor, " n"], ...], Float[Tensor, " n"]]:
        """Return (N,) weights of g and of each operand in c, for N tensors or matrices,
        and the squared norms of c.

        Args:
            beta1: decay rate of the first moment in this step, a number or (N,).
            gamma: scale of the variance reduction in this step.
            a: factor of the global clip on g, 0-D.
            products: (N, pairs) inner products of g and the operands with each other,
                in the order of ``pairs``, complete over shards.

        Raises:
            ValueError: ``coefficients`` returns another number of them.
        """
        ones = torch.ones_like(products[:, 0])
        coefficients = self.coefficients(beta1, gamma)
        if len(coefficients) != (num := 1 + len(self.operands)):
            raise ValueError(
                f"got {len(coefficients)} coefficients of {type(self).__name__}, "
                f"expected {num}, of the gradient and of operands={self.operands}: "
                "return one for each"
            )
        w = [value * ones for value in coefficients]
        w[0] = w[0] * a
        # ||c||^2 expanded: neither c nor a second pass over the operands is needed
        cc = torch.zeros_like(ones)
        for (i, j), product in zip(pairs(w), products.unbind(1), strict=False):
            cc = cc + (1 if i == j else 2) * w[i] * w[j] * product
        if self.clip is None:
            return tuple(w), cc
        # clamped before the root, whose derivative at 0 is infinite
        s = self.clip / cc.clamp(min=self.clip * self.clip).sqrt()
        return tuple(s * value for value in w), s * s * cc


@dataclass(frozen=True, kw_only=True, eq=False)
class Approximate(Correction):
    """The authors' default (section 3.2): with h the previous step's gradient, which
    the state keeps,

        k = gamma beta1 / (1 - beta1)
        c = g + k (g - h)

    In the first step h is zero, as the state is, and c = (1 + k) g before the clip.

    Source: MARS, arXiv 2411.10438, Algorithm 1 and section 3.2.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> marsopt.Approximate().coefficients(beta1=0.75, gamma=0.25)    # of g and h
        (1.75, -0.75)
    """

    name = "approximate"
    operands = ("h",)
    reference = "h"
    keeps = {"h": Buffer("last_grad", dtype="gradient")}
    written = ("h",)

    @property
    def is_linear(self) -> bool:
        return self.clip is None

    def coefficients(self, beta1: Number, gamma: Number) -> tuple[Number, ...]:
        k = scale(beta1, gamma)
        return 1 + k, -k

    def kept(self, g: Tensor, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"h": g}


def pairs(values: Sequence[object]) -> list[tuple[int, int]]:
    """Return the positions (i, j), i <= j, of all pairs, (0, 0) first."""
    return [(i, j) for i in range(len(values)) for j in range(i, len(values))]


def scale(beta1: Number, gamma: Number) -> Number:
    """Return k = gamma beta1 / (1 - beta1), the scale of MARS's correction."""
    return gamma * beta1 / (1 - beta1)
