"""Compiled optimizers of CPU tensors on a GPU's path: within ``interpreting()`` they
step by the Triton kernels that they would launch there. To be imported before all that
imports Triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

# first, since all that follows imports Triton
from benchmarks.gpu.rehearsal.interpreter import Traffic, interpreter, launch

# isort: split
import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx

from benchmarks.gpu.rehearsal.device import h100
from benchmarks.gpu.rehearsal.lowering import Graph, Wrapper, load, lowering
from marsopt.optim import base, layout


def _on_gpu(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Let a graph over CPU tensors be one over fake CUDA tensors; return its inputs, of
    which those that share memory still do.
    """

    def moved(value: Any) -> Any:
        return torch.device("cuda", 0) if isinstance(value, torch.device) else value

    for node in gm.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    gm.recompile()
    storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def there(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        storage = x.untyped_storage()
        key = storage._cdata, x.dtype
        if key not in storages:
            size = storage.nbytes() // x.itemsize
            storages[key] = torch.empty(size, dtype=x.dtype, device="cuda")
        return storages[key].as_strided(x.shape, x.stride(), x.storage_offset())

    with detect_fake_mode(inputs):
        return [there(x) for x in inputs]


@dataclass
class Runs:
    """What has run within ``interpreting``."""

    traffic: Traffic
    graphs: list[Graph]
    wrappers: list[Wrapper]

    def counts(self) -> tuple[int, int, int]:
        """Return graphs, launches and bytes so far."""
        num_launches = sum(len(wrapper.log) for wrapper in self.wrappers)
        return len(self.graphs), num_launches, self.traffic.num_bytes


@contextlib.contextmanager
def interpreting() -> Iterator[Runs]:
    """Let compiled optimizers of CPU tensors lay these out as on a GPU, and step by the
    kernels that they would launch there.
    """
    wrappers: list[Wrapper] = []

    def run(found: Graph, gm: fx.GraphModule) -> Callable:
        wrapper = load(found.source, device="cpu", run=launch)
        wrappers.append(wrapper)
        return lambda *args: wrapper.call(list(args))

    with h100(), interpreter() as traffic, lowering(run) as graphs:
        lowered = compile_fx.compile_fx

        # calls itself where a graph has options of its own: what is there stays there
        def compile_there(gm, inputs, *args, **kwargs):
            return lowered(gm, _on_gpu(gm, inputs), *args, **kwargs)

        with (
            mock.patch.object(compile_fx, "compile_fx", compile_there),
            # answers for CUDA tensors
            mock.patch.object(base, "resolve_compile", lambda wanted, device: wanted),
            mock.patch.object(layout, "should_stack", lambda p, compile, num: compile),
        ):
            yield Runs(traffic, graphs, wrappers)
