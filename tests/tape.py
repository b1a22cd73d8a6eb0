"""A CUDA graph's semantics on any device: what was recorded runs again in the same
tensors, with the numbers that it had, and without the Python around it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Tape(TorchDispatchMode):
    """Records the operations within it, which run, other than in a capture.

    Every tensor that was made is kept, as if the graph's memory were never used twice.

    Raises:
        RuntimeError: the host asks for a value, which no capture can answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._log: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        # lists may change after the call
        args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func is not torch.ops.aten.empty.memory_format:  # it holds nothing yet
            self._log.append((func, args, kwargs, _tensors(out)))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Run everything again; autograd does not see what is written."""
        every = {id(t): t for entry in self._log for t in _tensors(entry)}
        with torch.autograd._unsafe_preserve_version_counter(tuple(every.values())):
            for func, args, kwargs, out in self._log:
                for there, made in zip(
                    out, _tensors(func(*args, **kwargs)), strict=True
                ):
                    if made.data_ptr() != there.data_ptr():  # no view, not in place
                        there.copy_(made)


def _tensors(tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
