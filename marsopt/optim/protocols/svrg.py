"""SVRG in the class: a snapshot of the parameters, and the full gradient there."""

from __future__ import annotations

import torch
from torch import Tensor

from marsopt.optim.protocols.base import CorrectionProtocol, Entries, Handles, Host
from marsopt.optim.protocols.exact import put_scaled
from marsopt.rules.registry import register
from marsopt.rules.svrg import SVRG


class Snapshot(CorrectionProtocol):
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

    def __init__(self) -> None:
        self._is_away = False  # whether parameters hold the snapshot
        # whether h is of the next step's batch, and whether there is an anchor
        self.progress: tuple[bool, bool] = (False, False)

    def update_previous_grad(
        self, optimizer: Host, grad_scale: float | Tensor | None
    ) -> None:
        """Let h be the present gradients, of the batch at the snapshot.

        Raises:
            RuntimeError: there is no anchor yet, or the parameters are not at the
                snapshot.
        """
        handles = optimizer.parameter_handles()
        _, is_anchored = self.progress
        if not is_anchored:
            raise RuntimeError(
                "got update_previous_grad() without an anchor, expected the full "
                "gradient first: compute it at the current parameters and call "
                "optimizer.update_anchor()"
            )
        if not self._is_away:
            raise RuntimeError(
                "got update_previous_grad() at the current parameters, expected the "
                "gradient at the snapshot: compute it and call this inside of "
                "`with optimizer.at_snapshot():`"
            )
        factor = optimizer.gradient_factor(grad_scale)
        for handle in handles:
            if "h" in handle:
                put_scaled(handle["h"], handle.grad, factor)
        self.progress = True, True

    def before_step(self, optimizer: Host, handles: Handles) -> None:
        """Check that h is of this step's batch, and parameters are not the snapshot.

        Raises:
            RuntimeError: it is not, or they are.
        """
        is_fresh, _ = self.progress
        if self._is_away or not is_fresh:
            raise RuntimeError(
                "got step() without the batch's gradient at the snapshot, expected the "
                "protocol of SVRG: update_previous_grad() inside of "
                "`with optimizer.at_snapshot():`, then the gradient at the current "
                "parameters and step()"
            )

    def after_step(self, optimizer: Host, handles: Handles) -> None:
        """Note that h belongs to a batch that has passed."""
        self.progress = False, True

    def update_anchor(self, optimizer: Host, grad_scale: float | Tensor | None) -> None:
        """Write the correction's snapshot of the parameters and of the present
        gradients.
        """
        handles = optimizer.parameter_handles()
        factor = optimizer.gradient_factor(grad_scale)
        for handle in handles:
            correction = handle.algorithm.active_correction
            if correction is not None:
                g = torch.empty_like(handle.piece)
                put_scaled(g, handle.grad, factor)
                buffers = correction.anchored(handle.piece, g)
                for symbol, value in buffers.items():
                    handle[symbol].copy_(value)
        self.progress = False, True

    def at_snapshot(self, optimizer: Host) -> None:
        """Exchange parameters and snapshot."""
        handles = optimizer.parameter_handles()
        for handle in handles:
            if "snapshot" in handle:
                parameter, snapshot = handle.piece.clone(), handle["snapshot"]
                handle.piece.copy_(snapshot)
                snapshot.copy_(parameter)
        self._is_away = not self._is_away
        optimizer.notify_written()

    def check_may_save(self, optimizer: Host) -> None:
        if self._is_away:
            raise RuntimeError(
                "got a state dict, copy or pickle inside of at_snapshot(), expected "
                "one of the current parameters: leave the context first"
            )

    def check_may_restart(self) -> None:
        if self._is_away:
            raise RuntimeError(
                "got reset_momentum() inside of at_snapshot(), expected it at the "
                "current parameters: leave the context first"
            )

    def restart(self, optimizer: Host, handles: Handles) -> None:
        """Drop the anchor: the next step needs a new one."""
        self.progress = False, False

    def load(self, handles: Handles, entries: Entries) -> None:
        self.progress = False, any(handle.has_stepped for handle in handles)

    handled_calls = frozenset({"update_previous_grad", "update_anchor", "at_snapshot"})


register(SVRG, protocol=Snapshot)
