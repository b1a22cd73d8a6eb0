"""Commands of the application as forked children of one process that has imported what
they import. Of the ten seconds of a ``python -m train`` of a few steps, imports are
seven, and each rank of several spends them.

A child does what ``python -m`` does after its imports. Its parent runs no tensor
arithmetic and has no threads, so that the fork breaks nothing of PyTorch. Processes of
a real ``python -m`` are in test_commands.py, test_prepare.py and test_reliability.py.

Run as a module, it reads [module, [arguments], ranks, signals, kill, together,
{environment}] from each line of its standard input, and answers with [exit code,
stdout, stderr].
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 240.0  # seconds of a command, on a machine that does other things too
POLL = 0.005  # seconds between two looks at the children
SPAN = 0.05  # seconds between two signals, as torchrun and Slurm send them
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir")
PRELOADED = (
    "datasets", "matplotlib.pyplot", "safetensors.torch", "tokenizers",
    "torch.utils.tensorboard",
    "tensorboard.backend.event_processing.event_accumulator",
    "marsopt.profiling.optimizer", "train.engine.ends", "train.engine.launch",
    "train.engine.resolve", "train.evaluate.harness", "train.export", "train.plan",
    "train.prepare", "train.runs.summary", "train.runs.trained",
)  # fmt: skip

_server: list[subprocess.Popen] = []  # none or one


@atexit.register
def _end() -> None:
    while _server:
        _server.pop().communicate()  # the end of its input ends it


def forked(
    *args: object,
    ranks: int = 1,
    signals: tuple[str, list[int]] | None = None,
    kill: tuple[str, int, list[int]] | None = None,
    together: bool = True,
    **env: str,
) -> tuple[int, str, str]:
    """Run a module of the application with these arguments on ``ranks`` processes;
    (exit code, stdout, stderr). ``signals`` is a text and numbers of signals, which all
    ranks get once rank 0 has printed the text. ``kill`` is a part of a path, a number,
    and ranks, which kill themselves before their operation of this number on the files
    of such a path. ``env`` is more of the environment.

    As under torchrun, other ranks end with the first that fails, whose exit code it is,
    if they run ``together``; torchrun itself, which would say so, is not there. $RANK
    in an argument is the number of the rank.
    """
    if not _server:
        # each command has a working folder of its own
        usual = dict(
            OMP_NUM_THREADS="1", PYTHONWARNINGS="default", PYTHONPATH=str(ROOT)
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"],
            cwd=ROOT,
            env={**os.environ, **usual},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        _server.append(process)
    (server,) = _server
    module, *options = map(str, args)
    asked = [module, options, ranks, signals, kill, together, env]
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that forks commands has ended"
    code, out, err = json.loads(answer)
    return code, out, err


def import_all() -> None:
    """Import what the commands import, so that no child has to."""
    for module in PRELOADED:
        importlib.import_module(module)
    from train.engine import recipes

    for name in recipes.load().__all__:
        recipes.recipe(name)  # which imports its file
    gc.collect()
    gc.freeze()  # what the children share stays shared


@dataclass(frozen=True)
class Command:
    """``python -m module *args``, on ``ranks`` processes; as of ``forked``."""

    module: str
    args: tuple[str, ...]
    ranks: int
    signals: tuple[str, list[int]] | None
    kill: tuple[str, int, list[int]] | None
    together: bool
    env: dict[str, str]


class Running:
    """A command under way, in a folder of its own."""

    def __init__(self, command: Command, folder: Path) -> None:
        """Fork one child for each rank."""
        self.command, self.folder = command, folder
        self.codes: dict[int, int] = {}  # of the ranks that have ended, in this order
        self._began, self._keeper = time.monotonic(), 0
        self._left = list(command.signals[1]) if command.signals else []
        self._pids: list[int] = []
        sys.stdout.flush()  # or children would print it again
        world, shared = command.ranks, {}
        if world > 1:
            self._keeper, port = _keep_store()
            shared = dict(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=world,
                LOCAL_WORLD_SIZE=world, TORCHELASTIC_USE_AGENT_STORE=True,
                TORCHELASTIC_RUN_ID="forks",
            )  # fmt: skip
        for rank in range(world):
            numbers = dict(RANK=rank, LOCAL_RANK=rank) if world > 1 else {}
            env = {key: str(value) for key, value in (shared | numbers).items()}
            pid = os.fork()
            if pid == 0:
                _child(self, rank, env | command.env)
            self._pids.append(pid)

    def printed(self, stream: str) -> str:
        """Return what the ranks have printed to "out" or "err" so far."""
        paths = [self.folder / f"{stream}{r}" for r in range(self.command.ranks)]
        return "".join(p.read_text(errors="replace") for p in paths if p.exists())

    def wait(self) -> None:
        """Wait until all have ended, and send the signals."""
        while self._under_way():
            time.sleep(POLL)
        if self._keeper:
            os.kill(self._keeper, signal.SIGKILL)
            os.waitpid(self._keeper, 0)

    def _under_way(self) -> bool:
        if time.monotonic() - self._began > LIMIT:
            for rank in self._running():
                os.killpg(self._pids[rank], signal.SIGKILL)
        num_ended = len(self.codes)
        for rank in self._running():
            ended, status = os.waitpid(self._pids[rank], os.WNOHANG)
            if ended:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
        has_news = len(self.codes) > num_ended
        if has_news and any(self.codes.values()) and self.command.together:
            self._send(signal.SIGTERM)
        if self._left and self.command.signals[0] in self.printed("out"):
            self._send(self._left.pop(0))
            time.sleep(SPAN)
        return len(self.codes) < self.command.ranks

    def _running(self) -> list[int]:
        return [rank for rank in range(self.command.ranks) if rank not in self.codes]

    def _send(self, number: int) -> None:
        for rank in self._running():
            os.kill(self._pids[rank], number)


def _keep_store() -> tuple[int, int]:
    """Fork a process that keeps the store of several ranks, as torchrun does; return
    its id and the store's port.
    """
    from torch.distributed import TCPStore

    ours, theirs = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.close(theirs)
        port = int(os.read(ours, 99))
        os.close(ours)
        return pid, port
    try:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(theirs, str(store.port).encode())
        while os.getppid() == parent:
            time.sleep(1.0)
    finally:
        os._exit(0)


def _child(running: Running, rank: int, env: dict[str, str]) -> None:
    """Become ``python -m module``, and end as it does."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _print_to(running.folder, rank)
        os.chdir(running.folder)
        os.environ.update(env)
        if running.command.kill and rank in running.command.kill[2]:
            _kill_at(*running.command.kill[:2])
        code = _as_main(running.command)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the parent's may be unwound here


def _print_to(folder: Path, rank: int) -> None:
    for stream, errors in (("out", "strict"), ("err", "backslashreplace")):
        number, buffering = {"out": (1, -1), "err": (2, 1)}[stream]
        file = os.open(folder / f"{stream}{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
        options = dict(encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, f"std{stream}", os.fdopen(number, "w", buffering, **options))


def _kill_at(place: str, number: int) -> None:
    """Let this process kill itself before an operation on files, as Python's audit
    hooks see it.
    """
    left = number

    def hook(event: str, args: tuple) -> None:
        nonlocal left
        if event in OPERATIONS and place in str(args[0]):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)


def _as_main(command: Command) -> int:
    """Run a module as ``python -m`` does; return the exit code."""
    from train.engine.titan import Trainer
    from train.runs import summary

    # a training ends with a sample of its model, which takes longer than a few steps
    summary.SAMPLE_TOKENS = 8
    # torchtitan ends it by sleeping for two seconds
    sys.modules[Trainer.__module__].time = types.SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: None
    )
    for name in (command.module, f"{command.module}.__main__"):
        if command.module != "train":
            sys.modules.pop(name, None)  # runpy warns of what is imported already
    rank = os.environ.get("RANK", "0")
    sys.argv = [command.module, *(a.replace("$RANK", rank) for a in command.args)]
    code: object = 0
    try:
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # as the interpreter, wait for threads that are no daemons
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def main() -> None:
    """Answer each line of standard input."""
    import_all()
    with os.fdopen(os.dup(1), "w") as answers:  # children have 1 for themselves
        for line in sys.stdin:
            command = Command(*json.loads(line))
            with tempfile.TemporaryDirectory() as folder:
                running = Running(command, Path(folder))
                running.wait()
                code = next((code for code in running.codes.values() if code), 0)
                answer = [code, running.printed("out"), running.printed("err")]
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
