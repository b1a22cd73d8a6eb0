"""How a command begins and ends as a process: Ctrl-C while it imports, streams that are
closed, standard output that nobody reads.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from marsopt.profiling import command as profiling
from train.engine import ends, launch
from train.errors import UserError, command, shown

ROOT = Path(__file__).parents[2]


def interruptible():
    """Of a suite that a shell runs in the background, children would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def started(*args, folder=ROOT, **options):
    """Run Python with the project, or with what lies in a folder before it."""
    path = os.pathsep.join(map(str, dict.fromkeys((folder, ROOT))))
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": ""},
        text=True,
        timeout=60,
        **dict(preexec_fn=interruptible) | options,
    )


# what makes them import torch, where it is not the first thing that they do
ARGUMENTS = {
    "train": ["--config", "tiny_adamw"],
}
COMMANDS = ("evaluate", "export", "import_hf", "plan", "prepare", "sample")
EVERY = ["train", *(f"train.{name}" for name in COMMANDS)]


@pytest.mark.parametrize("module", EVERY)
def test_an_interrupt_while_a_command_imports_is_one_line(module, tmp_path):
    """With modules in the place of those that take seconds, during which somebody has
    pressed Ctrl-C.
    """
    pressed = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    for name in ("torch", "numpy", "pydantic"):
        (tmp_path / f"{name}.py").write_text(pressed)
    given = ARGUMENTS.get(module, [])
    done = started("-m", module, *given, folder=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    first = "loading torch and the forecast\n" if module == "train.plan" else ""
    assert done.stderr == f"{first}stopped before its end: run the same command again\n"


def test_who_imports_the_application_keeps_its_own_signals():
    code = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import train\n"
        "print(signal.getsignal(signal.SIGINT).__name__)"
    )
    assert started("-c", code, capture_output=True).stdout == "default_int_handler\n"


CLOSED = """
import os, sys
sys.argv[0] = "-m"  # as python -m has it while it looks for the module
import train
from train.errors import UserError, command, shown
def main():
    file = open(os.devnull)
    assert file.fileno() > 2
    print("to nobody")
    print("to the user", file=sys.stderr)
    sys.stdout.flush()
    os.write(1, b"to nobody")
    sys.stdin.read()
command(main)
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_are_empty(closed):
    def close():
        for number in closed:
            os.close(number)

    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=-3)
    done = started("-Wdefault", "-c", CLOSED, preexec_fn=close, **options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" if 2 in closed else "to the user\n"


UNREAD = """
import sys
from train.errors import UserError, command
def main():
    for _ in range(MANY):
        print("a line")
    END
command(main)
"""


@pytest.mark.parametrize("many", [1, 100_000])
@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("pass", 141, ""),
        ("sys.exit(0)", 141, ""),
        ("raise UserError('got it')", 2, "error: got it\n"),
    ],
)
def test_output_that_nobody_reads_ends_a_command_as_others(many, end, code, told):
    """As ``| head -1``: 141 is 128 + SIGPIPE, which the shell shows of others."""
    reader, writer = os.pipe()
    os.close(reader)
    text = UNREAD.replace("MANY", str(many)).replace("END", end)
    done = started("-c", text, stdout=writer, stderr=subprocess.PIPE)
    both = started("-c", text, stdout=writer, stderr=writer)
    os.close(writer)
    if many > 1:  # it ends at the line that does not fit into the buffer
        code, told = 141, ""
    assert (done.returncode, done.stderr) == (code, told)
    assert both.returncode == code


def test_output_to_a_full_disk_is_one_line():
    text = UNREAD.replace("MANY", "1").replace("END", "pass")
    with open("/dev/full", "w") as full:
        done = started("-c", text, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "expected space on the disk" in done.stderr


ERRORS = {
    errno.EPIPE: "somebody who reads it",
    errno.ENOSPC: "space on the disk",
    errno.EDQUOT: "quota",
    errno.ENOMEM: "free memory",
    errno.EMFILE: "ulimit -n",
    errno.EIO: "a disk that works",
    errno.ESTALE: "a file system that answers",
    errno.EROFS: "may be written to",
    errno.EACCES: "a path that this user may use",
    errno.ENOTRECOVERABLE: "mend what it names",
}


def told_of(error, capfd):
    """The line of a command that raises."""

    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        command(main)
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("number", ERRORS)
def test_the_error_decides_the_advice(number, capfd):
    line = told_of(OSError(number, os.strerror(number), "some/file"), capfd)
    assert ERRORS[number] in line
    assert ("that this user may use" in line) is (number == errno.EACCES)


def test_what_steers_a_terminal_is_shown(capfd):
    error = UserError("got \x1b]0;title\x07 \x9b2J \u202e \udcff, é 中\u3000文")
    line = told_of(error, capfd)
    assert line == "error: got \\x1b]0;title\\x07 \\x9b2J \\u202e \\udcff, é 中 文"
    assert shown("a\tb\r\n") == "a\tb\\r\n"


def test_lines_are_short(capfd):
    line = told_of(UserError(f"got {'x' * 100_000}, expected less: change it"), capfd)
    assert len(line) < 2100
    assert line.endswith("expected less: change it")


LONELY = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


@pytest.mark.parametrize(
    "change",
    [
        dict(RANK="first"), dict(RANK=""), dict(RANK="1"), dict(RANK="-1"),
        dict(WORLD_SIZE="two"), dict(WORLD_SIZE="0"), dict(WORLD_SIZE=None),
        dict(LOCAL_WORLD_SIZE="x"), dict(LOCAL_RANK="9" * 5000), dict(MASTER_PORT="x"),
        dict(TORCHELASTIC_USE_AGENT_STORE="True"),
        dict(TORCHELASTIC_USE_AGENT_STORE="True", RANK=None),
        dict(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR=None),
    ],
    ids=str,
)  # fmt: skip
def test_an_environment_of_no_launcher_is_one_line(change, monkeypatch):
    for name, value in (LONELY | change).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="^got .*(unset|start with torchrun)") as error:
        launch.standalone()
    assert len(str(error.value)) < 400


def test_an_interrupt_of_the_profiler_is_one_line(monkeypatch, capsys):
    """While it is at work, which the application's commands do by themselves."""

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(profiling, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(SystemExit) as end:
        profiling.main()
    assert end.value.code == 130
    said = "stopped before its end: run the same command again\n"
    assert capsys.readouterr().err == said


# ---- of a training -------------------------------------------------------------------


class Trainer:
    """Which takes two steps, and then ``fails``."""

    step, began = 2, True

    def __init__(self, fails) -> None:
        self.train, self.metrics_processor = fails, self

    def close(self) -> None:
        pass


@pytest.fixture
def ended(tmp_path, monkeypatch, capsys):
    """What trains in a folder until something fails; (exit code, stderr)."""
    folder = tmp_path / "run"
    (folder / "checkpoint/step-1").mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (folder / "checkpoint/step-1" / name).touch()
    (folder / "rank0.log").touch()

    class Config:
        dump_folder = str(folder)

        class training:
            steps = 9

    def call(fails):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setattr(ends.signal, "signal", lambda *args: None)
        monkeypatch.setattr(ends.logging, "shutdown", lambda: None)
        monkeypatch.setattr(ends.os, "_exit", sys.exit)
        config, signals = Config(), type("Signals", (), {"told": None})()
        config.build = lambda: Trainer(lambda: fails(folder))
        with pytest.raises(SystemExit) as end:
            command(lambda: launch.train(config, signals))
        return end.value.code, capsys.readouterr().err

    return call


def test_a_run_whose_folder_has_gone_fails_with_1(ended):
    def gone(folder):
        folder.rename(folder.with_name("renamed"))
        (folder / "loss.png").write_bytes(b"")

    code, told = ended(gone)
    assert code == 1
    (line,) = told.splitlines()
    assert line.startswith("error: ")
    assert "run is gone, deleted or renamed while the run was in it, at step 2" in line
    assert line.endswith("with the folder back the same command resumes, else it "
                         "starts anew")  # fmt: skip


def test_a_run_whose_output_nobody_reads_says_so(ended, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        code, told = ended(lambda folder: print("a line"))
    assert code == 141
    assert told == (
        "stopped at step 2, as nobody reads its standard output any more: the same "
        "command resumes after step 1\n"
    )
