"""SVRG with a coefficient (alpha-SVRG: Yin et al., A Coefficient Makes SVRG Effective,
arXiv 2311.05589; SVRG: Johnson and Zhang, 2013). A reference: for the same number of
gradients it is far behind plain ones, step for step ahead of them (research/svrg.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction
from marsopt.rules.exact import put
from marsopt.rules.life import Factor, Held, Life


class Snapshot(Life):
    """A snapshot of the parameters, and the full gradient there:

    if step % period == 0:                  # of the whole data set, or much of it
        optimizer.zero_grad(); full_loss().backward()
        optimizer.update_anchor()           # snapshot <- x, mu <- p.grad
    with optimizer.at_snapshot():           # parameters hold the snapshot
        optimizer.zero_grad(); loss(batch).backward()
        optimizer.update_previous_grad()    # h <- p.grad
    optimizer.zero_grad(); loss(batch).backward(); optimizer.step()

    Parameters that the AdamW beside a rule moves are not corrected, and stay where they
    are: ``optimize_1d=True`` corrects all.
    """

    takes_gradients = True
    has_anchor = True

    def __init__(self) -> None:
        self._fresh = self._away = self._anchored = False

    def keep(self, held: Sequence[Held], factor: Factor) -> None:
        """Let h be the gradients that are there, those of the batch at the snapshot.

        Raises:
            RuntimeError: there is no anchor yet, or the parameters are not at the
                snapshot.
        """
        if not self._anchored:
            raise RuntimeError(
                "got update_previous_grad() without an anchor, expected the full "
                "gradient first: compute it at the current parameters and call "
                "optimizer.update_anchor()"
            )
        if not self._away:
            raise RuntimeError(
                "got update_previous_grad() at the current parameters, expected the "
                "gradient at the snapshot: compute it and call this inside of "
                "`with optimizer.at_snapshot():`"
            )
        for one in held:
            if "h" in one:
                put(one["h"], one.grad, factor)
        self._fresh = True

    def before_step(self, held: Sequence[Held]) -> None:
        """Check that h is of this step's batch, and parameters are not the snapshot.

        Raises:
            RuntimeError: it is not, or they are.
        """
        if self._away or not self._fresh:
            raise RuntimeError(
                "got step() without the batch's gradient at the snapshot, expected the "
                "protocol of SVRG: update_previous_grad() inside of "
                "`with optimizer.at_snapshot():`, then the gradient at the current "
                "parameters and step()"
            )

    def after_step(self, held: Sequence[Held]) -> None:
        """Note that h belongs to a batch that has passed."""
        self._fresh = False

    def anchor(self, held: Sequence[Held], factor: Factor) -> None:
        """Let the snapshot be the parameters, and mu the gradients that are there."""
        for one in held:
            if "snapshot" in one:
                one["snapshot"].copy_(one.piece)
                put(one["mu"], one.grad, factor)
        self._fresh, self._anchored = False, True

    def exchange(self, held: Sequence[Held], ahead: bool) -> None:
        """Exchange parameters and snapshot."""
        for one in held:
            if "snapshot" in one:
                before, snapshot = one.piece.clone(), one["snapshot"]
                one.piece.copy_(snapshot)
                snapshot.copy_(before)
        self._away = not self._away

    def check_may_save(self) -> None:
        """Check that parameters are not the snapshot.

        Raises:
            RuntimeError: they are.
        """
        if self._away:
            raise RuntimeError(
                "got a state dict, copy or pickle inside of at_snapshot(), expected "
                "one of the current parameters: leave the context first"
            )

    def loaded(
        self,
        held: Sequence[Held],
        entries: Mapping[Tensor, Mapping[str, Any]],
        ahead: bool,
    ) -> None:
        self._fresh, self._anchored = False, any(one.has_stepped for one in held)

    def carried(self) -> tuple[bool, bool]:
        return self._fresh, self._anchored

    def resumed(self, held: Sequence[Held], carried: Any) -> None:
        self._fresh, self._anchored = carried


@dataclass(frozen=True, kw_only=True, eq=False)
class SVRG(Correction):
    """With h the batch's gradient at a snapshot of the parameters, mu the full gradient
    there, and gamma the paper's coefficient alpha (1 is SVRG):

        c = g - gamma (h - mu)

    h is given to every step: by the protocol of ``Snapshot``, or as the ``reference``
    of ``Rule.step``; ``Rule.anchor`` sets snapshot and mu. Before the first anchor mu
    is zero.

    Source: alpha-SVRG, Yin et al., arXiv 2311.05589; SVRG: Johnson and Zhang, 2013.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> rule = marsopt.mars_adamw(correction="svrg", gamma=1.0, clip=None)
        >>> x = {"w": torch.ones(2)}
        >>> mu, h = {"w": torch.full((2,), 2.0)}, {"w": torch.full((2,), 3.0)}
        >>> state = rule.anchor(x, mu, rule.init(x))
        >>> _, state = rule.step(x, h, state, lr=0.1, reference=h)
        >>> state.buffers["m"]["w"]     # 0.05 (g - h + mu), with g = h
        tensor([0.1000, 0.1000])
    """

    name = "svrg"
    operands = ("h", "mu")
    given = ("h",)
    reference = "h"
    keeps = {
        "h": Buffer("snapshot_grad", dtype="gradient"),
        "mu": Buffer("anchor_grad"),
        "snapshot": Buffer("snapshot", start="parameter", dtype="parameter"),
    }
    life = Snapshot

    def coefficients(self, beta1: Number, gamma: Number) -> tuple[Number, ...]:
        return 1.0, -gamma, gamma

    def anchored(self, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        return {"snapshot": x, "mu": g}
