"""MARS's correction of the gradient (arXiv 2411.10438, Algorithm 1; the authors'
optimizers/mars.py): c, its scale k, its clip; and what stands for it with one gradient,
transport (this project's; implicit gradient transport, arXiv 1906.03532, seen through
MARS).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.checks import Number

Kind = Literal["approximate", "exact", "transport"]
KINDS: tuple[str, ...] = get_args(Kind)
Per = Literal["matrix", "tensor"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """What a preconditioner is given in place of the gradient:

        k = gamma beta1 / (1 - beta1)
        c = g(x) + k (g(x) - h)                    approximate and exact
        c = g(y)  at  y = x + k (x - x_prev)       transport
        c <- c / max(1, ||c||_F / clip)            per matrix or tensor

    with beta1 the decay rate of the preconditioner's first moment, and x_prev the
    parameters one step before. On the current batch g(y) is the exact c to first order
    in x - x_prev, and c itself where the loss is quadratic.

    Args:
        kind: "approximate": h is the previous step's gradient, kept in the state.
            "exact": h is the current batch's gradient at x_prev, given to every step.
            "transport": parameters hold y while gradients are taken, the state keeps
            x, and there is no h.
        gamma: scale of the variance reduction; 0 turns it off. With transport, the
            lookahead that a step leaves has the gamma of that step.
        clip: threshold of the norm of c; None = off.
        clip_per: what has a norm of its own: "matrix", where a tensor is made of
            several (``Matrices``), or "tensor".
        h_dtype: dtype of the kept h; None = that of the other buffers. Half precision
            saves memory and traffic, and rounds h by up to 2^-9 (bf16).
    """

    kind: Kind = "approximate"
    gamma: Number = 0.025
    clip: Number | None = 1.0
    clip_per: Per = "matrix"
    h_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"got correction={self.kind!r}, expected one of {KINDS}: choose one"
            )
        checks.finite("gamma", self.gamma)
        checks.positive_or_none("clip", self.clip)
        if self.clip_per not in get_args(Per):
            raise ValueError(
                f"got clip_per={self.clip_per!r}, expected one of {get_args(Per)}: "
                "choose one"
            )
        checks.floating_or_none("h_dtype", self.h_dtype)

    @property
    def transports(self) -> bool:
        """Whether the gradient is taken ahead of x, so that no h is needed."""
        return self.kind == "transport"

    @staticmethod
    def scale(beta1: Number, gamma: Number) -> Number:
        """Return k."""
        return gamma * beta1 / (1 - beta1)

    def weights(
        self, beta1: Number, gamma: Number, a: Tensor, products: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return (N,) weights with which c = w_g g + w_h h, for N tensors or matrices;
        None for h where there is none.

        Args:
            beta1: decay rate of the first moment.
            gamma: scale of the variance reduction in this step.
            a: factor of the global clip on g, 0-D.
            products: (N, 3) <g,g>, <g,h>, <h,h> of each, complete over shards.
        """
        gg, gh, hh = products.unbind(1)
        k = 0.0 if self.transports else self.scale(beta1, gamma)
        w_g, w_h = (1 + k) * a, k * torch.ones_like(gg)
        s = torch.ones_like(gg)
        if self.clip is not None:
            # ||(1+k) a g - k h||^2 expanded: neither c nor a second pass is needed
            cc = w_g * w_g * gg - 2 * w_g * w_h * gh + w_h * w_h * hh
            s = self.clip / cc.clamp(min=0).sqrt().clamp(min=self.clip)
        return s * w_g, None if self.transports else -s * w_h


def resolve(is_approx: bool, correction: str | None) -> str:
    """Return the kind that the authors' ``is_approx`` and our ``correction`` name.

    Raises:
        ValueError: they contradict each other, or the kind is unknown.
    """
    if correction is None:
        return "approximate" if is_approx else "exact"
    if correction not in KINDS:
        raise ValueError(
            f"got correction={correction!r}, expected one of {KINDS} or None: None "
            "takes what is_approx says"
        )
    if not is_approx and correction != "exact":
        raise ValueError(
            f"got is_approx=False with correction={correction!r}, expected one to "
            "agree with the other: pass only correction"
        )
    return correction
