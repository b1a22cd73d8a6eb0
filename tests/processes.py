"""Run a function on several gloo processes of this machine."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _main(rank: int, world: int, folder: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    try:
        result = function(rank, world, *args)
    except BaseException:
        Path(f"{folder}/{rank}.txt").write_text(traceback.format_exc())
        raise
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    # not destroy_process_group: gloo sometimes aborts while its threads are torn down
    os._exit(0)


def spawn(function: Callable, world: int, *args: Any, seconds: float = 120) -> list:
    """What ``function(rank, world, *args)`` returned on each of ``world`` ranks.

    A rank that fails or hangs (``seconds``) fails the test with its own traceback. A
    rank that dies of a signal, without one, is tried once more: gloo aborts a process
    now and then while it connects or closes, and a fault of ours would die twice.
    """
    for last in (False, True):
        try:
            return _spawn(function, world, args, seconds)
        except mp.ProcessExitedException as error:
            if last:
                raise AssertionError(str(error)) from None
            print(f"trying again: {error}", file=sys.stderr)
    raise AssertionError("unreachable")


def _spawn(function: Callable, world: int, args: tuple, seconds: float) -> list:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _main,
            (world, folder, function, args),
            nprocs=world,
            join=False,
            start_method="spawn",
        )
        try:
            deadline = time.monotonic() + seconds
            # join returns when one process has ended, too
            while not context.join(timeout=max(0.0, deadline - time.monotonic())):
                late = time.monotonic() > deadline
                assert not late, f"{world} ranks did not finish in {seconds} s"
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            told = [p.read_text() for p in sorted(Path(folder).glob("*.txt"))]
            if not told:
                raise
            raise AssertionError("\n".join(told)) from error
        finally:
            for process in context.processes:
                process.kill()
        return [
            torch.load(f"{folder}/{r}.pt", weights_only=False) for r in range(world)
        ]
