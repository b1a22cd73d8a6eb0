"""python -m train.compare.child MODULE ARGUMENT...: a module that ends with its parent.

A comparison that is killed must not leave runs behind that a second call would start
again in the same folders. Standard input is a pipe that the parent never writes to:
when it ends, the parent has.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGKILL)  # a run continues from its last checkpoint


def main() -> None:
    """The command."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv.pop(0)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
