"""This machine: its name, its peak rates, the time of a call."""

from __future__ import annotations

import os
import platform
import re
import sys
import timeit
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer

# per tensor: far more than any cache holds
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}
# rows and columns: enough to occupy all of it
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
HEAD_START = 100_000_000  # cycles that a GPU is kept waiting: some 50 ms


def describe(device: str) -> dict[str, Any]:
    """Return the machine of the figures, as JSON can hold it."""
    info, cpu = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if info.exists():
        named = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE)
        cpu = named[1] if named else cpu
    description = dict(
        cpu=cpu,
        num_cores=os.cpu_count(),
        num_threads=torch.get_num_threads(),
        load=None if sys.platform == "win32" else os.getloadavg()[0],
        torch=torch.__version__,
        python=platform.python_version(),
        device=device,
        date=date.today().isoformat(),
    )
    if device == "cuda":
        description |= dict(gpu=torch.cuda.get_device_name(), cuda=torch.version.cuda)
    return description


def one_line(machine: Mapping[str, Any]) -> str:
    """Return a description in words."""
    gpu = f"{machine['gpu']}, CUDA {machine['cuda']}, " if "gpu" in machine else ""
    load = "" if machine["load"] is None else f", load average {machine['load']:.1f}"
    cores = counted(machine["num_cores"], "core")
    threads = counted(machine["num_threads"], "thread")
    return (
        f"{gpu}{machine['cpu']}, {cores}, torch on {threads}{load}, torch "
        f"{machine['torch']}, {machine['date']}"
    )


def counted(num: int, what: str) -> str:
    """Return "1 thread", "2 threads"."""
    return f"{num} {what}{'s' * (num != 1)}"


def free_memory(device: str) -> int:
    """Return the bytes that can be allocated now, on a CPU as Linux estimates them."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo")
    if not info.exists():
        return sys.maxsize
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def nothing() -> None:
    """Do nothing."""


def seconds(
    call: Callable[[], object], device: str, before: Callable[[], object] = nothing
) -> float:
    """Return the wall time of one call, without Python's garbage collector.

    ``before`` is a barrier, not timed; a GPU is waited for before and after.
    """
    wait = torch.cuda.synchronize if device == "cuda" else nothing

    def setup() -> None:
        before()
        wait()

    def timed() -> None:
        call()
        wait()

    return timeit.timeit(timed, setup, number=1)


class Timed(NamedTuple):
    """Of one call.

    ``seconds``: on a GPU from the first of its launches to the end of the last, the
    host HEAD_START ahead, as it is behind a backward pass; else wall time. ``host``:
    wall time until the call returned, whatever the GPU still does.
    """

    seconds: float
    host: float


def timed(call: Callable[[], object], device: str) -> Timed:
    """Return the time of one call, without Python's garbage collector."""
    if device != "cuda":
        wall = seconds(call, device)
        return Timed(wall, wall)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)

    def between() -> None:
        start.record()
        call()
        end.record()

    host = seconds(between, "cpu")  # waits for nothing
    torch.cuda.synchronize()
    return Timed(start.elapsed_time(end) / 1e3, host)


def typical(call: Callable[[], object]) -> float:
    """Return the median seconds of a call, by torch's timer."""
    timer = Timer(
        "call()", globals=dict(call=call), num_threads=torch.get_num_threads()
    )
    return timer.blocked_autorange(min_run_time=0.5).median


def copy_bandwidth(device: str) -> float:
    """Return the bytes a second that a copy of a large tensor reads and writes.

    On a CPU the cache lines that are written may be read first; this is not counted,
    here or in a graph.
    """
    source = torch.ones(COPY_BYTES[device] // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / typical(lambda: target.copy_(source))


def matmul_rate(device: str, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the floating point operations a second of a large square product of random
    matrices.
    """
    size = MATMUL_SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / typical(lambda: torch.mm(a, b, out=out))
