"""Graphs over fake CUDA tensors, lowered by inductor to Triton source, and the launches
of that source: kernels with the tensors and sizes that they are called with.
"""

from __future__ import annotations

import contextlib
import copy
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._inductor import async_compile, compile_fx, config, graph

from benchmarks.gpu.rehearsal.device import NoGuard
from marsopt.optim import compiled


@dataclass(frozen=True)
class Graph:
    """What inductor made of one graph.

    Args:
        name: torch's compile id.
        function: the Python function that it came from.
        source: the wrapper's Python source, with every Triton kernel in it.
    """

    name: str
    function: str
    source: str


@dataclass(frozen=True)
class Launch:
    """One call of a kernel.

    Args:
        kernel: its name.
        args: its tensors (on meta) and its sizes.
        outside: memory of the graph's inputs, by the address of the storage.
    """

    kernel: str
    args: tuple[Any, ...]
    outside: frozenset[int]

    @property
    def sizes(self) -> list[int]:
        """Return how many elements it goes over along each of its axes."""
        return [a for a in self.args if isinstance(a, int)]

    def is_outside(self, tensor: Tensor) -> bool:
        """Return whether the graph was given ``tensor``, or its memory."""
        return _memory(tensor) in self.outside


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


Runner = Callable[..., Any]


@contextlib.contextmanager
def lowering(
    run: Callable[[Graph, fx.GraphModule], Runner] | None = None,
) -> Iterator[list[Graph]]:
    """Collect every graph that is compiled within. A compiled function then runs its
    graph on the (fake) tensors that it is called with, one operation after the other,
    or what ``run`` makes of the graph.

    Functions of the optimizer are compiled under dispatch modes, too: here that is the
    mode of fake tensors, which hides nothing.
    """
    graphs: list[Graph] = []
    inner, plain = compile_fx.compile_fx_inner, compile_fx.compile_fx
    sources: list[str] = []

    def to_module(self: graph.GraphLowering) -> types.SimpleNamespace:
        code, _ = self.codegen()
        sources.append(getattr(code, "value", code))
        return types.SimpleNamespace(
            call=lambda args: None,
            __file__="/dev/null",
            key="none",
            value=sources[-1],
        )

    def take(gm: fx.GraphModule, example_inputs, **kwargs) -> Runner:
        kept = copy.deepcopy(gm)
        with mock.patch.object(graph.GraphLowering, "compile_to_module", to_module):
            inner(gm, example_inputs, **kwargs)
        name = str(torch._guards.CompileContext.current_compile_id())
        found = Graph(name, _function(kept), sources.pop())
        graphs.append(found)
        runner = kept if run is None else run(found, kept)

        def call(args: list) -> Any:
            flat = list(args)
            args.clear()
            return runner(*flat)

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
        mock.patch.object(compiled, "declined", lambda: None),
    ):
        compiled.graph_of.cache_clear()
        try:
            yield graphs
        finally:
            compiled.graph_of.cache_clear()  # nobody else runs what was lowered


def _function(gm: fx.GraphModule) -> str:
    """Return the name of the function that was compiled: the outermost frame."""
    traces = (node.meta.get("stack_trace") for node in gm.graph.nodes)
    trace = next(filter(None, traces), "")
    return next(iter(re.findall(r", in (\w+)", trace)), "graph")


# ---- launches ------------------------------------------------------------------------

Noted = tuple[str, tuple]  # a kernel's name, and the arguments of one call


class Kernel:
    """Stands in a wrapper for a compiled kernel: notes its launches."""

    def __init__(self, name: str, source: str, log: list[Noted], run=None) -> None:
        self.name, self.source, self._log, self._run = name, source, log, run

    def run(self, *args, stream=None, **kwargs) -> None:
        """Note the launch; and run it, where somebody can."""
        self._log.append((self.name, args))
        if self._run is not None:
            self._run(self, *args, **kwargs)


class _Sources:
    """Stands for inductor's AsyncCompile, which would start compiling."""

    def __init__(self, log: list[Noted], run=None) -> None:
        self.found: dict[str, str] = {}
        self._log, self._run = log, run

    def triton(self, name: str, source: str, device_str: str = "cuda") -> Kernel:
        self.found[name] = source
        return Kernel(name, source, self._log, self._run)

    def wait(self, scope: dict[str, Any]) -> None: ...


@dataclass
class Wrapper:
    """A graph's wrapper, loaded: ``call`` runs it on tensors of ``device``.

    Args:
        call: takes a list of the graph's inputs.
        inputs: makes inputs of their shapes, on meta.
        sources: of kernels, by name.
        log: names of kernels and their arguments, of all calls.
    """

    call: Callable[[list], Any]
    inputs: Callable[[], list]
    sources: dict[str, str]
    log: list[Noted]


def load(source: str, *, device: str = "meta", run=None) -> Wrapper:
    """Return a graph's wrapper, whose kernels are ``run`` (by default not at all).
    Launches are noted in ``log``, and their tensors live as long as they are there.
    """
    log: list[Noted] = []
    kernels = _Sources(log, run)
    scope: dict[str, Any] = {"__name__": "rehearsed", "__file__": "rehearsed.py"}
    stream = mock.patch.object(  # a torch without CUDA has none
        torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True
    )
    made = mock.patch.object(async_compile, "AsyncCompile", lambda: kernels)
    with made, stream:
        exec(compile(source, "rehearsed.py", "exec"), scope)

    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def view(tensor, size, stride, offset=0):
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    def check(tensor, size, stride, *_):
        if tuple(tensor.shape) != tuple(size):
            raise AssertionError(f"got {tuple(tensor.shape)}, expected {tuple(size)}")

    scope.update(
        get_raw_stream=lambda index: 0,
        empty_strided_cuda=empty,
        reinterpret_tensor=view,
        assert_size_stride=check,
        assert_alignment=lambda *args: None,
    )

    def call(args: list) -> Any:
        with _no_device():
            return scope["call"](args)

    return Wrapper(call, lambda: _inputs(scope), kernels.found, log)


@contextlib.contextmanager
def _no_device() -> Iterator[None]:
    """Wrappers set the device that is there."""
    with (
        mock.patch.object(torch.cuda, "_DeviceGuard", NoGuard),
        mock.patch.object(torch.cuda, "set_device", lambda *args: None),
    ):
        yield


def _inputs(scope: dict[str, Any]) -> list:
    import torch._dynamo.testing as made

    def on_meta(size, stride, dtype=torch.float32, device="cpu", extra_size=0):
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    with mock.patch.object(made, "rand_strided", on_meta):
        return scope["get_args"]()


def launches(found: Graph) -> tuple[dict[str, str], list[Launch]]:
    """Return a graph's kernels, by name, and the launches of one call."""
    wrapper = load(found.source)
    inputs = wrapper.inputs()
    outside = frozenset(_memory(x) for x in inputs if isinstance(x, Tensor))
    wrapper.call(list(inputs))
    log = [Launch(name, args, outside) for name, args in wrapper.log]
    return wrapper.sources, log
