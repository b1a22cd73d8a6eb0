"""Run a function on several gloo processes of this machine.

Processes stay for the next call with as many ranks: to start one takes longer than most
of what is run. They are forked from a process that has done nothing but import torch.
What a function changes in a process that is not undone here, it has to undo itself.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# what every rank would import; not inductor, which may start processes of its own
SHARED = ["pytest", "torch._dynamo", "torch.distributed.fsdp", "torch.testing"]
GRACE = 3.0  # seconds in which other ranks may tell what they saw of a failure


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    """Run what comes through ``pipe`` until it is closed."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    gc.freeze()  # what all ranks have imported is looked through no more
    gc.set_threshold(20_000, 50, 100)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            # not destroy_process_group: gloo sometimes aborts while its threads are
            # torn down
            os._exit(0)
        _as_at_the_start()
        try:
            torch.save(function(rank, world, *args), f"{folder}/{rank}.pt")
            dist.barrier()
            told = ""
        except BaseException:
            told = traceback.format_exc()
        sys.stdout.flush()
        pipe.send(told)


def _as_at_the_start() -> None:
    from marsopt.step.graphs import graph_of  # the forkserver imports torch alone

    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch._dynamo.reset()
    graph_of.cache_clear()
    torch.manual_seed(0)
    gc.collect()  # FSDP keeps a list of all modules that it knows


class Died(Exception):
    """A rank ended without a traceback."""


class Ranks:
    """``world`` processes with one process group."""

    def __init__(self, world: int) -> None:
        self._folder, self._world = tempfile.TemporaryDirectory(), world
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(SHARED)
        pairs = [context.Pipe() for _ in range(world)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(
                target=_serve, args=(rank, world, self._folder.name, pipe), daemon=True
            )
            for rank, (_, pipe) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()

    def run(self, function: Callable, args: tuple, seconds: float) -> list:
        """Return what each rank returned.

        Raises:
            AssertionError: one has raised, or hangs.
            Died: one has died of a signal.
        """
        job = pickle.dumps((function, args))
        self._signal(signal.SIGCONT)
        try:
            return self._run(job, seconds)
        finally:
            # gloo's threads, one for each group that a test has made, else wake a
            # hundred times a second: with 25 of them in each of four ranks a tenth of
            # a core
            self._signal(signal.SIGSTOP)

    def _run(self, job: bytes, seconds: float) -> list:
        try:
            for pipe in self._pipes:
                pipe.send_bytes(job)
        except BrokenPipeError:
            raise Died(f"one of {self._world} ranks died between two tests") from None
        deadline, late = time.monotonic() + seconds, f"did not finish in {seconds} s"
        waiting, failed, died = set(self._pipes), [], False
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(waiting, timeout=left):
                waiting.discard(pipe)
                try:
                    told = pipe.recv()
                except (EOFError, ConnectionResetError):
                    told, died = "", True
                if told or died:
                    failed.append(told)
                    deadline = min(deadline, time.monotonic() + GRACE)
        if any(failed):
            raise AssertionError("\n".join(failed))
        if died:
            raise Died(f"one of {self._world} ranks died of a signal")
        assert not waiting, f"{len(waiting)} of {self._world} ranks {late}"
        folder = self._folder.name
        ranks = range(self._world)
        return [torch.load(f"{folder}/{r}.pt", weights_only=False) for r in ranks]

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


_ready: dict[int, Ranks] = {}  # by their number


@atexit.register
def _end_all() -> None:
    while _ready:
        _ready.popitem()[1].end()


def spawn(function: Callable, world: int, *args: Any, seconds: float = 120) -> list:
    """What ``function(rank, world, *args)`` returned on each of ``world`` ranks.

    A rank that fails or hangs (``seconds``) fails the test with its own traceback. A
    rank that dies of a signal, without one, is tried once more: gloo aborts a process
    now and then while it connects or closes, and a fault of ours would die twice.
    """
    for last in (False, True):
        if world not in _ready:
            _ready[world] = Ranks(world)
            seconds += 10 * world  # to start
        try:
            return _ready[world].run(function, args, seconds)
        except BaseException as error:
            _ready.pop(world).end()
            if last or not isinstance(error, Died):
                raise
            print(f"trying again: {error}", file=sys.stderr)
    raise AssertionError("unreachable")
