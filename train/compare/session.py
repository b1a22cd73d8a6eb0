"""Trains what a study still needs: some runs at once, each its own process."""

import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from textwrap import indent

from train.compare import curves, sweep
from train.compare.children import Child, end, spawn
from train.compare.study import Study
from train.compare.sweep import Run

POLL = 0.5  # seconds between two looks at the processes
LOOK = 5.0  # seconds between two looks at their losses


@dataclass
class Session:
    """One call's share of a comparison."""

    study: Study
    folder: Path
    _: KW_ONLY
    jobs: int  # runs at once
    lock: int  # file descriptor that runs hold as long as they live
    say: Callable[[str], None]  # shows a line

    def __post_init__(self) -> None:
        study, self.failed = self.study, set[Run]()
        self.sweeps = study.sweeps.values()
        found = curves.load_all(self.folder / "runs", study.steps, self.sweeps)
        self.losses = {run: curve.score for run, curve in found.items()}
        self.running: list[Child] = []
        self.clock = 0.0  # seconds at work: time spent stopped does not count
        self.took: dict[str, list[float]] = {}

    def train(self) -> None:
        """Train until nothing is left; an interrupt ends all children."""
        self.say(self._outlook())
        last, looked = time.monotonic(), 0.0
        try:
            while self._start() or self.running:
                time.sleep(POLL)
                now = time.monotonic()
                self.clock += min(now - last, 4 * POLL)
                last = now
                if self.clock - looked > LOOK:
                    looked = self.clock
                    for child in self.running:
                        self._show(child)
                self._collect()
        finally:
            end([child.process for child in self.running])

    def _start(self) -> bool:
        """Fill the free places; return whether anything was started."""
        if len(self.running) >= self.jobs:
            return False
        busy = {child.run for child in self.running}
        runs = sweep.next_runs(self.sweeps, *self._state())
        ready = [run for run in runs if run not in busy]
        chosen = ready[: self.jobs - len(self.running)]
        for run in chosen:
            self.running.append(self._child(run))
        return bool(chosen)

    def _state(self) -> tuple:
        return self.study.num_seeds, self.losses, self.failed

    def _child(self, run: Run) -> Child:
        """Start a process that trains ``run``, from its last checkpoint on."""
        folder = self.folder / "runs" / run.path
        if curves.discard_incomplete(folder, self.study.steps):
            self.say(f"{run}: was killed at its very end, goes back a checkpoint")
        folder.mkdir(parents=True, exist_ok=True)
        console, known = folder / "console.txt", curves.validations(folder)
        options = self.study.arguments(run, self.folder)
        with console.open("a") as file:
            process = spawn("train", options, self.study.threads, self.lock, file)
        self.say(f"{run}: {'continues' if known else 'starts'}")
        known_step = max(known, default=0)
        return Child(run, process, console, self.clock, bool(known), known_step)

    def _show(self, child: Child) -> None:
        """Show the newest validation loss, if one came since the last look."""
        points = curves.validations(self.folder / "runs" / child.run.path)
        step = max(points, default=0)
        if step > child.shown:
            child.shown = step
            self.say(
                f"{child.run}: step {step}/{self.study.steps}, validation loss "
                f"{points[step]:.4f}"
            )

    def _collect(self) -> None:
        """Take in what has ended."""
        for child in [c for c in self.running if c.process.poll() is not None]:
            self.running.remove(child)
            self._show(child)
            run, folder = child.run, self.folder / "runs" / child.run.path
            curve = curves.load(folder, self.study.steps)
            if curve is None:  # what fails after the last validation costs nothing
                self.failed.add(run)
                said = child.console.read_text(errors="replace").splitlines()
                self.say(
                    f"{run}: FAILED (exit code {child.process.returncode}), tried "
                    f"again by the next call; the end of {child.console}:\n"
                    + indent("\n".join(said[-6:]), "    ")
                )
                continue
            curves.keep_last_checkpoint(folder)
            self.losses[run] = curve.score
            seconds = self.clock - child.began
            if not child.resumed:
                self.took.setdefault(self.study.recipe_of(run).name, []).append(seconds)
            self.say(
                f"{run}: done in {timedelta(seconds=round(seconds))}, validation loss "
                f"{curve.final:.4f}. {self._outlook()}"
            )

    def _seconds(self, name: str) -> float:
        """Return what its runs took, else those of all; nan before the first."""
        times = self.took.get(name) or list(chain.from_iterable(self.took.values()))
        return sum(times) / len(times) if times else math.nan

    def _outlook(self) -> str:
        """Say how many of how many are done, and how long the rest takes."""
        state = self._state()
        to_come = {s.config: sweep.num_to_come(s, *state) for s in self.sweeps}
        done, left = len(self.losses), sum(to_come.values())
        seconds = sum(n * self._seconds(name) for name, n in to_come.items() if n)
        seconds -= sum(self.clock - child.began for child in self.running)
        outlook = f"{done} of {done + left} runs done (more where a sweep goes on)"
        if math.isnan(seconds):
            return outlook
        rest = timedelta(seconds=round(max(0.0, seconds) / self.jobs))
        return f"{outlook}, about {rest} left"
