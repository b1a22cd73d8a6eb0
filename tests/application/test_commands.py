"""How a command ends: errors, Ctrl-C, standard output that nobody reads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from marsopt.profiling import command as profiling
from tests.application.made import called
from train.engine import ends, launch
from train.errors import STOPPED, UserError, command

ROOT = Path(__file__).parents[2]


def raises(error):
    def main():
        raise error

    return main


# an error, the exit code, and what the only line says
ERRORS = {
    "the user's": (UserError("got 1,\nexpected 2"), 2, "error: got 1, expected 2"),
    "the system's": (
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a"),
        2,
        "error: got [Errno 28] No space left on device: 'a', expected that",
    ),
    "Ctrl-C": (KeyboardInterrupt(), 130, STOPPED),
    "SIGTERM": (KeyboardInterrupt(15), 143, STOPPED),
    "of a terminal": (
        UserError("got \x1b]0;title\x07 \u202e, é 中\u3000文"),
        2,
        "error: got \\x1b]0;title\\x07 \\u202e, é 中 文",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_one_line(name):
    error, expected, told = ERRORS[name]
    code, out, err = called(raises(error))
    assert (code, out) == (expected, "")
    (line,) = err.splitlines()
    assert line.startswith(told)


UNREAD = """
from train.errors import command
command(lambda: print("a line\\n" * 100_000))
"""


def test_output_that_nobody_reads_ends_a_command_as_others():
    """As ``| head -1``: 141 is 128 + SIGPIPE, which the shell shows of others."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", UNREAD],
        cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "change",
    [
        dict(RANK="first"), dict(RANK="1"), dict(WORLD_SIZE="0"), dict(WORLD_SIZE=None),
    ],
    ids=str,
)  # fmt: skip
def test_an_environment_of_no_launcher_is_one_line(change, monkeypatch):
    for name, value in (dict(RANK="0", WORLD_SIZE="1") | change).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="^got RANK .*start with torchrun"):
        launch.standalone()


def test_an_interrupt_of_the_profiler_is_one_line(monkeypatch, capsys):
    """While it is at work, which the application's commands do by themselves."""
    monkeypatch.setattr(profiling, "run", lambda args: raises(KeyboardInterrupt())())
    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(SystemExit) as end:
        profiling.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == f"{STOPPED}\n"


class Trainer:
    """Which takes two steps, and then fails: its folder is gone."""

    step, began, told = 2, True, None

    def __init__(self, folder: Path) -> None:
        self.folder, self.metrics_processor = folder, self

    def train(self) -> None:
        self.folder.rename(self.folder.with_name("renamed"))
        raise FileNotFoundError(self.folder)

    def close(self) -> None:
        pass


def test_a_run_whose_folder_has_gone_fails_with_1(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    (folder / "checkpoint/step-1").mkdir(parents=True)

    class Config:
        dump_folder = str(folder)
        build = staticmethod(lambda: Trainer(folder))

        class training:
            steps = 9

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(ends.signal, "signal", lambda *args: None)
    monkeypatch.setattr(ends.logging, "shutdown", lambda: None)
    monkeypatch.setattr(ends.os, "_exit", sys.exit)
    signals = type("Signals", (), {"told": None})()
    with pytest.raises(SystemExit) as end:
        command(lambda: launch.train(Config(), signals))
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: {folder} is gone, deleted or renamed while the run was in it, at step "
        "2 of 9: once that is mended, with the folder back the same command resumes, "
        "else it starts anew"
    )
