"""Trains what a study still needs: some runs at once, each its own process.

python -m research.compare.session MODULE ARGUMENT... runs a module that ends with its
parent: a comparison that is killed must not leave runs behind that a second call would
start again in the same folders. Standard input is a pipe that the parent never writes
to: when it ends, the parent has.
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import mean
from textwrap import indent
from typing import IO, NamedTuple

from research.compare.store import Store, final
from research.compare.study import Run, Study
from train.errors import counted
from train.files import remove_folder

POLL = 0.3  # seconds between two looks at the processes
SAID = 6  # lines of what a failed run has printed
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
    command = [sys.executable, "-m", "research.compare.session", module]
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


@dataclass
class Session:
    """One call's share of a study.

    Args:
        study: what is to be run.
        store: of what was run.
        folder: for runs under way, and those that the setting keeps.
        titles: of the methods to be run.
        jobs: runs at once.
        threads: of each.
        minutes: after which nothing starts that would not end, and all is ended; None
            = no limit.
        lock: file descriptor that runs hold as long as they live.
        say: shows a line.
    """

    study: Study
    store: Store
    folder: Path
    titles: Sequence[str]
    _: KW_ONLY
    jobs: int
    threads: int
    minutes: float | None
    lock: int
    say: Callable[[str], None]
    failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._running: list[Child] = []
        self._began = time.monotonic()

    def train(self) -> bool:
        """Train until nothing is left, an interrupt or the time ends all children;
        return whether every run is there.
        """
        self.say(self._outlook())
        try:
            while self._start() or self._running:
                time.sleep(POLL)
                self._collect()
                if self._left() <= 0:
                    self.say("the time is over: the same command goes on")
                    break
        finally:
            end([child.process for child in self._running])
        return not self._num_left()

    def _left(self) -> float:
        """Return the seconds that are left."""
        if self.minutes is None:
            return float("inf")
        return 60 * self.minutes - (time.monotonic() - self._began)

    def _fits(self, title: str) -> bool:
        """Return whether a run of a method would end in time, as far as is known."""
        return self.minutes is None or self._seconds(title) < self._left()

    def _start(self) -> bool:
        """Fill the free places; return whether anything was started."""
        busy = {child.run.key for child in self._running} | self.failed
        started = False
        for title in self.titles:
            for run in self.study.wanted(title, self.store.losses):
                if len(self._running) >= self.jobs:
                    return started
                if run.key in busy or not self._fits(title):
                    continue
                busy.add(run.key)
                started = True
                self._child(title, run)
        return started

    def _child(self, title: str, run: Run) -> None:
        """Start a process that trains a run, from its last checkpoint on, unless it was
        trained to its end by a call that did not live to see it.
        """
        folder = self.place(title, run)
        if (found := self.study.setting.found(folder)) is not None:
            self._keep(title, run, folder, found)
            return
        folder.mkdir(parents=True, exist_ok=True)
        module, arguments = self.study.setting.command(run, folder)
        with (folder / "console.txt").open("ab") as file:
            process = spawn(module, arguments, self.threads, self.lock, file)
        self._running.append(Child(title, run, process, folder, time.monotonic()))

    def _collect(self) -> None:
        """Take in what has ended."""
        for child in [c for c in self._running if c.process.poll() is not None]:
            self._running.remove(child)
            end([child.process])
            found = self.study.setting.found(child.folder)
            if found is not None:  # what fails after the last validation costs nothing
                found["wall"] = round(time.monotonic() - child.began, 1)
                self._keep(child.title, child.run, child.folder, found)
                continue
            self.failed.add(child.run.key)
            console = child.folder / "console.txt"
            said = console.read_text(errors="replace").splitlines()
            self.say(
                f"{self._named(child.title, child.run)}: FAILED (exit code "
                f"{child.process.returncode}), tried again by the next call; the end "
                f"of {console}:\n" + indent("\n".join(said[-SAID:]), "    ")
            )

    def _keep(self, title: str, run: Run, folder: Path, found: dict) -> None:
        self.store.add(run, found)
        if not self.study.setting.keeps:
            remove_folder(folder)
            with suppress(OSError):  # what others run is there
                folder.parent.rmdir()
                self.folder.rmdir()
        loss = final(self.store.lines[run.key])
        self.say(f"{self._named(title, run)}: {loss:.4f}. {self._outlook()}")

    def _seconds(self, title: str) -> float:
        """Return what runs of a method took in the mean, else those of all; 0 before
        the first.
        """
        method = self.study.methods[title]
        axes, fixed = {axis.name for axis in method.axes}, dict(method.recipe)
        timed = [line for line in self.store.lines.values() if "wall" in line]
        mine = [
            line
            for line in timed
            if {k: v for k, v in line["recipe"].items() if k not in axes} == fixed
        ]
        walls = [line["wall"] for line in mine or timed]
        return mean(walls) if walls else 0.0

    def _num_left(self) -> int:
        losses = self.store.losses
        return sum(self.study.num_left(title, losses) for title in self.titles)

    def _outlook(self) -> str:
        """Say how many runs are left, and how long they take."""
        left = {t: self.study.num_left(t, self.store.losses) for t in self.titles}
        seconds = sum(n * self._seconds(t) for t, n in left.items()) / self.jobs
        outlook = f"{counted(sum(left.values()), 'run')} left"
        rest = timedelta(seconds=round(seconds))
        return f"{outlook}, about {rest}" if seconds else outlook

    def _values(self, title: str, run: Run) -> list[str]:
        axes = self.study.methods[title].axes
        values = [f"{axis.name} {run.recipe[axis.name]:.5g}" for axis in axes]
        return [*values, f"seed {run.seed}"]

    def _named(self, title: str, run: Run) -> str:
        return f"{title} ({', '.join(self._values(title, run))})"

    def place(self, title: str, run: Run) -> Path:
        """Return where a run lies: for people to find it, and no other's."""
        own = hashlib.sha256(run.key.encode()).hexdigest()[:6]
        names = [title, " ".join([*self._values(title, run), own])]
        return self.folder.joinpath(*(re.sub(r"[^\w.]+", "-", n) for n in names))


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
