"""MARS's corrected gradient c (arXiv 2411.10438, Algorithm 1; the authors'
optimizers/mars.py), as every correction makes it: a weighted sum of the gradient and a
reference gradient, clipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.hyperparameters import Numbers, check_fields, number, structure

if TYPE_CHECKING:  # shapes, which tests/library/test_shapes.py checks
    from jaxtyping import Float

Per = Literal["matrix", "tensor"]

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
            _, of_h = w
            cc = cc + 2 * w[0] * of_h * products[:, 1] + of_h * of_h * products[:, 2]
        if n.clip is None:
            return tuple(w), cc
        # clamped before the root: its derivative at 0 is infinite
        s = n.clip / cc.clamp(min=n.clip * n.clip).sqrt()
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
        >>> from marsopt.rules.hyperparameters import Numbers
        >>> marsopt.Approximate().coefficients(0.75, Numbers(gamma=0.25))  # of g and h
        (1.75, -0.75)
    """

    name = "approximate"
    h_from = "step"

    def coefficients(self, beta1: Number, n: Numbers) -> tuple[Number, ...]:
        k = scale(beta1, n.gamma)
        return 1 + k, -k


def scale(beta1: Number, gamma: Number) -> Number:
    """Return k = gamma beta1 / (1 - beta1), the scale of MARS's correction."""
    return gamma * beta1 / (1 - beta1)
