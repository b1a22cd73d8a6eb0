"""Bytes that an optimizer keeps, and that a step of it needs on top."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

ELSEWHERE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
)


def budget(device: torch.device) -> int:
    """Bytes to plan with: 60% of the machine's memory, or 80% of what the GPU has
    free.
    """
    if device.type == "cuda":
        return int(0.8 * torch.cuda.mem_get_info(device)[0])
    return int(0.6 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Most bytes that torch held at once during a call, beyond those held at its start.

    CUDA: max_memory_allocated. CPU: the sum of allocations and frees that
    torch.profiler (profile_memory) records, compiled code's among them; scratch that
    libraries below torch take for themselves is not seen, nor is the freeing of what
    was there before.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its start and stop are no news
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    return max(accumulate((c["args"]["Bytes"] for c in changes), initial=0))


def held_by(root: object) -> Iterator[Tensor]:
    """All tensors that an object refers to, however deep; not through code, classes and
    modules.
    """
    seen, left = {id(root)}, [root]
    while left:
        found = left.pop()
        if isinstance(found, Tensor):
            yield found
        for item in gc.get_referents(found):
            if id(item) not in seen and not isinstance(item, ELSEWHERE):
                seen.add(id(item))
                left.append(item)


def state_bytes(optimizers: Iterable[Optimizer], params: Iterable[nn.Parameter]) -> int:
    """Bytes of the storages that optimizers hold in ``state`` and elsewhere, each once;
    those of parameters and of gradients that are still in place not.
    """
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for optimizer in optimizers
        for tensor in held_by(optimizer)
    }
    for p in params:
        for own in (p, p.grad):
            if own is not None:
                storages.pop(own.untyped_storage().data_ptr(), None)
    return sum(storages.values())
