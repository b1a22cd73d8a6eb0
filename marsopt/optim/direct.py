"""Compiled functions that are called past Dynamo. A call through it asks every guard of
a graph, those about Python objects too, which takes longer than the graph of a small
stack. Here a call that Dynamo has once led to a graph goes straight there as long as
its tensors, and what torch computes under, are alike.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from marsopt.functional.step_types import Stack, StepScalars

ROUTES = 8  # of one function that are kept: as many as Dynamo compiles of it

Pool = Sequence[Any]


class Graph:
    """What inductor has made of a graph, called with its inputs in their order.

    Dynamo keeps it as long as the code that calls it; nobody else may, so that nothing
    outlives ``torch.compiler.reset()``.
    """

    def __init__(self, run: Callable[..., Sequence[Any]], name: str) -> None:
        self.run, self.name = run, name

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        outputs = self.run(*inputs)
        seen = getattr(_calls, "seen", None)
        if seen is not None:
            seen.append((self, inputs, outputs))
        return outputs


_calls = threading.local()  # ``seen``: what ran inside of a call that is watched


def _inductor(
    module: Any, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Graph:
    """Compile with inductor: a backend for torch.compile."""
    from torch._guards import CompileContext
    from torch._inductor.compile_fx import compile_fx

    run = compile_fx(module, inputs, config_patches=options)
    return Graph(run, f"Torch-Compiled Region: {CompileContext.current_compile_id()}")


class Direct:
    """``function``, compiled by torch.compile and inductor.

    A call is direct where an earlier one, through Dynamo, has found the graph, and all
    that its guards may ask has been answered:

    - of all tensors among the arguments: type, dtype, device, shape, strides,
      requires_grad, dispatch keys, by the guard that Dynamo itself has for them; and
      that those which were one object are one now;
    - of the global state: modes of grad, autocast and determinism, number of threads,
      default dtype, and how many torch function modes are entered;
    - ``torch.compiler.set_stance`` has its default;
    - all else among the arguments has to be the same at every call with such tensors.

    Everything else goes through Dynamo, and so does a graph whose inputs overlap in
    memory, which AOTAutograd takes for parts of one tensor.

    Args:
        function: takes tensors in lists, tuples, dicts and stacks, and dataclasses that
            hold the same tensors at every call.
        options: of inductor.
    """

    def __init__(
        self, function: Callable[..., Any], options: Mapping[str, Any]
    ) -> None:
        self._compiled = torch.compile(
            function,
            backend=_inductor,
            fullgraph=True,
            dynamic=False,
            options=dict(options),
        )
        self._routes: list[_Route] = []

    def __call__(self, *args: Any) -> Any:
        leaves: list[Tensor] = []
        _collect(args, leaves)
        if self._routes and _stance_is_default():
            for route in self._routes:
                graph = route.graph()
                if graph is not None and route.fits(leaves):
                    return route.take(graph, leaves)
        return self._through_dynamo(args, leaves)

    def _through_dynamo(self, args: tuple[Any, ...], leaves: Sequence[Tensor]) -> Any:
        before = getattr(_calls, "seen", None)
        seen: list[Any] = []
        _calls.seen = seen
        try:
            found = self._compiled(*args)
        finally:
            _calls.seen = before
        if len(seen) == 1:
            graph, inputs, outputs = seen[0]
            route = _route(args, leaves, graph, inputs, outputs, found)
            if route is not None:
                alive = [one for one in self._routes if one.graph() is not None]
                self._routes = [route, *alive][:ROUTES]
        return found


def _stance_is_default() -> bool:
    # torch has no public way to ask; imported since something was compiled
    stance = torch._dynamo.eval_frame._stance
    return stance.stance == "default" and stance.backend is None


class _Route:
    """How a call's arguments reach a graph, and its outputs the result."""

    __slots__ = (
        "graph", "_tensors", "_state", "_num_leaves", "_num_modes", "_same", "_unique",
        "_order", "_fixed", "_build",
    )  # fmt: skip

    def __init__(
        self,
        graph: Graph,
        leaves: Sequence[Tensor],
        order: Sequence[int],
        fixed: Sequence[Tensor],
        build: Callable[[Pool], Any],
    ) -> None:
        # both are what Dynamo's own guards are made of, in torch 2.11 as in 2.14
        from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards

        firsts = _firsts(leaves)
        places = [firsts[id(leaf)] for leaf in leaves]
        self._same = [(i, first) for i, first in enumerate(places) if i != first]
        self._unique = sorted(set(places)) if self._same else None
        unique = self._distinct(leaves)
        self.graph = weakref.ref(graph)
        self._tensors = TensorGuards(  # a None among these would not be compared
            *unique,
            dynamic_dims_sizes=[list(leaf.shape) for leaf in unique],
            dynamic_dims_strides=[list(leaf.stride()) for leaf in unique],
        )
        self._state = GlobalStateGuard()
        self._num_leaves = len(leaves)
        self._num_modes = torch._C._len_torch_function_stack()
        self._order, self._fixed, self._build = order, list(fixed), build

    def _distinct(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._unique is None:
            return leaves
        return [leaves[i] for i in self._unique]

    def fits(self, leaves: Sequence[Tensor]) -> bool:
        """Return whether a call with these tensors may take it."""
        return (
            # of distinct objects: the guard refuses one that comes twice
            len(leaves) == self._num_leaves
            and self._tensors.check(*self._distinct(leaves))
            and self._state.check()
            and torch._C._len_torch_function_stack() == self._num_modes
            and all(leaves[i] is leaves[first] for i, first in self._same)
        )

    def take(self, graph: Graph, leaves: list[Tensor]) -> Any:
        """Return the function's result."""
        pool: list[Any] = leaves + self._fixed
        inputs = [pool[i] for i in self._order]
        # a trace shows it as Dynamo would; a range costs some microseconds
        if profiler._is_profiler_enabled:
            with profiler.record_function(graph.name):
                outputs = graph.run(*inputs)
        else:
            outputs = graph.run(*inputs)
        pool += outputs
        return self._build(pool)


def _route(
    args: tuple[Any, ...],
    leaves: Sequence[Tensor],
    graph: Graph,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    found: Any,
) -> _Route | None:
    """Return how a call that has led to ``graph`` can be repeated; None where it cannot
    be told, or inputs overlap.
    """
    fixed: list[Tensor] = []
    _collect_fixed(args, fixed)
    pool = [*leaves, *fixed]
    places = _firsts(pool)
    plain = all(type(leaf) in (Tensor, nn.Parameter) for leaf in pool)
    if not plain or any(id(one) not in places for one in inputs) or _overlap(inputs):
        return None
    for i, one in enumerate(outputs, len(pool)):
        places.setdefault(id(one), i)
    build = _builder(found, places)
    if build is None:
        return None
    return _Route(graph, leaves, [places[id(x)] for x in inputs], fixed, build)


def _firsts(values: Sequence[Any]) -> dict[int, int]:
    """Return where each object comes first, by its id."""
    found: dict[int, int] = {}
    for i, value in enumerate(values):
        found.setdefault(id(value), i)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    """Append the tensors that may be others at each call."""
    if isinstance(value, Tensor):
        found.append(value)
    elif type(value) is Stack:
        found += (value.x, value.g, *value.buffers.values(), *value.given.values())
        found += value.cuts.values()
        if value.rows is not None and value.rows.index is not None:
            found.append(value.rows.index)
    elif type(value) is StepScalars:
        found += (value.ok, value.grad_clip, *value.weights, *value.rule)
        found += value.behind or ()
        found += [x for x in (value.extrapolation, value.key) if x is not None]
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def _collect_fixed(value: Any, found: list[Tensor], *, inside: bool = False) -> None:
    """Append the tensors in dataclasses: an algorithm's numbers."""
    if isinstance(value, Tensor):
        if inside:
            found.append(value)
    elif is_dataclass(value):
        for field in fields(value):
            _collect_fixed(getattr(value, field.name), found, inside=True)
    elif isinstance(value, tuple | list):
        for item in value:
            _collect_fixed(item, found, inside=inside)
    elif isinstance(value, dict):
        for item in value.values():
            _collect_fixed(item, found, inside=inside)


def _builder(value: Any, places: Mapping[int, int]) -> Callable[[Pool], Any] | None:
    """Return a function that makes what ``value`` is out of a pool of tensors; None
    where one has no place there.
    """
    if isinstance(value, Tensor):
        place = places.get(id(value))
        return None if place is None else lambda pool: pool[place]
    if isinstance(value, dict):
        keys, parts = list(value), [_builder(v, places) for v in value.values()]
        if None in parts:
            return None
        return lambda pool: dict(zip(keys, [part(pool) for part in parts], strict=True))
    if isinstance(value, tuple | list):
        parts = [_builder(v, places) for v in value]
        if None in parts:
            return None
        if hasattr(value, "_fields"):
            return lambda pool: type(value)(*[part(pool) for part in parts])
        return lambda pool: type(value)([part(pool) for part in parts])
    return lambda pool: value


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Return whether two of them may share memory: where each begins and ends."""
    spans = []
    for x in tensors:
        if x.numel():
            last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
            spans.append((x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize))
    spans.sort()
    return any(a[1] > b[0] for a, b in zip(spans, spans[1:], strict=False))
