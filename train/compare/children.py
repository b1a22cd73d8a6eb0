"""Processes of a comparison: started, watched, ended together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from train.compare.sweep import Run

PATIENCE = 10  # seconds that a process has to end when told to


@dataclass
class Child:
    """A running training."""

    run: Run
    process: subprocess.Popen
    console: Path
    began: float
    """By the session's clock, in seconds at work."""
    resumed: bool
    shown: int
    """The last step whose validation loss has been shown."""

    def last_lines(self, count: int = 6) -> str:
        """The end of what it said."""
        lines = self.console.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-count:])


def spawn(
    module: str,
    arguments: Sequence[str],
    threads: int,
    lock: int,
    console: IO | None = None,
) -> subprocess.Popen:
    """``python -m module`` as a process that ends with this one and holds the lock
    until then; what it says goes to ``console``, None = where ours goes.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "train.compare.child", module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=console,
        stderr=subprocess.STDOUT if console is not None else None,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        pass_fds=(lock,),
    )


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Tell all to end, then make them."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
