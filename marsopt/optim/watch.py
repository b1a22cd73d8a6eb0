"""What an optimizer watches: calls of two threads at once, writes that an exception
breaks off, steps that change nothing, whether anybody asks for what is trained, the
modes of the model that it trains.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

# Steps from one look at the count to the next; as many in a row make a standstill.
PATIENCE = 10
FREE_TO_READ = ("cpu",)  # where the host reads without waiting for a device
UNDER_WAY = -1  # in place of a count that has not arrived
REMIND_AFTER = 100  # steps ahead of what is trained, which nobody has asked for

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

    def __enter__(self) -> None:
        self.are_torn = True

    def __exit__(self, error: type | None, *_: object) -> None:
        self.are_torn = error is not None

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


class Reminder:
    """Counts the steps of an optimizer whose parameters are ahead of what is trained,
    until somebody asks for that.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._num_steps = 0

    def look(self, correction: str, say: Callable[[int, str], None]) -> None:
        """Note that a step has ended.

        Args:
            correction: its name.
            say: told, with a level of logging, that nobody has asked; once.
        """
        self._num_steps += 1
        if self._num_steps == REMIND_AFTER and not self.is_asked:
            say(
                logging.WARNING,
                f"{REMIND_AFTER} steps with correction={correction!r}, and neither "
                "follow, eval nor iterates was called: the model's parameters are the "
                "points where gradients are taken, ahead of what is trained. Evaluated "
                "or saved as they are, they lose what the correction gains: call "
                "optimizer.follow(model) once, or optimizer.eval() before and "
                "optimizer.train() after",
            )


class Standstill:
    """Looks at the count of skipped steps from time to time, and never waits for it.

    A GPU sends it into pinned memory, where it is read some steps later. Nobody looks
    while a CUDA graph is captured or replayed, under a TorchDispatchMode (for one,
    FakeTensorMode), or on other devices: there ``num_skipped`` alone tells.
    """

    def __init__(self) -> None:
        self._num_steps, self._told = 0, False
        self._num_idle = 0  # steps in a row without any gradient
        self._seen: tuple[int, int] | None = None  # steps, and skipped of them
        self._sent: Tensor | None = None  # pinned
        self._sent_after = 0  # so many steps

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
        self._num_idle = 0 if has_gradients else self._num_idle + 1
        if self._num_idle == PATIENCE:
            say(
                logging.WARNING,
                f"the last {PATIENCE} steps changed nothing, since no parameter had a "
                "gradient. If the model trains, its parameters are others: build MARS "
                "after fully_shard, DistributedDataParallel or .to() has exchanged "
                "them",
            )
        if self._told or self._num_steps % PATIENCE != 1 or not _may_read(skipped):
            return
        if skipped.device.type in FREE_TO_READ:
            self._note(self._num_steps, int(skipped), say)
            return
        if self._sent is None:
            own: dict[str, Any] = dict(
                dtype=skipped.dtype, device="cpu", pin_memory=skipped.is_cuda
            )
            self._sent = torch.zeros((), **own)
        elif int(self._sent) == UNDER_WAY:
            return
        else:
            self._note(self._sent_after, int(self._sent), say)
        self._sent.fill_(UNDER_WAY)
        self._sent.copy_(skipped, non_blocking=True)
        self._sent_after = self._num_steps

    def _note(
        self, num_steps: int, num_skipped: int, say: Callable[[int, str], None]
    ) -> None:
        before, self._seen = self._seen, (num_steps, num_skipped)
        if before is None:
            return
        passed = num_steps - before[0]
        if num_skipped - before[1] == passed:
            self._told = True
            say(
                logging.WARNING,
                f"the last {passed} steps changed nothing, since their gradients, or a "
                "learning rate in a tensor, hold a NaN or infinity: the run stands "
                "still. Look at the loss and its inputs, or lower the learning rate; "
                "nonfinite='raise' names the parameters, and optimizer.num_skipped "
                "counts the steps",
            )


def _may_read(skipped: Tensor) -> bool:
    if skipped.device.type not in (*FREE_TO_READ, "cpu", "cuda"):
        return False
    capturing = skipped.is_cuda and torch.cuda.is_current_stream_capturing()
    return not capturing and not torch._C._len_torch_dispatch_stack()


# ---- a model's modes -----------------------------------------------------------------


class Modes(Protocol):
    """An optimizer whose parameters are, or are not, what is trained."""

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def lend(self) -> None:
        """As ``eval``, until the next forward pass of training or the next step."""

    def is_in(self, train: bool) -> bool:
        """Return whether it is in this mode, and has lent nothing."""


class FollowMode:
    """A forward pre-hook: what is trained for a module in eval mode, else the points
    ahead of it. It does not keep the optimizer alive, and that of a copied or pickled
    model is nobody's.
    """

    def __init__(self, optimizer: Modes | None = None) -> None:
        self._found = None if optimizer is None else weakref.ref(optimizer)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()

    def __call__(self, module: nn.Module, *_: object) -> None:
        optimizer = None if self._found is None else self._found()
        if optimizer is not None and not optimizer.is_in(module.training):
            self._switch(optimizer, module.training)

    # in place of a graph that writes parameters
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _switch(self, optimizer: Modes, train: bool) -> None:
        optimizer.train() if train else optimizer.eval()


class LendIterates(FollowMode):
    """A pre-hook of ``state_dict``, which then holds what is trained in any mode."""

    def __call__(self, *_: object) -> None:
        optimizer = None if self._found is None else self._found()
        if optimizer is not None:
            optimizer.lend()


def follow(optimizer: Modes, model: nn.Module) -> None:
    """Let ``optimizer`` follow the modes of ``model``, and be followed by its state
    dicts and those of its parts.
    """
    # before FSDP gathers the parameters
    model.register_forward_pre_hook(FollowMode(optimizer), prepend=True)
    for module in model.modules():
        module.register_state_dict_pre_hook(LendIterates(optimizer))
