"""One call under torch.profiler: how often each graph runs, the memory that it takes at
its peak, and a Chrome trace.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # c10::DeviceType
REGION = "Torch-Compiled Region: "  # followed by torch's compile id


@dataclass(frozen=True)
class Trace:
    """What the trace of one call says."""

    num_runs: Counter[str]  # of every graph, by compile id
    graph_peaks: dict[str, int]  # what each allocates at most, its results included
    peak_bytes: int  # allocated at most, beyond what lived before
    num_launches: int | None  # of kernels on a GPU, whoever launched them


def traced(call: Callable[[], object], device: str, path: Path | None = None) -> Trace:
    """Run ``call`` once, and keep its Chrome trace at ``path``.

    Scratch that libraries below torch take for themselves is not seen, nor is, on a
    CPU, the freeing of what was there before.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its start and stop are no news
    activities = [ProfilerActivity.CPU]
    before = 0
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = path or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    runs: Counter[str] = Counter()
    peaks: dict[str, int] = {}
    for span in events:
        if span.get("name", "").startswith(REGION):
            key, start = span["name"].removeprefix(REGION), span["ts"]
            peak = _peak(events, device, start, start + span["dur"])
            peaks[key] = max(peak, peaks.get(key, 0))
            runs[key] += 1
    if device == "cpu":
        return Trace(runs, peaks, _peak(events, device), None)
    num_launches = sum(event.get("cat") == "kernel" for event in events)
    most = torch.cuda.max_memory_allocated() - before
    return Trace(runs, peaks, most, num_launches)


def _peak(
    events: Sequence[dict[str, Any]],
    device: str,
    start: float = 0.0,
    end: float = math.inf,
) -> int:
    """Return that of the allocator's calls between two times, in their order."""
    calls = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]"
        and event["args"]["Device Type"] == DEVICE_TYPES[device]
        and start <= event["ts"] <= end
    ]
    calls.sort(key=lambda call: call[0])
    return max(accumulate((size for _, size in calls), initial=0))
