"""What cases begin from: data, finished runs, an exported folder, unfinished work."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train.campaign.children import Case, Command, Running, Steps, play
from train.campaign.law import DONE, Ended, Verdict

SEQ, STEPS, TOTAL = 32, 12, 40
OLDER, NEWEST = 4, 8  # of the checkpoints of a run that was stopped
TINY = (
    "--config", "tiny_mars_adamw",
    "--training.seq-len", str(SEQ),
    "--training.global-batch-size", "8",
    "--training.local-batch-size", "4",
    "--lr-scheduler.warmup-steps", "2",
    "--metrics.log-freq", "1",
    "--validator.samples", "16",
    "--validator.freq", "4",
    "--checkpoint.interval", "4",
)  # fmt: skip
CORRECTIONS = {
    "approximate": (),
    "exact": ("--optimizer.correction", "exact"),
    "transport": (
        *("--optimizer.correction", "transport", "--optimizer.gamma", "0.1"),
        *("--optimizer.gamma-1d", "0.2", "--optimizer.gamma-decay", "with_lr"),
    ),
}


def losses(out: str) -> dict[tuple[str, int], str]:
    """Return {(what, step): loss} of all losses that a training has printed."""
    found = re.findall(r"step (\d+)/\d+  (loss|validation loss) (\S+)", out)
    return {(what, int(step)): value for step, what, value in found}


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
    def exported(self) -> Path:
        """Return its step 8 as a Hugging Face folder, with its checkpoint."""
        return self.root / "exported"

    @property
    def weights(self) -> Path:
        """Return what import_hf made of it."""
        return self.root / "weights"

    @property
    def texts(self) -> Path:
        """Return a data set of the hub's format, JSON lines."""
        return self.root / "texts"

    @property
    def unfinished(self) -> Path:
        """Return the work on it that was killed."""
        return self.root / ".tokens.unfinished"

    @property
    def found(self) -> Path:
        """Return somebody else's tokens: shards of llm.c."""
        return self.root / "found"

    def train(self, folder: Path, *options: object, steps=STEPS, **kw) -> Command:
        """Return a training in ``folder``."""
        where = ("--dataloader.dataset-path", self.data, "--dump-folder", folder)
        length = ("--training.steps", steps, "--lr-scheduler.total-steps", TOTAL)
        return Command("train", strings(*TINY, *length, *where, *options), **kw)

    def prepare_texts(self, texts: Path, out: Path, **kw) -> Command:
        """Return what makes token files of a data set."""
        options = ("--source", "fineweb-edu", "--tokenizer", "bytes", "--out", out)
        options += ("--shard-tokens", 2000, "--dataset", texts)
        return Command("train.prepare", strings(*options), **kw)


def strings(*values: object) -> tuple[str, ...]:
    """Return arguments of a command line."""
    return tuple(map(str, values))


def _finished(commands: Sequence[Command]) -> Callable[[Path], Steps]:
    """Return a case that consists of commands that have to end well."""

    def steps(folder: Path) -> Steps:
        for command in commands:
            ended = yield command
            assert ended.codes == [0] * command.ranks, f"{command}\n{ended.err}"
        return Verdict(DONE)

    return steps


def run_all(
    commands: dict[str, list[Command]], scratch: Path
) -> dict[str, list[Ended]]:
    """Run lists of commands that have to end well, side by side."""
    cases = [
        Case(name, 0, name, _finished(listed)) for name, listed in commands.items()
    ]
    return {case.name: ends for case, _, _, ends in play(iter(cases), scratch, 2)}


def make(root: Path, with_files: bool, more: Callable) -> tuple[Ground, dict]:
    """Make the ground in ``root``; ``with_files``: also what files are taken from.
    Beside it run the commands of ``more(ground)``, and return what became of them.
    """
    ground = Ground(root)
    root.mkdir()
    texts = [Path(json.__file__), Path(re.__file__)]
    options = ("--source", "text", "--tokenizer", "bytes", "--val-fraction", 0.2)
    prepared = strings(*options, "--out", ground.data, *texts)
    run_all({"data": [Command("train.prepare", prepared)]}, root / "made")
    commands = {"run": [ground.train(ground.run, "--checkpoint.keep-latest-k", 3)]}
    if with_files:
        _write_texts(ground.texts)
        _write_shards(ground.found)
        words = strings("--run", ground.run, "--step", NEWEST, "--training-state")
        weights = strings("--model", ground.exported, "--out", ground.weights)
        commands["run"] += [
            Command("train.export", (*words, "--out", str(ground.exported))),
            Command("train.import_hf", weights),
        ]
    ends = run_all(commands | more(ground), root / "made")
    # the run as it was after its eighth step
    linked(ground.run, ground.stopped)
    shutil.rmtree(ground.stopped / "checkpoint" / f"step-{STEPS}")
    if with_files:
        _leave_unfinished(ground)
    return ground, ends


def _write_texts(folder: Path) -> None:
    folder.mkdir()
    lines = Path(re.__file__).read_text().splitlines() * 40
    with (folder / "train.jsonl").open("w") as file:
        for line in lines:
            file.write(json.dumps({"text": line}) + "\n")


def _write_shards(folder: Path) -> None:
    folder.mkdir()
    for split in ("train", "val"):
        head = np.zeros(256, dtype="<i4")
        tokens = np.arange(4000, dtype="<u2") % 50000
        head[:3] = 20240520, 1, len(tokens)
        path = folder / f"tokens_{split}_000000.bin"
        path.write_bytes(head.tobytes() + tokens.tobytes())


def _leave_unfinished(ground: Ground) -> None:
    """Kill a tokenising process once it has written a few shards."""
    ledger = ground.unfinished / "ledger.json"

    def kill(running: Running) -> None:
        if ledger.exists() and len(json.loads(ledger.read_text())["shards"]) > 2:
            running.kill(signal.SIGKILL)

    def steps(folder: Path) -> Steps:
        command = ground.prepare_texts(ground.texts, ground.root / "tokens", watch=kill)
        ended = yield command
        assert ended.code == -signal.SIGKILL, f"{command}\n{ended.err}"
        return Verdict(DONE)

    for _ in play(iter([Case("unfinished", 0, "", steps)]), ground.root / "made", 1):
        pass


LARGE = (".distcp", ".safetensors")  # files that no command writes to in place


def linked(source: Path, target: Path) -> Path:
    """Copy a folder, large files as hard links: ``rewrite`` changes those."""

    def copy(at: str, to: str) -> None:
        (os.link if at.endswith(LARGE) else shutil.copy2)(at, to)

    shutil.copytree(source, target, copy_function=copy, symlinks=True)
    return target


def rewrite(path: Path, content: bytes) -> None:
    """Give a file of a linked folder another content, and the original none."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return what can be seen of a folder's files without reading them."""

    def each() -> Iterator[tuple[str, tuple[int, int, int]]]:
        for path in sorted(folder.rglob("*")):
            stat = path.lstat()
            size = 0 if path.is_dir() else stat.st_size
            yield (
                str(path.relative_to(folder)),
                (stat.st_ino, size, 0 if path.is_dir() else stat.st_mtime_ns),
            )

    return dict(each())
