"""Exact MARS in the class: two gradients of every batch, by the authors' protocol."""

from __future__ import annotations

import torch
from torch import Tensor

from marsopt.optim.binding import Binding
from marsopt.rules.numerics import working

Factor = Tensor | float | None  # scales a gradient; None = 1


class NextGradients:
    """The gradients of the next batch at the current parameters: ``keep`` copies them
    before a step (``MARS.update_previous_grad``), and ``hand_over`` makes them h, the
    reference of the next step, after it (``MARS.update_last_grad``).

    Args:
        is_used: whether the caller hands over h (``Correction.h_from``). If not, the
            two calls do nothing.
    """

    def __init__(self, is_used: bool) -> None:
        self.is_used = is_used
        self.restart(is_fresh=False)

    def restart(self, is_fresh: bool) -> None:
        """Drop the kept gradients; ``is_fresh``: h is of the batch that the next step
        takes, as after a load.
        """
        self.is_fresh = is_fresh
        self._kept: dict[Tensor, Tensor] = {}  # pieces, by parameter
        self._is_full = False  # whether gradients are kept
        self._is_owed = False  # whether ``hand_over`` has to follow a step

    @property
    def num_bytes(self) -> int:
        """Return how many are held beside ``optimizer.state``."""
        return sum(gradient.nbytes for gradient in self._kept.values())

    def check_may_keep(self) -> None:
        """Check that the last gradients were handed over: else h would never change.

        Raises:
            RuntimeError: they were not.
        """
        if self._is_owed:
            raise RuntimeError(
                "got update_previous_grad() after a step whose reference gradient was "
                "not handed over, expected the protocol of exact MARS: call "
                "optimizer.update_last_grad() after every optimizer.step()"
            )

    def keep(self, binding: Binding, factor: Factor) -> None:
        """Copy the gradients (never alias them), times ``factor``; zeros for missing
        ones.
        """
        copies: dict[Tensor, Tensor] = {}
        self._is_full = False  # not before all are there
        for p, h in binding.references():
            copy = self._kept.get(p)
            if copy is None or (copy.shape, copy.dtype) != (h.shape, h.dtype):
                copy = torch.empty_like(h)
            copies[p] = copy
            g = None if p.grad is None else binding.collectives.local(p.grad, p)
            put_scaled(copy, g, factor)
        self._kept, self._is_full = copies, True

    def check_may_step(self) -> None:
        """Check that a step may take h, and the gradients that are there.

        Raises:
            RuntimeError: the protocol was left out, so that h is stale or zero.
        """
        if self._is_owed or not (self._is_full or self.is_fresh):
            raise RuntimeError(
                "got step() without a reference gradient, expected the protocol of "
                "exact MARS: update_previous_grad() before step(), update_last_grad() "
                "after it, and zero_grad() before each of the two backward passes; or "
                "pass is_approx=True"
            )

    def note_step(self) -> None:
        """Note that a step was taken: h is of its batch, no longer of the next."""
        self.is_fresh, self._is_owed = False, self._is_full

    def check_may_hand_over(self) -> None:
        """Check that gradients were kept since the last time.

        Raises:
            RuntimeError: they were not.
        """
        if not self._is_full:
            raise RuntimeError(
                "got update_last_grad() with nothing kept, expected "
                "update_previous_grad() before the step: compute the next batch's "
                "gradient at the current parameters and call it"
            )

    def hand_over(self, binding: Binding) -> None:
        """Write the kept gradients into h; zeros for parameters that are new."""
        for p, h in binding.references():
            copy = self._kept.get(p)
            h.zero_() if copy is None else h.copy_(copy)
        self.is_fresh, self._is_full, self._is_owed = True, False, False

    def check_may_save(self) -> None:
        """Check that a run can go on from a checkpoint or copy that is made now.

        Raises:
            RuntimeError: h has not been handed over since the step.
        """
        if self._is_owed:
            raise RuntimeError(
                "got a state dict, copy or pickle between step() and "
                "update_last_grad(), expected one that a run can go on from: call "
                "optimizer.update_last_grad() first"
            )


def put_scaled(target: Tensor, g: Tensor | None, factor: Factor) -> None:
    """Write ``g`` times ``factor`` into ``target``, in one pass if dtype and layout are
    equal; zeros if g is None.
    """
    if g is None:
        target.zero_()
    elif factor is None:
        target.copy_(g)
    elif (g.dtype, g.shape) == (target.dtype, target.shape):
        torch.mul(g, factor, out=target)
    else:  # not rounded before it is scaled, and no other shape
        target.copy_(working(g) * factor)
