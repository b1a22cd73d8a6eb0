"""The parts of a step, compiled: whether this machine can, and one commit at the rim:
results go into the tensors that hold them, inside the compiled region.
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
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import profiler

from marsopt.functional import step
from marsopt.functional.step import Each, Move, Result
from marsopt.functional.step_types import (
    Decision,
    Formula,
    Hyperparameters,
    RuleGroup,
    Stack,
    StackScalars,
    formula,
)
from marsopt.optim.portions import batch_dtype
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.matrices import MatrixRows

log = logging.getLogger(__name__)

# ---- whether and how to compile ------------------------------------------------------


@cache
def missing_for(device_type: str) -> str | None:
    """What torch.compile lacks here for ``device_type``, or None."""
    if device_type == "cpu":
        compilers = (
            [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "cl"]
        )
        if not any(shutil.which(name) for name in compilers):
            return f"no C++ compiler (looked for {', '.join(compilers)})"
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
            return "no Python headers (Python.h; Debian: apt-get install python3-dev)"
        return None
    from torch.utils._triton import has_triton  # ``import torch`` does not import it

    if has_triton():
        return None
    return f"no Triton for {device_type}"


def resolve_compile(compile: bool | None, device_type: str) -> bool:
    """Resolve the ``compile`` argument. None asks the machine, and says what came out.

    Raises:
        RuntimeError: ``compile=True`` where nothing can compile.
    """
    if compile not in (None, True, False):
        raise ValueError(
            f"got compile={compile!r}, expected None, True or False: None compiles "
            "where this machine can"
        )
    if compile is False:
        return False
    missing = missing_for(device_type)
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
        "marsopt: compiling the optimizer's step, once: some 10 s, on a GPU up to 30, "
        "and less where torch's cache on disk has it; compile=False starts at once, "
        "but every step then takes longer, often several times as long"
    )


@cache
def known_instructions() -> dict[str, bool]:
    """Return inductor's option that trusts what /proc/cpuinfo says of the CPU, instead
    of building and loading a program for it (six seconds), where the compiler is known
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


def compile_graph(
    function: Callable[..., Any], device: torch.device, form: Any
) -> Callable[[list[Tensor]], Any]:
    """Return the graph of ``function`` for arguments of one form: it takes the flat
    list of their tensors.

    All that is static is in its closure, and a call chooses its graph by that. So a
    graph does not recompile, and Dynamo's guards ask its tensors and little else:
    ``guards`` leaves out the form's, and inductor's code does not ask sizes again.

    Dynamo keeps compiled code by code object, and limits how often it recompiles one:
    each graph has its own. Profilers take its name from there, too.

    Args:
        function: takes and changes tensors, in what ``flatten`` knows; reads nothing
            else. ``step.update`` and ``step.apply`` are compiled ``in_place``.
        device: of the tensors.
        form: of the arguments, by ``flatten``.
    """
    parts = in_place(function) if function in MOVES else function

    def call(tensors: list[Tensor]) -> Any:
        return parts(*rebuilt(form, iter(tensors)))

    name = parts.__name__
    # Dynamo remembers by file, line and name which sizes have changed, and compiles for
    # any size then; shapes are of the form. (dynamic=False would say that, too, for 7
    # microseconds a call.)
    code = call.__code__
    line = code.co_firstlineno + next(NUMBER) * LINES
    code = code.replace(co_name=name, co_firstlineno=line)
    graph = types.FunctionType(code, globals(), name, None, call.__closure__)
    options = _known(SMALL_LOOPS if function in DECISIONS else {}) | _known(UNASKED)
    options |= known_instructions() if device.type == "cpu" else {}
    options["guard_filter_fn"] = guards
    return torch.compile(graph, fullgraph=True, options=options)


def guards(entries: Sequence[Any]) -> list[bool]:
    """Return which guards of a graph Dynamo keeps: all but those on its form, which
    cannot fail. They are more than half of the guards.
    """
    return [entry.is_global or "form" not in entry.name for entry in entries]


# Graphs are the process's, so that an optimizer compiles nothing of what another one of
# its shapes has compiled: a sweep of learning rates compiles once. They hold no tensor
# of either.
graph_of = lru_cache(maxsize=KEPT)(compile_graph)


TENSOR = object()  # stands for a tensor whose form follows from other tensors


class TensorForm(NamedTuple):
    """The properties of a tensor on which a graph relies."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Form:
    """The structure of a value beside the tensors in it: ``make(*parts)``, where parts
    are forms. Equal forms are one object, whose hash costs nothing.
    """

    make: Callable[..., Any]
    parts: tuple[Hashable, ...]


FORMS: MutableMapping[Hashable, Form] = WeakValueDictionary()


def flatten(value: Any, tensors: list[Tensor]) -> Any:
    """Append all tensors in ``value``, and return the remaining form, hashable:
    ``rebuilt`` joins the two again.

    Args:
        value: a tensor, an algorithm, a named tuple, dict, tuple or list of these;
            anything else is static. A list of nothing but tensors has one for each of
            the stacks beside it.
        tensors: to be appended to.
    """
    kind = type(value)
    if kind is Stack and value.flat is not None:
        form, held = value.flat
        tensors += held
        return form
    # the form of its stack says of which shape they are
    if kind is StackScalars or (kind is list and set(map(type, value)) == {Tensor}):
        tensors += value
        return (TENSOR,) * len(value)
    if kind in (list, tuple):
        return tuple([flatten(item, tensors) for item in value])
    if isinstance(value, Tensor):
        # Dynamo takes a 0-D one of float64 for a Python number, and then traces twice
        tensors.append(value if value.ndim else value.view(1))
        return TensorForm(value.shape, value.stride(), value.dtype)
    if isinstance(value, Algorithm):
        return formula(value)
    if isinstance(value, Mapping):
        return _form(dict, [flatten([*value.items()], tensors)])
    if kind is Hyperparameters:  # which a graph reads ``from_rows``
        value = value._replace(lr=None, gamma=None)
    elif kind not in (Stack, MatrixRows):
        return value
    return _form(kind, [flatten(item, tensors) for item in value])


def _form(make: Callable[..., Any], parts: Iterable[Hashable]) -> Form:
    key = make, tuple(parts)
    form = FORMS.get(key)
    return FORMS.setdefault(key, Form(*key)) if form is None else form


def rebuilt(form: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the value of which ``flatten`` made the ``form`` and the ``tensors``."""
    if form is TENSOR:
        return next(tensors)
    if isinstance(form, TensorForm):
        return next(tensors) if form.shape else next(tensors)[0]
    if isinstance(form, Formula):
        return form.algorithm
    if isinstance(form, Form):
        value = form.make(*[rebuilt(part, tensors) for part in form.parts])
        return value.from_rows() if form.make is Hyperparameters else value
    if type(form) is tuple:
        return tuple([rebuilt(item, tensors) for item in form])
    return form


def declined() -> str | None:
    """Where dynamo traces nothing now, or None."""
    if torch._C._len_torch_dispatch_stack():
        return "under a TorchDispatchMode"
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name) == "1":
            return f"with {name}=1"
    return None


def backend_failed(error: Exception) -> bool:
    """Return whether a compiled function has failed before it ran."""
    from torch._dynamo.exc import ShortenTraceback  # of BackendCompilerFailed, too

    return isinstance(error, ShortenTraceback)


def is_spent(error: Exception) -> bool:
    """Return whether Dynamo refuses to compile a graph yet again, for tensors or modes
    that it has not met before: a new graph has a limit of its own.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def once() -> Callable[[int, str], None]:
    """A way to say things, each once."""
    return cache(lambda level, what: log.log(level, "marsopt: %s", what))


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those that this inductor has: their names are no promise of torch's."""
    if not options:
        return {}
    from torch._inductor import list_options  # imported when something is compiled

    names = set(list_options())
    return {name: value for name, value in options.items() if name in names}


# ---- running a step in place ---------------------------------------------------------

# A decision for each tensor is a few bytes in each of many steps. Inductor fuses loops
# that share data, ten bytes or more; here each loop for itself costs a launch.
SMALL_LOOPS = {"aggressive_fusion": True, "score_fusion_memory_threshold": 0}
UNASKED = {"size_asserts": False}  # Dynamo's guards have asked them
DECISIONS = step.assess_alone, step.decide_alone, step.decide
MOVES = step.update, step.apply
RANGES = {
    step.assess_alone: "marsopt: norms",
    step.products: "marsopt: norms",
    step.decide: "marsopt: norms",
    step.decide_alone: "marsopt: norms",
    step.update: "marsopt: update",
    step.apply: "marsopt: update",
}


def named_range(name: str) -> AbstractContextManager[object]:
    """Return a range of this name in the trace of the profiler that runs, if one does:
    entering and leaving a range costs some microseconds.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(name)
    return nullcontext()


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step.update`` or ``step.apply`` over lists of stacks, whose results are
    written into the tensors that hold them. Its graph is called after it, with the
    underscore of what writes in place.
    """

    def moved_(stacks: Sequence[Stack], *columns: Sequence[Any]) -> list[Tensor | None]:
        more = []
        for old, *entries in zip(stacks, *columns, strict=True):
            new, extra = function(old, *entries)
            _commit(old, new)
            more.append(extra)
        return more

    moved_.__name__ = f"{function.__name__}_"
    return moved_


def _commit(old: Stack, new: Stack) -> None:
    """Write new tensors into the tensors that hold them."""
    if new.x is not old.x:
        old.x.copy_(new.x)
    for symbol, buffer in old.buffers.items():
        if new.buffers[symbol] is not buffer:
            buffer.copy_(new.buffers[symbol])


def matrix_outputs(
    stacks: Sequence[Stack], part: Sequence[int], batches: Sequence[Hashable]
) -> list[Tensor | None]:
    """Return rows of a new batch for the matrices of a portion, by position, shaped as
    their stacks; None for other stacks.

    Args:
        stacks: all of them.
        part: the stacks of one portion, of one batch or of none.
        batches: of every stack, the key of its batch; None: it is in none.
    """
    rows: list[Tensor | None] = [None] * len(stacks)
    part = [i for i in part if batches[i] is not None]
    if not part:
        return rows
    sizes = [stacks[i].x.numel() for i in part]
    first = stacks[part[0]]
    dtype = batch_dtype(first.algorithm, first.x, first.x.device.type)
    batch = first.x.new_empty(sum(sizes), dtype=dtype)
    for i, row in zip(part, batch.split(sizes), strict=True):
        rows[i] = row.view(stacks[i].x.shape)
    return rows


class InPlace:
    """A ``step.Run`` that writes into the stacks that it is given.

    Two graphs move an elementwise algorithm: statistics with all that is decided from
    them, and the update. A matrix algorithm has a third, after its owners' work.
    Where there are several calls, or other ranks have to be asked, the decision is a
    graph of its own, or eager on a CPU. Calls of a graph share it and never recompile.

    Ranges named "marsopt: ..." show the parts in a profiler's trace.

    Compiled parts run eagerly wherever Dynamo declines to trace: under a
    TorchDispatchMode (CommDebugMode, FlopCounterMode: the tools that count see every
    operation then) and with TORCH_COMPILE_DISABLE=1. Where the backend fails, while it
    compiles and so before anything is written, all parts run eagerly until the layout
    is another one.

    Args:
        portions: which stacks go through a step together, and of these, which stacks
            each call of a graph moves.
        batches: of every stack, the key of the batch in which its matrices are rows;
            None: they are in none.
        device: of the parameters.
        is_local: whether one process has everything.
        compile: False = eager.
        required: whether a backend that fails raises.
        say: told, with a level of logging, why parts run eagerly.
    """

    def __init__(
        self,
        portions: Sequence[Sequence[Sequence[int]]],
        batches: Sequence[Hashable],
        *,
        device: torch.device,
        is_local: bool,
        compile: bool,
        required: bool,
        say: Callable[[int, str], None],
    ) -> None:
        self.calls = [call for portion in portions for call in portion]
        self._portions = [[i for call in portion for i in call] for portion in portions]
        self._device = device
        self.is_fused = is_local and len(self.calls) == 1
        self._batches = batches
        self._compile, self._required = compile, required
        # those that this layout calls stay, however many other optimizers have
        self._graphs: dict[Hashable, Callable[[list[Tensor]], Any]] = {}
        self._say = say
        self._decided: list[Tensor] = []  # the first decision, and views of it
        self._scalars: list[StackScalars] = []

    def _run(self, function: Callable[..., Any], off: str | None, *args: Any) -> Any:
        """Return ``function(*args)``, compiled; it writes its tensors in place.

        A decision by itself is a few numbers: a CPU takes no longer eagerly, where a
        graph takes seconds to compile.

        Args:
            function: a part of the step.
            off: what ``declined`` has returned, asked once for many calls.
            args: the function's.
        """
        decides = function in (step.decide, step.decide_alone)
        is_small = decides and self._device.type == "cpu"
        if self._compile and off is not None:
            self._say(logging.INFO, f"the optimizer step runs eagerly {off}")
        if self._compile and off is None and not is_small:
            try:
                return self._run_graph(function, args)
            except Exception as error:
                if self._required or not backend_failed(error):
                    raise
                self._compile = False
                why = str(error).partition("\n")[0]
                self._say(
                    logging.WARNING,
                    "the optimizer step runs eagerly, since compiling it failed "
                    f"({type(error).__name__}: {why}); compile=True raises this error",
                )
        return (in_place(function) if function in MOVES else function)(*args)

    def _run_graph(self, function: Callable[..., Any], args: Any) -> Any:
        tensors: list[Tensor] = []
        key = function, self._device, flatten(args, tensors)
        graph = self._graphs.get(key)
        if graph is None:
            announce()
            graph = self._graphs[key] = graph_of(*key)
        try:
            return graph(tensors)
        except Exception as error:
            if not is_spent(error):
                raise
        graph = self._graphs[key] = compile_graph(*key)
        return graph(tensors)

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        with named_range(RANGES[function]):
            result: Result = self._run(function, declined(), *args)
        return result

    def run_collective(
        self, what: str, function: Callable[..., Result], *args: Any
    ) -> Result:
        with named_range(f"marsopt: {what}"):
            return function(*args)

    def each(
        self, function: Each, stacks: Sequence[Stack], grads: Sequence[Tensor]
    ) -> list[Tensor]:
        with named_range(RANGES[function]):
            return self._by_calls(function, stacks, grads)

    def move(
        self, function: Move, stacks: Sequence[Stack], *columns: Sequence[Any]
    ) -> tuple[list[Stack], list[Tensor | None]]:
        with named_range(RANGES[function]):
            return list(stacks), self._by_calls(function, stacks, *columns)

    def per_stack(
        self, groups: Sequence[RuleGroup], decision: Decision
    ) -> list[StackScalars]:
        """Return views of the first decision, into which later ones are copied."""
        pairs = zip(groups, decision.ok, strict=True)
        oks = [group.hyper.per_part(ok) for group, ok in pairs]
        tables = [table for group in decision.tables for table in group.values()]
        if not self._scalars:
            self._decided = [*oks, *tables]
            self._scalars = step.per_stack(groups, decision._replace(ok=oks))
        else:
            torch._foreach_copy_(self._decided, [*oks, *tables])
        return self._scalars

    def portions(self, stacks: Sequence[Stack]) -> Sequence[Sequence[int]]:
        return self._portions

    def matrix_outputs(
        self, stacks: Sequence[Stack], part: Sequence[int]
    ) -> list[Tensor | None]:
        return matrix_outputs(stacks, part, self._batches)

    def store(
        self, ok: Tensor, old: tuple[Tensor, ...], new: tuple[Tensor | None, ...]
    ) -> None:
        for o, n in zip(old, new, strict=True):
            if n is not None:
                torch.where(ok, n.to(o.dtype), o, out=o)

    def _by_calls(
        self,
        function: Callable[..., Any],
        stacks: Sequence[Any],
        *columns: Sequence[Any],
    ) -> list[Any]:
        """Return what ``function`` of lists gives, call by call, one item per stack.
        Stacks whose first of ``columns`` is None are skipped.
        """
        results: list[Any] = [None] * len(stacks)
        off = declined()
        for call in self.calls:
            positions = [i for i in call if columns[0][i] is not None]
            if not positions:
                continue
            lists = [[column[i] for i in positions] for column in (stacks, *columns)]
            parts = self._run(function, off, *lists)
            for i, part in zip(positions, parts, strict=True):
                results[i] = part
        return results
