"""Processes of a study: started, watched, ended together.

python -m research.compare.children MODULE ARGUMENT... runs a module that ends with its
parent: a comparison that is killed must not leave runs behind that a second call would
start again in the same folders. Standard input is a pipe that the parent never writes
to: when it ends, the parent has.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from research.compare.study import Run

PATIENCE = 10  # seconds that a process has to end when told to


class Child(NamedTuple):
    """A run under way."""

    title: str
    run: Run
    process: subprocess.Popen
    folder: Path
    began: float


def spawn(
    module: str, args: Sequence[str], threads: int, lock: int, console: IO | None = None
) -> subprocess.Popen:
    """Start ``python -m module`` as a process that ends with this one and holds the
    lock until then; what it says goes to ``console``, None = where ours goes.

    A terminal's Ctrl-C reaches this process alone, which ends its children: a process
    inherits what is blocked here.
    """
    command = [sys.executable, "-m", "research.compare.children", module]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [*command, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=console,
            stderr=subprocess.STDOUT if console is not None else None,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            pass_fds=(lock,),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Tell all to end, then make them; of what has ended, close its pipe."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdin.close()


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGKILL)  # a run continues from its last checkpoint


def main() -> None:
    """Run the module."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv.pop(0)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
