"""Commands of the application as children of a process that has imported all that
they import: a fork takes milliseconds, where ``python -m train`` takes many seconds.

A child does what ``python -m`` does from there on. Its parent runs no tensor arithmetic
and has no threads, so that nothing of PyTorch is broken by the fork.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from train.campaign.law import Ended, Verdict

ROOT = Path(__file__).parent.parent.parent
LIMIT = 60.0  # seconds in which a command that is refused has to have ended
POLL = 0.005


def import_all() -> None:
    """Import what the commands import, so that no child has to."""
    import datasets  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    from tensorboard.backend.event_processing import event_accumulator  # noqa: F401

    import marsopt.profiling.optimizer  # noqa: F401
    import train.engine.ends  # noqa: F401
    import train.engine.launch  # noqa: F401
    import train.engine.resolve  # noqa: F401
    import train.evaluate.harness  # noqa: F401
    import train.export  # noqa: F401
    import train.plan  # noqa: F401
    import train.prepare  # noqa: F401
    import train.runs.summary  # noqa: F401
    import train.runs.trained  # noqa: F401
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

    def __str__(self) -> str:
        ranks = f"  ({self.ranks} ranks)" if self.ranks > 1 else ""
        shown = (
            repr(a) if not a.isprintable() or not a or " " in a else a
            for a in self.args
        )  # fmt: skip
        return f"python -m {self.module} {' '.join(shown)}{ranks}"


@dataclass
class Running:
    """A command under way, in a folder of its own."""

    command: Command
    folder: Path
    number: int
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    hung: bool = False
    keeper: int = 0

    def start(self) -> None:
        """Fork one child for each rank."""
        world, together = self.command.ranks, {}
        if world > 1:
            self.keeper, port = _keep_store()
            together = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            together |= dict(TORCHELASTIC_USE_AGENT_STORE=True)
            together |= dict(TORCHELASTIC_RUN_ID="campaign")
            together |= dict(WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        for rank in range(world):
            own = dict(RANK=rank, LOCAL_RANK=rank) if world > 1 else {}
            env = {key: str(value) for key, value in (together | own).items()}
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
        for rank, pid in enumerate(self.pids):
            if rank in self.codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            self.codes[rank] = os.waitstatus_to_exitcode(status)
            self.times[rank] = time.monotonic()
            if self.codes[rank] and self.command.together:
                self.kill(signal.SIGTERM)
        over = len(self.codes) == self.command.ranks
        if not over and time.monotonic() - self.began > self.command.limit:
            self.hung = True
            for rank, pid in enumerate(self.pids):
                if rank not in self.codes:
                    os.killpg(pid, signal.SIGKILL)
                    self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    self.times[rank] = time.monotonic()
            over = True
        if not over and self.command.watch is not None:
            self.command.watch(self)
        if over and self.keeper:
            os.kill(self.keeper, signal.SIGKILL)
            os.waitpid(self.keeper, 0)
            self.keeper = 0
        return over

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
        number = {"out": 1, "err": 2}[stream]
        file = os.open(folder / f"{stream}{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
        options = dict(encoding="utf-8", errors=errors, closefd=False)
        opened = os.fdopen(
            number, "w", buffering=stream == "out" and -1 or 1, **options
        )
        setattr(sys, f"std{stream}", opened)


def _as_main(command: Command) -> int:
    """Run a module as ``python -m`` does; return the exit code."""
    from train.engine.titan import Trainer

    # torchtitan ends a training by sleeping for two seconds
    sys.modules[Trainer.__module__].time = types.SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: None
    )
    for name in (command.module, f"{command.module}.__main__"):
        if command.module != "train":
            sys.modules.pop(name, None)  # runpy warns of what is imported already
    sys.argv = [command.module, *command.args]
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


Steps = Generator[Command, Ended, Verdict]


@dataclass
class Case:
    """One case of a part: ``play`` yields commands, is sent what became of them, and
    returns the verdict. It has a folder to itself.
    """

    part: str
    number: int
    name: str
    play: Callable[[Path], Steps]


def play(
    cases: Iterator[Case], scratch: Path, at_once: int
) -> Iterator[tuple[Case, Verdict, list[Command], list[Ended]]]:
    """Yield each case with its verdict as it ends, a few of them at a time."""
    under_way: list[tuple[Case, Steps, list[Command], list[Ended], Running]] = []
    waiting = iter(cases)
    more = True
    while more or under_way:
        while more and len(under_way) < at_once:
            case = next(waiting, None)
            if case is None:
                more = False
                break
            folder = scratch / f"{case.part}{case.number}"
            folder.mkdir(parents=True)
            steps = case.play(folder)
            first = next(steps)
            running = _begin(first, folder, 0)
            under_way.append((case, steps, [first], [], running))
        still = []
        for case, steps, commands, ends, running in under_way:
            if not running.poll():
                still.append((case, steps, commands, ends, running))
                continue
            ends.append(running.ended())
            try:
                command = steps.send(ends[-1])
            except StopIteration as stop:
                yield case, stop.value, commands, ends
                continue
            commands.append(command)
            again = _begin(command, running.folder, len(ends))
            still.append((case, steps, commands, ends, again))
        under_way = still
        time.sleep(POLL)


def _begin(command: Command, folder: Path, number: int) -> Running:
    sys.stdout.flush()
    running = Running(command, folder, number)
    running.start()
    return running
