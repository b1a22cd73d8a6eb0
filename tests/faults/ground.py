"""What cases begin from: data, and finished runs on one rank and on two."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.faults.cases import DONE, Case, Play, Steps, Verdict, play
from tests.forks import Command, Ended

STEPS, TOTAL = 12, 40  # of a run, and of its schedule
OLDER, NEWEST = 4, 8  # of the checkpoints of a run that was stopped
INTERVAL = 4  # of checkpoints, in steps
TINY = (
    "--config", "tiny_mars_adamw",
    "--training.seq-len", "32",
    "--training.global-batch-size", "8",
    "--training.local-batch-size", "4",
    "--lr-scheduler.warmup-steps", "2",
    "--lr-scheduler.total-steps", str(TOTAL),
    "--metrics.log-freq", "1",
    "--validator.samples", "16",
    "--validator.freq", "4",
    "--checkpoint.interval", str(INTERVAL),
)  # fmt: skip
Losses = dict[tuple[str, int], str]


def losses(out: str) -> Losses:
    """Return {(what, step): loss} of all losses that a training has printed."""
    printed = re.findall(r"step (\d+)/\d+  (loss|validation loss) (\S+)", out)
    return {(what, int(step)): value for step, what, value in printed}


@dataclass(frozen=True)
class Ground:
    """Folders that cases copy or read, and never change."""

    root: Path

    @property
    def data(self) -> Path:
        """Return token files of two modules of the standard library."""
        return self.root / "data"

    @property
    def run(self) -> Path:
        """Return a run of twelve steps with all of its checkpoints."""
        return self.root / "run"

    @property
    def stopped(self) -> Path:
        """Return that run without its last checkpoint."""
        return self.root / "stopped"

    @property
    def two(self) -> Path:
        """Return a run of eight steps on two ranks."""
        return self.root / "two"

    def train(self, folder: Path, *options: object, steps=STEPS, **kw) -> Command:
        """Return a training in ``folder``."""
        where = ("--dataloader.dataset-path", self.data, "--dump-folder", folder)
        words = (*TINY, "--training.steps", steps, *where, *options)
        return Command("train", strings(*words), **kw)


def strings(*values: object) -> tuple[str, ...]:
    """Return arguments of a command line."""
    return tuple(map(str, values))


def run_all(commands: dict[str, Command], scratch: Path) -> dict[str, Ended]:
    """Run commands that have to end well, side by side."""

    def alone(command: Command) -> Play:
        def steps(folder: Path) -> Steps:
            ended = yield command
            assert not any(ended.codes), f"{command}\n{ended.err}"
            return Verdict(DONE)

        return steps

    cases = [Case(name, 0, name, alone(command)) for name, command in commands.items()]
    return {p.case.name: p.ends[0] for p in play(iter(cases), scratch, 2)}


def make(ground: Ground, more: dict[str, Command]) -> dict[str, Ended]:
    """Make the ground, run ``more`` beside it, and return what became of all."""
    scratch = ground.root / "made"
    scratch.mkdir(parents=True)
    files = (json.__file__, re.__file__)
    options = ("--source", "text", "--tokenizer", "bytes", "--val-fraction", 0.2)
    prepared = strings(*options, "--out", ground.data, *files)
    run_all({"data": Command("train.prepare", prepared)}, scratch)
    run = ground.train(ground.run, "--checkpoint.keep-latest-k", 3)
    ends = run_all({"run": run} | more, scratch)
    linked(ground.run, ground.stopped)  # the run as it was after its eighth step
    shutil.rmtree(ground.stopped / "checkpoint" / f"step-{STEPS}")
    return ends


def linked(source: Path, target: Path) -> Path:
    """Copy a folder, checkpoints as hard links: ``rewrite`` changes those."""

    def copy(at: str, to: str) -> None:
        (os.link if at.endswith(".distcp") else shutil.copy2)(at, to)

    shutil.copytree(source, target, copy_function=copy, symlinks=True)
    return target


def rewrite(path: Path, content: bytes) -> None:
    """Give a file of a linked folder another content, and the original none."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def listing(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return what can be seen of a folder's files without reading them."""

    def seen(path: Path) -> tuple[int, int, int]:
        stat = path.lstat()
        is_file = not path.is_dir()
        return stat.st_ino, is_file * stat.st_size, is_file * stat.st_mtime_ns

    return {path: seen(path) for path in folder.rglob("*")}
