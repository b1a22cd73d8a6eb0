"""One call under torch.profiler: how often each graph runs, the memory that it takes at
its peak, and a Chrome trace.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

REGION = "Torch-Compiled Region: "  # followed by torch's compile id


@dataclass(frozen=True)
class Trace:
    """What the trace of one call says."""

    num_runs: Counter[str]  # of every graph, by compile id
    peak_bytes: int  # allocated at most, beyond what lived before
    num_launches: int | None  # of kernels on a GPU, whoever launched them


def traced(call: Callable[[], object], device: str, path: Path | None) -> Trace:
    """Run ``call`` once, and keep its Chrome trace at ``path``."""
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
    names = (event.get("name", "") for event in events)
    runs = Counter(n.removeprefix(REGION) for n in names if n.startswith(REGION))
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
        return Trace(runs, peak, sum(e.get("cat") == "kernel" for e in events))
    return Trace(runs, _peak(events), None)


def _peak(events: list[dict]) -> int:
    """Of the CPU allocator's calls, in their order."""
    calls = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]
    peak = now = 0
    for _, size in sorted(calls, key=lambda call: call[0]):
        now += size
        peak = max(peak, now)
    return peak
