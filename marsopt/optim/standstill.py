"""Whether a run stands still: every step of late was skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

# Steps from one look at the count to the next; as many in a row make a standstill.
PATIENCE = 10
FREE_TO_READ = ("cpu",)  # where the host reads without waiting for a device
UNDER_WAY = -1  # in place of a count that has not arrived


class Standstill:
    """Looks at the count of skipped steps from time to time, and never waits for it.

    A GPU sends it into pinned memory, where it is read some steps later. Nobody looks
    while a CUDA graph is captured or replayed, under a TorchDispatchMode (for one,
    FakeTensorMode), or on other devices: there ``num_skipped`` alone tells.
    """

    def __init__(self) -> None:
        self._num_steps, self._told = 0, False
        self._seen: tuple[int, int] | None = None  # steps, and skipped of them
        self._sent: Tensor | None = None  # pinned
        self._sent_after = 0  # so many steps

    def look(self, skipped: Tensor, say: Callable[[int, str], None]) -> None:
        """Note that a step has ended.

        Args:
            skipped: the count, 0-D, int64.
            say: told, with a level of logging, that the run stands still; once.
        """
        self._num_steps += 1
        if self._told or self._num_steps % PATIENCE != 1 or not _may_read(skipped):
            return
        if skipped.device.type in FREE_TO_READ:
            self._note(self._num_steps, int(skipped), say)
            return
        if self._sent is None:
            own = dict(dtype=skipped.dtype, device="cpu", pin_memory=skipped.is_cuda)
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
                f"the last {passed} steps changed nothing, since their gradients hold "
                "a NaN or infinity: the run stands still. Look at the loss and its "
                "inputs, or lower the learning rate; nonfinite='raise' names the "
                "parameters, and optimizer.num_skipped counts the steps",
            )


def _may_read(skipped: Tensor) -> bool:
    if skipped.device.type not in (*FREE_TO_READ, "cpu", "cuda"):
        return False
    capturing = skipped.is_cuda and torch.cuda.is_current_stream_capturing()
    return not capturing and not torch._C._len_torch_dispatch_stack()
