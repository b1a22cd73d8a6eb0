"""Ctrl-C while ``python -m marsopt.profile`` is imported, of which torch takes seconds:
one line and no traceback.
"""

import os
import signal
import sys

STOPPED = "stopped before its end: run the same command again"


def _stop(number: int, frame: object) -> None:
    """End at once: an exception could be lost, or be shown, in an import."""
    os.write(2, f"{STOPPED}\n".encode())
    os._exit(128 + number)


def stop_at_once() -> None:
    """Let Ctrl-C end this process from here on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def raise_again() -> None:
    """Let Ctrl-C be a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if sys.argv[:1] == ["-m"]:  # while Python looks for a module of this package
    stop_at_once()
