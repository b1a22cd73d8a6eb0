"""What an optimizer watches: calls of two threads at once, writes that an exception
breaks off, steps that change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

# Steps from one look at the count to the next; as many in a row make a standstill.
PATIENCE = 10

P = ParamSpec("P")
R = TypeVar("R")


class Writes:
    """Notes that something is being written: ``with writes:`` stands around everything
    that changes parameters and state. What an exception has broken off in between (no
    memory left, Ctrl-C) is half of one step and half of another, and must not be taken
    for either.
    """

    def __init__(self) -> None:
        self.are_torn = False
        # the outermost call that runs: its thread and name, under "call". A dict, which
        # one thread fills at a time; no lock, which Ctrl-C could leave closed
        self.running: dict[str, tuple[int, str]] = {}
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
            RuntimeError: parameters and state are of no one step.
        """
        if self.are_torn:
            raise RuntimeError(
                f"got {what} after an exception in the midst of a step (or of eval, "
                "train, update_last_grad, load_state_dict), expected parameters and "
                "state of one and the same step: load a checkpoint of the model and of "
                "the optimizer, or build both anew"
            )

    def begin(self, what: str) -> bool:
        """Note in ``running`` that ``what`` begins; return whether it is inside of no
        other call.

        Raises:
            RuntimeError: another thread is inside of a call.
        """
        call = get_ident(), what
        outermost = self.running.setdefault("call", call)
        if outermost[0] == call[0]:
            return outermost is call
        raise RuntimeError(
            f"got {what} while another thread is in {outermost[1]} of the same "
            "optimizer, expected one call at a time: nothing has changed; call it from "
            "one thread, or hold a lock around every call"
        )


class Watched(Protocol):
    """What ``one_at_a_time`` looks at."""

    _writes: Writes


W = TypeVar("W", bound=Watched)


def one_at_a_time(
    what: str,
) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Refuse a call of a method, by the name ``what``, while another thread is in such
    a call of the same optimizer: the two would move, or save, halves of two steps.
    """

    def decorate(
        method: Callable[Concatenate[W, P], R],
    ) -> Callable[Concatenate[W, P], R]:
        @wraps(method)
        def alone(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
            writes = self._writes
            is_outermost = writes.begin(what)
            try:
                return method(self, *args, **kwargs)
            finally:
                if is_outermost:  # no call, which Ctrl-C could come before
                    del writes.running["call"]

        return alone

    return decorate


class Standstill:
    """Looks for steps in a row that change nothing. The count of skipped steps is read
    on a CPU alone: elsewhere the host would wait for the device, and ``num_skipped``
    tells.
    """

    def __init__(self) -> None:
        self._num_steps = self._num_without_gradients = 0
        self._num_skipped: int | None = None  # at the last look

    def look(
        self, skipped: Tensor, has_gradients: bool, say: Callable[[int, str], None]
    ) -> None:
        """Note that a step has ended.

        Args:
            skipped: the count, 0-D, int64.
            has_gradients: whether a parameter had one.
            say: told, with a level of logging, that the run stands still; once.
        """
        self._num_steps += 1
        self._num_without_gradients += 1
        if has_gradients:
            self._num_without_gradients = 0
        if self._num_without_gradients == PATIENCE:
            say(
                logging.WARNING,
                f"the last {PATIENCE} steps changed nothing, since no parameter had a "
                "gradient. If backward() was called, the model has other parameters "
                "now: build MARS after fully_shard, DistributedDataParallel or .to(), "
                "which may replace them",
            )
        is_free_to_read = skipped.device.type == "cpu" and not is_fake(skipped)
        if self._num_steps % PATIENCE != 1 or not is_free_to_read:
            return
        before, self._num_skipped = self._num_skipped, int(skipped)
        if before is not None and self._num_skipped - before == PATIENCE:
            say(
                logging.WARNING,
                f"the last {PATIENCE} steps changed nothing, since their gradients, or "
                "a learning rate in a tensor, hold a NaN or infinity: the run stands "
                "still. Look at the loss and its inputs, or lower the learning rate; "
                "nonfinite='raise' names the parameters, and optimizer.num_skipped "
                "counts the steps",
            )
