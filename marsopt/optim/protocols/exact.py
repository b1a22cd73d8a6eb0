"""Exact MARS in the class: two gradients of every batch, by the authors' protocol."""

from __future__ import annotations

import torch
from torch import Tensor

from marsopt.optim.protocols.base import (
    CorrectionProtocol,
    Entries,
    Factor,
    Handles,
    Host,
)
from marsopt.rules.dtypes import working


class NextGradients(CorrectionProtocol):
    """The *next* batch's gradient at the current parameters is kept before a step
    (``update_previous_grad``), and becomes h, the reference of the next step, after it
    (``update_last_grad``).
    """

    copied = ("h",)

    def __init__(self) -> None:
        self.progress: bool  # whether h is of the batch that the next step takes
        self._start(is_fresh=False)

    def _start(self, is_fresh: bool) -> None:
        self.progress = is_fresh
        self._kept: dict[Tensor, Tensor] = {}  # pieces, by parameter
        self._is_full = False  # whether a gradient is kept
        self._is_owed = False  # whether ``update_last_grad`` has to follow a step

    @property
    def num_bytes(self) -> int:
        return sum(gradient.nbytes for gradient in self._kept.values())

    def update_previous_grad(
        self, optimizer: Host, grad_scale: float | Tensor | None
    ) -> None:
        """Copy the gradients (never alias them), scaled and clipped; zeros where there
        is none.

        Raises:
            RuntimeError: the last ones were not handed over, so that h would never
                change.
        """
        handles = optimizer.parameter_handles()
        if self._is_owed:
            raise RuntimeError(
                "got update_previous_grad() after a step whose reference gradient was "
                "not handed over, expected the protocol of exact MARS: call "
                "optimizer.update_last_grad() after every optimizer.step()"
            )
        factor = optimizer.gradient_factor(grad_scale)
        kept: dict[Tensor, Tensor] = {}
        self._is_full = False  # not before all are there
        for handle in handles:
            if "h" in handle:
                h, copy = handle["h"], self._kept.get(handle.p)
                if copy is None or (copy.shape, copy.dtype) != (h.shape, h.dtype):
                    copy = torch.empty_like(h)
                kept[handle.p] = copy
                put_scaled(copy, handle.grad, factor)
        self._kept, self._is_full = kept, True

    def before_step(self, optimizer: Host, handles: Handles) -> None:
        """Check that a step may take h, and the gradients that are there.

        Raises:
            RuntimeError: the protocol was left out, so that h is stale or zero.
        """
        if self._is_owed or not (self._is_full or self.progress):
            raise RuntimeError(
                "got step() without a reference gradient, expected the protocol of "
                "exact MARS: update_previous_grad() before step(), update_last_grad() "
                "after it, and zero_grad() before each of the two backward passes; or "
                "pass is_approx=True"
            )

    def after_step(self, optimizer: Host, handles: Handles) -> None:
        """Note that a step was taken: h is of its batch, no longer of the next."""
        self.progress, self._is_owed = False, self._is_full

    def update_last_grad(self, optimizer: Host) -> None:
        """Make the kept gradients the reference h; zeros for parameters that are new.

        Raises:
            RuntimeError: nothing was kept since the last time.
        """
        handles = optimizer.parameter_handles()
        if not self._is_full:
            raise RuntimeError(
                "got update_last_grad() with nothing kept, expected "
                "update_previous_grad() before the step: compute the next batch's "
                "gradient at the current parameters and call it"
            )
        for handle in handles:
            if "h" in handle:
                h, copy = handle["h"], self._kept.get(handle.p)
                h.zero_() if copy is None else h.copy_(copy)
        self.progress, self._is_full, self._is_owed = True, False, False

    def check_may_save(self, optimizer: Host) -> None:
        if self._is_owed:
            raise RuntimeError(
                "got a state dict, copy or pickle between step() and "
                "update_last_grad(), expected one that a run can go on from: call "
                "optimizer.update_last_grad() first"
            )

    def restart(self, optimizer: Host, handles: Handles) -> None:
        """Drop the kept gradients: the protocol begins with the next batch."""
        self._start(is_fresh=False)

    def load(self, handles: Handles, entries: Entries) -> None:
        self._start(is_fresh=True)

    handled_calls = frozenset({"update_previous_grad", "update_last_grad"})


def put_scaled(target: Tensor, g: Tensor | None, factor: Factor) -> None:
    """Write ``g`` times ``factor`` into ``target``, in one pass where dtype and layout
    are equal; zeros where there is none.
    """
    if g is None:
        target.zero_()
    elif factor is None:
        target.copy_(g)
    elif (g.dtype, g.shape) == (target.dtype, target.shape):
        torch.mul(g, factor, out=target)
    else:  # not rounded before it is scaled, and no other shape
        target.copy_(working(g) * factor)
