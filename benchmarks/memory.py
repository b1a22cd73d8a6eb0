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


def spans(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return where storages lie, from and to which address, as disjoint spans in order:
    a row that has a storage of its own may lie in that of a stack.
    """
    merged: list[tuple[int, int]] = []
    storages = (tensor.untyped_storage() for tensor in tensors)
    ends = {(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages}
    for start, end in sorted(ends):
        if merged and start < merged[-1][1]:
            start, end = merged[-1][0], max(merged.pop()[1], end)
        merged.append((start, end))
    return merged


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once."""
    return sum(end - start for start, end in spans(tensors))


def state_bytes(optimizers: Iterable[Optimizer], params: Iterable[nn.Parameter]) -> int:
    """Return the bytes that optimizers hold in ``state`` and elsewhere, each once;
    those of parameters and of gradients that are still in place not.
    """
    not_state = [x.detach() for p in params for x in (p, p.grad) if x is not None]
    held = [tensor for optimizer in optimizers for tensor in held_by(optimizer)]
    return num_bytes(held + not_state) - num_bytes(not_state)
