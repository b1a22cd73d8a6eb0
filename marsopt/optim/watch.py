"""Torn writes: an exception that breaks off a write is found by the next call."""

from __future__ import annotations

import torch


class Writes:
    """Record torn writes: ``with writes:`` encloses all code that changes parameters
    and state. After an exception inside it (no memory left, Ctrl-C) parameters and
    state mix two steps, and ``check`` refuses to go on.
    """

    def __init__(self) -> None:
        self.are_torn = False
        self._probe = torch.zeros(())

    def __enter__(self) -> None:
        self.are_torn = True

    def __exit__(self, error: type | None, *_: object) -> None:
        torch.clear_autocast_cache()  # it keeps casts of what parameters were
        self.are_torn = error is not None  # last: a call broken off here is no step

    def check_may_write(self, what: str) -> None:
        """Check, before ``what`` writes, that writes are possible and last.

        Raises:
            RuntimeError: inside of a transform or mode that forbids or records them.
        """
        reason = "in torch.jit.trace" if torch.jit.is_tracing() else ""
        try:
            self._probe.zero_()
        except (RuntimeError, AssertionError):
            reason = "inside of torch.func.grad or another transform, or a mode"
        if reason:
            raise RuntimeError(
                f"got {what} {reason}, expected it where tensors from outside may be "
                "written: nothing has changed; call it before (transport: "
                "optimizer.eval() or optimizer.train() before a transform or trace of "
                "the model)"
            )

    def check(self, what: str) -> None:
        """Check, before ``what`` is done, that all writes have ended.

        Raises:
            RuntimeError: parameters and state mix two steps.
        """
        if self.are_torn:
            raise RuntimeError(
                f"got {what} after an exception in the midst of a step (or of eval, "
                "train, update_last_grad, load_state_dict), expected parameters and "
                "state of one and the same step: load a checkpoint of the model and of "
                "the optimizer, or build both again"
            )
