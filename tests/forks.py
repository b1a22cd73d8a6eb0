"""Commands of the application as forked children of one process that has imported what
they import. Of the ten seconds of a ``python -m train`` of a few steps, imports are
seven, and each rank of several spends them.

A child does what ``python -m`` does after its imports. Its parent runs no tensor
arithmetic and has no threads, so that the fork breaks nothing of PyTorch. That a real
``python -m`` does and says the same stays the subject of one test of each command.

Run as a module, it reads [module, [arguments], ranks, signals, together, {environment}]
from each line of its standard input, and answers with [exit code, stdout, stderr].
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 240.0  # seconds of a command, on a machine that does other things too
POLL = 0.005  # seconds between two looks at the children
SPAN = 0.05  # seconds between two signals, as torchrun and Slurm send them
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
    signals: tuple[str, list[int], list[int]] | None = None,
    together: bool = True,
    **env: str,
) -> tuple[int, str, str]:
    """Run a module of the application with these arguments on ``ranks`` processes;
    (exit code, stdout, stderr). ``signals`` is a text and numbers of signals and of
    ranks: once rank 0 has printed the text, the ranks get the signals. ``env`` is more
    of the environment.

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
    asked = [module, options, ranks, signals, together, env]
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
    """``python -m module *args``, on ``ranks`` processes.

    ``together``: as torchrun, end the other ranks when one has failed. ``prepare`` is
    called in the child of each rank before it begins, ``watch`` by the parent again and
    again while they run.
    """

    module: str
    args: tuple[str, ...]
    ranks: int = 1
    limit: float = LIMIT
    together: bool = True
    prepare: Callable[[int], None] | None = None
    watch: Callable[[Running], None] | None = None
    env: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        ranks = f"  ({self.ranks} ranks)" if self.ranks > 1 else ""
        return f"python -m {self.module} {' '.join(self.args)}{ranks}"


@dataclass(frozen=True)
class Ended:
    """What became of a command: of each rank the exit code (minus the signal that ended
    it), what it printed, and when it ended.
    """

    codes: list[int]
    outs: list[str]
    errs: list[str]
    times: list[float]
    hung: bool

    @property
    def code(self) -> int:
        """Return the exit code of the rank that ended first: torchrun ends others."""
        return self.codes[self.times.index(min(self.times))]

    @property
    def out(self) -> str:
        """Return what all ranks printed to stdout."""
        return "".join(self.outs)

    @property
    def err(self) -> str:
        """Return what all ranks printed to stderr."""
        return "".join(self.errs)


@dataclass
class Running:
    """A command under way, in a folder of its own; ``number`` tells its output from
    that of other commands in the folder.
    """

    command: Command
    folder: Path
    number: int = 0
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    hung: bool = False
    keeper: int = 0

    def __post_init__(self) -> None:
        """Fork one child for each rank."""
        sys.stdout.flush()  # or children would print it again
        world, shared = self.command.ranks, {}
        if world > 1:
            self.keeper, port = _keep_store()
            shared = dict(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=world,
                LOCAL_WORLD_SIZE=world, TORCHELASTIC_USE_AGENT_STORE=True,
                TORCHELASTIC_RUN_ID="forks",
            )  # fmt: skip
        for rank in range(world):
            numbers = dict(RANK=rank, LOCAL_RANK=rank) if world > 1 else {}
            env = {key: str(value) for key, value in (shared | numbers).items()}
            env |= self.command.env
            pid = os.fork()
            if pid == 0:
                _child(self, rank, env)
            self.pids.append(pid)

    def printed(self, stream: str, rank: int) -> str:
        """Return what a rank has printed to "out" or "err" so far."""
        path = self.folder / f"{stream}{self.number}.{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, number: int, *ranks: int) -> None:
        """Send a signal to ranks that still run; to all where none is named."""
        for rank in ranks or range(self.command.ranks):
            if rank not in self.codes:
                os.kill(self.pids[rank], number)

    def poll(self) -> bool:
        """Look after the children; return whether all have ended."""
        num_ended = len(self.codes)
        self._reap(os.WNOHANG)
        has_news = len(self.codes) > num_ended
        if has_news and any(self.codes.values()) and self.command.together:
            self.kill(signal.SIGTERM)
        if len(self.codes) < self.command.ranks:
            self.hung = time.monotonic() - self.began > self.command.limit
            if not self.hung:
                if self.command.watch is not None:
                    self.command.watch(self)
                return False
            for rank, pid in enumerate(self.pids):
                if rank not in self.codes:
                    os.killpg(pid, signal.SIGKILL)
            self._reap(0)
        if self.keeper:
            os.kill(self.keeper, signal.SIGKILL)
            os.waitpid(self.keeper, 0)
        return True

    def _reap(self, options: int) -> None:
        """Note how children have ended, those that have."""
        for rank, pid in enumerate(self.pids):
            if rank in self.codes:
                continue
            ended, status = os.waitpid(pid, options)
            if ended:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
                self.times[rank] = time.monotonic()

    def ended(self) -> Ended:
        """Return what became of it."""
        ranks = range(self.command.ranks)
        return Ended(
            [self.codes[r] for r in ranks],
            [self.printed("out", r) for r in ranks],
            [self.printed("err", r) for r in ranks],
            [self.times[r] for r in ranks],
            self.hung,
        )


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
        _print_to(running.folder, f"{running.number}.{rank}")
        os.chdir(running.folder)
        os.environ.update(env)
        command = running.command
        if command.prepare is not None:
            command.prepare(rank)
        code = _as_main(command)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the parent's may be unwound here


def _print_to(folder: Path, name: str) -> None:
    for stream, errors in (("out", "strict"), ("err", "backslashreplace")):
        number, buffering = {"out": (1, -1), "err": (2, 1)}[stream]
        file = os.open(folder / f"{stream}{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
        options = dict(encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, f"std{stream}", os.fdopen(number, "w", buffering, **options))


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


def _signals_after(text: str, numbers: list[int], ranks: list[int]) -> Callable:
    """Return what sends ``ranks`` the signals once rank 0 has printed ``text``."""
    left = list(numbers)

    def watch(running: Running) -> None:
        if left and text in running.printed("out", 0):
            running.kill(left.pop(0), *ranks)
            time.sleep(SPAN)

    return watch


def main() -> None:
    """Answer each line of standard input."""
    import_all()
    with os.fdopen(os.dup(1), "w") as answers:  # children have 1 for themselves
        for line in sys.stdin:
            module, args, ranks, signals, together, env = json.loads(line)
            watch = _signals_after(*signals) if signals else None
            how = dict(together=together, watch=watch, env=env)
            command = Command(module, tuple(args), ranks, **how)
            with tempfile.TemporaryDirectory() as folder:
                running = Running(command, Path(folder))
                while not running.poll():
                    time.sleep(POLL)
                ended = running.ended()
            in_time = sorted(zip(ended.times, ended.codes, strict=True))
            code = next((code for _, code in in_time if code), 0)
            err = f"did not end in {LIMIT} s\n" * ended.hung + ended.err
            print(json.dumps([code, ended.out, err]), file=answers, flush=True)


if __name__ == "__main__":
    main()
