"""Trains what a plan still needs: some runs at once, each its own process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from train.compare import curves, sweep
from train.compare.children import Child, end, spawn
from train.compare.plan import Plan
from train.compare.sweep import Run

POLL = 0.5  # seconds between two looks at the processes
LOOK = 5.0  # seconds between two looks at their losses


class Session:
    """One call's share of a comparison.

    Args:
        plan: what to train.
        folder: of the comparison.
        jobs: runs at once.
        lock: file descriptor that runs hold as long as they live.
        guess: seconds of one run of a recipe, before any has been timed.
        say: shows a line.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        jobs: int,
        lock: int,
        guess: Callable[[str], float],
        say: Callable[[str], None],
    ) -> None:
        self.plan, self.folder, self.jobs, self.lock = plan, folder, jobs, lock
        self.guess, self.say = guess, say
        found = curves.load_all(folder / "runs", plan.steps, list(plan.grids))
        self.losses = {run: curve.score for run, curve in found.items()}
        self.failed: set[Run] = set()
        self.running: list[Child] = []
        self.clock = 0.0  # seconds at work: time spent stopped does not count
        self.took: dict[str, list[float]] = {}
        self.guessed = self.spent = 0.0

    def train(self) -> None:
        """Until nothing is left to start, or an interrupt, which ends all children."""
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
        """Fill the free places; whether anything was started."""
        busy = {child.run for child in self.running}
        ready = [run for run in self._next() if run not in busy]
        chosen = ready[: self.jobs - len(self.running)]
        for run in chosen:
            self.running.append(self._child(run))
        return bool(chosen)

    def _child(self, run: Run) -> Child:
        """A process that trains ``run``, from its last checkpoint if it has one."""
        folder = self.folder / "runs" / run.path
        if curves.discard_incomplete(folder, self.plan.steps):
            self.say(f"{run}: was killed at its very end, goes back a checkpoint")
        folder.mkdir(parents=True, exist_ok=True)
        console, known = folder / "console.txt", curves.validations(folder)
        options = self.plan.arguments(run, self.folder)
        with console.open("a") as file:
            process = spawn("train", options, self.plan.threads, self.lock, file)
        self.say(f"{run}: {'continues' if known else 'starts'}")
        return Child(
            run,
            process,
            console,
            began=self.clock,
            resumed=bool(known),
            shown=max(known, default=0),
        )

    def _next(self) -> list[Run]:
        return sweep.next_runs(
            self.plan.grids, self.plan.num_seeds, self.losses, self.failed
        )

    def _show(self, child: Child) -> None:
        """The newest validation loss, if one came since the last look."""
        points = curves.validations(self.folder / "runs" / child.run.path)
        step = max(points, default=0)
        if step > child.shown:
            child.shown = step
            self.say(
                f"{child.run}: step {step}/{self.plan.steps}, validation loss "
                f"{points[step]:.4f}"
            )

    def _collect(self) -> None:
        """Take in what has ended."""
        for child in [c for c in self.running if c.process.poll() is not None]:
            self.running.remove(child)
            self._show(child)
            run, folder = child.run, self.folder / "runs" / child.run.path
            curve = curves.load(folder, self.plan.steps)
            if curve is None:  # what fails after the last validation costs nothing
                self.failed.add(run)
                self.say(
                    f"{run}: FAILED (exit code {child.process.returncode}), tried "
                    f"again by the next call; the end of {child.console}:\n"
                    f"{child.last_lines()}"
                )
                continue
            curves.keep_last_checkpoint(folder)
            self.losses[run] = curve.score
            seconds = self.clock - child.began
            if not child.resumed:
                self._time(run.config, seconds)
            self.say(
                f"{run}: done in {timedelta(seconds=round(seconds))}, validation loss "
                f"{curve.final:.4f}. {self._outlook()}"
            )

    def _time(self, config: str, seconds: float) -> None:
        self.took.setdefault(config, []).append(seconds)
        self.guessed += self.guess(config)
        self.spent += seconds

    def _seconds(self, config: str) -> float:
        """What one run of this recipe takes, as far as is known."""
        if times := self.took.get(config):
            return sum(times) / len(times)
        return self.guess(config) * (self.spent / self.guessed if self.guessed else 1.0)

    def _outlook(self) -> str:
        """How many of how many, and how long the rest takes."""
        to_come = sweep.num_to_come(
            self.plan.grids, self.plan.num_seeds, self.losses, self.failed
        )
        done, left = len(self.losses), sum(to_come.values())
        seconds = sum(n * self._seconds(name) for name, n in to_come.items() if n)
        seconds -= sum(self.clock - child.began for child in self.running)
        outlook = f"{done} of {done + left} runs done (more where a grid widens)"
        if math.isnan(seconds):
            return outlook
        rest = timedelta(seconds=round(max(0.0, seconds) / self.jobs))
        return f"{outlook}, about {rest} left"
