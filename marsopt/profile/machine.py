"""This machine: what it is called, and what it can do at best."""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

# per tensor: far more than any cache holds
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}


def describe(device: str) -> str:
    """One line: processor, cores, how busy they are, torch, date."""
    threads = torch.get_num_threads()
    text = f"{_processor()}, {os.cpu_count()} cores, torch on {threads} threads"
    if sys.platform != "win32":
        text += f", load average {os.getloadavg()[0]:.1f}"
    if device == "cuda":
        text = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return f"{text}, torch {torch.__version__}, {date.today().isoformat()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found.group(1)
    return platform.processor() or platform.machine()


def synchronize(device: str) -> None:
    """Wait for what a GPU was told to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], object], device: str) -> float:
    """Seconds of one call."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def typical(call: Callable[[], object], device: str, seconds: float = 1.0) -> float:
    """Median seconds of as many calls (1 to 9) as fit into ``seconds``, after one that
    warms up and, if it took longer than that, counts.
    """
    first = timed(call, device)
    if first > seconds:
        return first
    repeats = max(1, min(9, int(seconds / max(first, 1e-9))))
    return statistics.median(timed(call, device) for _ in range(repeats))


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a copy of a large tensor reads and writes.

    On a CPU the cache lines that are written may be read first; this is not counted,
    here or in a graph.
    """
    source = torch.ones(COPY_BYTES[device] // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / typical(lambda: target.copy_(source), device)
