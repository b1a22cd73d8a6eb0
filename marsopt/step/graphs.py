"""The runner of graphs: one torch.compile graph a formula, over parts (P, n) of any
size, which writes its results where its operands are. Without a compiler the same
functions run eagerly. Optimizers of a process share the graphs.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from marsopt.rules.component import Algorithm
from marsopt.rules.numerics import scalar_dtype
from marsopt.step import kernels
from marsopt.step.decide import Scalars
from marsopt.step.step import (
    REFERENCE,
    ROW,
    Formula,
    Leaves,
    Operands,
    Result,
    Results,
    masked,
    products,
    reference,
)

log = logging.getLogger(__name__)

SMALL = 4096  # elements; inductor chooses threads of a CPU by the first size

Say = Callable[[int, str], None]


# ---- whether and how to compile ------------------------------------------------------


@cache
def missing_for(device: torch.device) -> str | None:
    """What torch.compile and printed kernels lack here for ``device``, or None."""
    if device.type == "cpu":
        compilers = (
            [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "cl"]
        )
        if not any(shutil.which(name) for name in compilers):
            return f"no C++ compiler (looked for {', '.join(compilers)})"
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
            return "no Python headers (Python.h; Debian: apt-get install python3-dev)"
        return None
    from torch.utils._triton import has_triton  # ``import torch`` does not import it

    if not has_triton():
        return f"no Triton for {device.type}"
    if kernels.is_interpreted():
        return "no compiled kernel under TRITON_INTERPRET=1"
    why = kernels.why_not_built(device)
    return None if why is None else f"no kernel that Triton can build ({why})"


def resolve_compile(compile: bool | None, device: torch.device) -> bool:
    """Resolve the ``compile`` argument. None asks the machine, and logs the answer.

    Raises:
        RuntimeError: ``compile=True``, and nothing here can compile.
    """
    if compile not in (None, True, False):
        raise ValueError(
            f"got compile={compile!r}, expected None, True or False: None compiles "
            "where this machine can"
        )
    if compile is False:
        return False
    missing = missing_for(device)
    if missing is None:
        log.info(
            "marsopt: the optimizer step is compiled (compile=False turns this off)"
        )
        return True
    if compile:
        raise RuntimeError(
            f"got compile=True, expected a working compiler, found {missing}: install "
            "it or pass compile=False"
        )
    log.warning("marsopt: the optimizer step runs eagerly, since there is %s", missing)
    return False


@cache
def announce() -> None:
    """Say that compiling takes its time, once per process: until it is done, a first
    step looks as if it hung.
    """
    log.warning(
        "marsopt: compiling the formulas of the optimizer's step, once: 10 s to 90 "
        "on busy cores, less if torch's cache on disk has them; compile=False compiles "
        "nothing"
    )


@cache
def known_instructions() -> dict[str, bool]:
    """Return inductor's option that trusts what /proc/cpuinfo says of the CPU, instead
    of building and loading a program for it (six seconds), if the compiler is known
    to know these instructions, as GCC on x86 and Linux does from 11 on.
    """
    is_x86 = sys.platform == "linux" and platform.machine() == "x86_64"
    if not is_x86 or "CXX" in os.environ or shutil.which("g++") is None:
        return {}
    version = subprocess.run(
        ["g++", "-dumpversion"], capture_output=True, text=True, check=False
    ).stdout
    major = version.partition(".")[0].strip()
    is_known = major.isdigit() and int(major) >= 11
    return _known({"cpp.vec_isa_ok": True}) if is_known else {}


NUMBER = itertools.count(1)  # of every graph
LINES = 10_000  # more than a file has: a graph's line, modulo these, is its function's
KEPT = 128  # graphs of the process, the latest; an optimizer keeps its own beside them
OPTIONS = {
    "size_asserts": False,  # Dynamo's guards have asked them
    # TORCHINDUCTOR_CUDAGRAPHS=1 is for the model: a replay would write a new norm into
    # the ``grad_norm`` that a caller kept
    "triton.cudagraphs": False,
}
# A decision for each tensor is a few bytes in each of many steps. Inductor fuses loops
# that share data, ten bytes or more; here each loop for itself costs a launch.
SMALL_LOOPS = {"aggressive_fusion": True, "score_fusion_memory_threshold": 0}

Graph = Callable[[list[Tensor]], Any]


def compile_graph(
    function: Callable[..., Any], kind: Hashable, form: Hashable, dynamic: bool
) -> Graph:
    """Return the graph of ``function(kind, tensors)``, which takes the list of tensors.

    Dynamo keeps compiled code by code object, and limits the recompiles of a code
    object: each graph has its own. Profilers take its name from there, too.

    Args:
        function: reads nothing but its arguments; it may write into the tensors.
        kind: its static argument.
        form: whatever of the tensors the graph relies on: a key of the cache.
        dynamic: whether it takes tensors of any size; else it is of small tables.
    """

    def call(tensors: list[Tensor]) -> Any:
        return function(kind, tensors)

    name = function.__name__
    # Dynamo remembers by file, line and name which sizes have changed
    code = call.__code__
    line = code.co_firstlineno + next(NUMBER) * LINES
    code = code.replace(co_name=name, co_firstlineno=line)
    graph = types.FunctionType(code, globals(), name, None, call.__closure__)
    options: dict[str, Any] = {**_known(OPTIONS), **known_instructions()}
    options |= {} if dynamic else _known(SMALL_LOOPS)
    options["guard_filter_fn"] = guards
    return torch.compile(graph, fullgraph=True, dynamic=dynamic, options=options)


def guards(entries: Sequence[Any]) -> list[bool]:
    """Return which guards of a graph Dynamo keeps: all but those on its kind, which
    cannot fail. They are more than half of the guards.
    """
    return [entry.is_global or "kind" not in entry.name for entry in entries]


# Graphs are the process's: optimizers of one formula share them, and a sweep of
# learning rates compiles once. Graphs hold no tensor of an optimizer.
graph_of = lru_cache(maxsize=KEPT)(compile_graph)


def declined() -> str | None:
    """Return the mode that asks for eager steps, or None. Dynamo traces nothing there,
    and a fullgraph would raise.
    """
    if torch._C._len_torch_dispatch_stack():
        return "under a TorchDispatchMode"
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name) == "1":
            return f"with {name}=1"
    return None


def once() -> Callable[[int, str], None]:
    """A way to say things, each once."""
    return cache(lambda level, what: log.log(level, "marsopt: %s", what))


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that this inductor has: torch does not promise their names."""
    if not options:
        return {}
    from torch._inductor import list_options  # imported when something is compiled

    names = set(list_options())
    return {name: value for name, value in options.items() if name in names}


# ---- graphs of formulas --------------------------------------------------------------


class Update(NamedTuple):
    """The graph of a formula: everything but its tensors."""

    function: Formula
    algorithm: Algorithm
    names: tuple[str, ...]  # of its operands


def update(kind: Update, tensors: list[Tensor]) -> None:
    """Write the results of a formula into the operands of their names.

    Args:
        kind: says which tensors there are.
        tensors: ok (P,), the table (P, S), and operands (P, n).
    """
    ok, table, *operands = tensors
    by_name = dict(zip(kind.names, operands, strict=True))
    new = masked(kind.function, kind.algorithm, ok, table, by_name)
    for name, value in new.items():
        by_name[name].copy_(value)


def measure(is_long: bool, tensors: list[Tensor]) -> Tensor:
    """Return the inner products of g, the last, and of h, if tensors hold it (P, n)."""
    *of_h, g = tensors
    h = reference(dict(zip(REFERENCE, of_h, strict=False)))
    return products(g, h, is_long)


class Call(NamedTuple):
    """A function of tables, and its arguments but for tensors."""

    function: Callable[..., Any]
    spec: pytree.TreeSpec
    statics: tuple[Any, ...]  # the arguments' leaves; TENSOR in the place of a tensor


TENSOR = object()


def call(kind: Call, tensors: list[Tensor]) -> Any:
    """Return the result of a function of tables."""
    rest = iter(tensors)
    leaves = [next(rest) if leaf is TENSOR else leaf for leaf in kind.statics]
    return kind.function(*pytree.tree_unflatten(leaves, kind.spec))


class Graphs:
    """A runner that writes new values into operands.

    Graphs run eagerly under a TorchDispatchMode, so that CommDebugMode and
    FlopCounterMode count every operation, and with TORCH_COMPILE_DISABLE=1. An error of
    the compiler is raised, before anything is written.

    Args:
        device: of the tensors.
        compile: False = eager.
        say: told, with a level of logging, why graphs run eagerly.
    """

    writes, printed = True, frozenset[Algorithm]()
    # while a profile asks for it: of each run of a graph, in order, its key and how
    # many elements it went over
    runs: ClassVar[list[tuple[Hashable, int]] | None] = None

    def __init__(self, device: torch.device, *, compile: bool, say: Say) -> None:
        self._device, self._compile, self._say = device, compile, say
        # strong references: the process-wide cache may drop a graph that is in use
        self._graphs: dict[Hashable, Graph] = {}

    def reduce(self, leaves: Leaves, grads: Sequence[Tensor | None]) -> Tensor:
        of_h, sums = leaves.references, []
        dtype = scalar_dtype(self._device)
        for n, (leaf, g) in enumerate(zip(leaves.leaves, grads, strict=True)):
            if g is None or not g.numel():
                num = 3 if of_h[n] else 1
                sums.append(leaf.x.new_zeros(len(leaf.norms), num, dtype=dtype))
                continue
            tensors = [*of_h[n], g]
            sums.append(self._compute(measure, g.shape[1] >= ROW, tensors))
        return torch.cat(sums)

    def map(
        self, function: Formula, leaves: Leaves, operands: Operands, scalars: Scalars
    ) -> list[Results]:
        kind = Update(function, leaves.algorithm, tuple(operands))
        ok, table = scalars
        columns = zip(*operands.values(), strict=True)
        for rows, of_leaf in zip(leaves.rows, columns, strict=True):
            tensors = [x for x in of_leaf if x is not None]
            if len(tensors) == len(of_leaf) and tensors[0].numel():
                self._compute(update, kind, [ok[rows], table[rows], *tensors])
        return []

    def small(self, function: Callable[..., Result], *args: Any) -> Result:
        # a CPU takes no longer eagerly, where a graph takes seconds to compile
        if self._device.type == "cpu" or not self._compile or declined():
            return function(*args)
        leaves, spec = pytree.tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        statics = [TENSOR if isinstance(x, Tensor) else x for x in leaves]
        kind = Call(function, spec, tuple(statics))
        result: Result = self._compute(call, kind, tensors, dynamic=False)
        return result

    def _compute(
        self,
        function: Callable[[Any, list[Tensor]], Any],
        kind: Any,
        tensors: list[Tensor],
        dynamic: bool = True,
    ) -> Any:
        """Return ``function(kind, tensors)``, by a graph."""
        if not self._compile:
            return function(kind, tensors)
        if (off := declined()) is not None:
            self._say(logging.INFO, f"the optimizer step runs eagerly {off}")
            return function(kind, tensors)
        last = tensors[-1]
        forms: list[Hashable] = [self._device.type]
        is_column = False
        for t in tensors:
            forms.append(t.dtype)
            is_column = is_column or (t.ndim > 1 and t.shape[1] == 1)
        if dynamic:  # Dynamo makes graphs of their own for sizes of 1
            is_small = self._device.type == "cpu" and last.numel() < SMALL
            forms += [last.shape[0] == 1, is_column, is_small]
        else:
            forms += [(t.shape, t.stride()) for t in tensors]
        key = function, kind, tuple(forms), dynamic
        if self.runs is not None:
            self.runs.append((key, max(x.numel() for x in tensors)))
        graph = self._graphs.get(key)
        if graph is None:
            announce()
            graph = self._graphs[key] = graph_of(*key)
        return graph(tensors)
