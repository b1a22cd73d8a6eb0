"""Which gradients are there, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

PATTERNS = 64  # that are kept: as a mixture of experts meets them, they have no end


class Live:
    """Flags of the parts whose gradients are there. A pattern is sent to the device
    when it is first seen, and kept there: later steps with it copy nothing, so that a
    CUDA graph may capture them.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[bool, ...], Tensor] = {}

    def on(self, device: torch.device, live: list[bool]) -> Tensor:
        """Return ``live`` as a bool tensor (N,) on ``device``.

        Raises:
            RuntimeError: a CUDA graph captures the step, and no step before it had this
                pattern.
        """
        pattern = tuple(live)
        found = self._sent.get(pattern)
        if found is not None:
            return found
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"got a step to capture that lacks {len(live) - sum(live)} gradients, "
                "as no step before it did, expected one that lacks the same as a step "
                "before: take one with these gradients before the capture"
            )
        found = torch.tensor(live).to(device, non_blocking=True)
        if len(self._sent) < PATTERNS:  # what a graph has captured stays where it is
            self._sent[pattern] = found
        return found
