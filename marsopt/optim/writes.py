"""Whether parameters and state belong together."""

from __future__ import annotations


class Writes:
    """Notes that something is being written, before the first write and until after the
    last: what an exception has broken off in between (no memory left, Ctrl-C) is half
    of one step and half of another, and must not be taken for either.
    """

    def __init__(self) -> None:
        self.unfinished = False

    def begin(self) -> None:
        self.unfinished = True

    def end(self) -> None:
        self.unfinished = False

    def check(self, what: str) -> None:
        """Check, before ``what`` is done, that all writes have ended.

        Raises:
            RuntimeError: parameters and state are of no one step.
        """
        if self.unfinished:
            raise RuntimeError(
                f"got {what} after an exception in the midst of a step (or of eval, "
                "train, update_last_grad, load_state_dict), expected parameters and "
                "state of one and the same step: load a checkpoint of the model and of "
                "the optimizer, or build both anew"
            )
