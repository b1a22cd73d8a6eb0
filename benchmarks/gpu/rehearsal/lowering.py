"""Graphs over fake CUDA tensors, lowered by inductor to Triton source, and the launches
of that source: kernels with the tensors and sizes that they are called with.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._inductor import async_compile, compile_fx, config, graph

from marsopt.optim import compiled


@dataclass
class Graph:
    """Inductor's result for one graph.

    Args:
        source: the wrapper's Python source, with every Triton kernel in it.
        num_calls: how often the graph has run.
    """

    source: str
    num_calls: int = 0


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Args:
        kernel: its name.
        args: its tensors (on meta) and its sizes.
        inputs: memory of the graph's inputs, by the address of the storage.
    """

    kernel: str
    args: tuple[Any, ...]
    inputs: frozenset[int]

    @property
    def sizes(self) -> list[int]:
        """Return how many elements it goes over along each of its axes."""
        return [a for a in self.args if isinstance(a, int)]

    def is_input(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` lies in the memory of an input of the graph."""
        return memory_of(tensor) in self.inputs


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def lowering() -> Iterator[list[Graph]]:
    """Collect every graph that is compiled within, and count its calls. A compiled
    function then runs its graph on fake tensors, one operation after the other.
    """
    graphs: list[Graph] = []
    inner, plain = compile_fx.compile_fx_inner, compile_fx.compile_fx
    sources: list[str] = []

    def to_module(self: graph.GraphLowering) -> types.SimpleNamespace:
        code, _ = self.codegen()
        source = getattr(code, "value", code)
        sources.append(source)
        return types.SimpleNamespace(
            call=lambda args: None, __file__="/dev/null", key="none", value=source
        )

    def take(gm: fx.GraphModule, example_inputs, **kwargs) -> Callable[..., Any]:
        kept = copy.deepcopy(gm)
        with mock.patch.object(graph.GraphLowering, "compile_to_module", to_module):
            inner(gm, example_inputs, **kwargs)
        found = Graph(sources.pop())
        graphs.append(found)

        def call(args: list) -> Any:
            found.num_calls += 1
            flat = list(args)
            args.clear()
            return kept(*flat)

        call._boxed_call = True
        return call

    def whole(gm, inputs, *args, **kwargs):
        return plain(gm, inputs, *args, **{**kwargs, "inner_compile": take})

    options = {
        "force_disable_caches": True,
        "compile_threads": 1,
        "triton.autotune_at_compile_time": False,
    }
    with (
        config.patch(options),
        mock.patch.object(compile_fx, "compile_fx", whole),
        # the optimizer declines dispatch modes: here that is the mode of fake tensors
        mock.patch.object(compiled, "declined", lambda: None),
    ):
        compiled.graph_of.cache_clear()
        try:
            yield graphs
        finally:
            compiled.graph_of.cache_clear()  # no later step runs what was lowered


# ---- launches ------------------------------------------------------------------------


class _Kernels:
    """Stands for inductor's AsyncCompile: keeps sources, and notes launches."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        self.log: list[tuple[str, tuple]] = []

    def triton(self, name: str, source: str, *_, **__) -> types.SimpleNamespace:
        self.sources[name] = source
        return types.SimpleNamespace(
            run=lambda *args, **_: self.log.append((name, args))
        )

    def wait(self, scope: dict[str, Any]) -> None: ...


def _empty(size, stride, dtype=torch.float32, *_, **__) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _view(tensor: Tensor, size, stride, offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def launches(found: Graph) -> tuple[dict[str, str], list[Launch]]:
    """Return a graph's kernels, by name, and the launches of one call."""
    import torch._dynamo.testing as made

    kernels = _Kernels()
    scope: dict[str, Any] = {"__name__": "rehearsed"}
    with (
        mock.patch.object(async_compile, "AsyncCompile", lambda: kernels),
        mock.patch.object(  # a torch without CUDA has none
            torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True
        ),
        mock.patch.object(made, "rand_strided", _empty),
    ):
        exec(compile(found.source, "rehearsed.py", "exec"), scope)
        inputs = scope["get_args"]()
    scope.update(
        get_raw_stream=lambda index: 0,
        empty_strided_cuda=_empty,
        reinterpret_tensor=_view,
        assert_size_stride=lambda *args: None,
        assert_alignment=lambda *args: None,
    )
    memory = frozenset(memory_of(x) for x in inputs if isinstance(x, Tensor))
    scope["call"](list(inputs))
    return kernels.sources, [Launch(*launch, memory) for launch in kernels.log]
