"""Bytes that an optimizer keeps, and that a step of it needs on top."""

from __future__ import annotations

import gc
import os
import types
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from marsopt.profiling.profiler import traced

ELSEWHERE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
)


def budget(device: torch.device) -> int:
    """Return the bytes to plan with: 60% of the machine's memory, or 90% of what the
    GPU has free.
    """
    if device.type == "cuda":
        return int(0.9 * torch.cuda.mem_get_info(device)[0])
    return int(0.6 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that torch held at once during a call, beyond those held at
    its start (see ``traced``).
    """
    return traced(step, device.type).peak_bytes


def held_by(root: object) -> Iterator[Tensor]:
    """Yield all tensors that an object refers to, however deep; not through code,
    classes and modules.
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
    """Return the bytes of the storages that optimizers hold in ``state`` and elsewhere,
    each once; those of parameters and of gradients that are still in place not.
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
