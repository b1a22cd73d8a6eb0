"""Whether this machine can compile, and compiled functions that do not share their
cache.
"""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
import types
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


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
    from torch.utils._triton import has_triton  # torch alone does not import it

    if has_triton():
        return None
    return f"no Triton for {device_type}"


def decide(compile: bool | None, device_type: str) -> bool:
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
        "marsopt: compiling the optimizer's step, once: some 30 s on a CPU, and less "
        "where torch's cache on disk has it; compile=False starts at once, but every "
        "step then takes longer, often several times as long"
    )


def compiled_where_possible(
    function: Callable,
    *,
    required: bool,
    say: Callable[[int, str], None],
    options: Mapping[str, Any] | None = None,
) -> Callable:
    """``function``, compiled; eager wherever dynamo declines to trace.

    It declines under a TorchDispatchMode (CommDebugMode, FlopCounterMode: the tools
    that count see every operation then) and with TORCH_COMPILE_DISABLE=1. Where the
    backend fails, while it compiles and so before anything is written, the function
    runs eagerly from then on.

    Args:
        function: takes and changes tensors; reads nothing else.
        required: raise where the backend fails.
        say: told, with a level of logging, why it runs eagerly.
        options: of inductor.
    """
    compiled = own_compile(function, options)
    broken = False

    def call(*args):
        nonlocal broken
        off = declined()
        if off is not None:
            say(logging.INFO, f"the optimizer step runs eagerly {off}")
        if broken or off is not None:
            return function(*args)
        announce()
        try:
            return compiled(*args)
        except Exception as error:
            if required or not backend_failed(error):
                raise
            broken = True
            why = str(error).partition("\n")[0]
            say(
                logging.WARNING,
                "the optimizer step runs eagerly, since compiling it failed "
                f"({type(error).__name__}: {why}); compile=True raises this error",
            )
            return function(*args)

    return call


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


def once() -> Callable[[int, str], None]:
    """A way to say things, each once."""
    return cache(lambda level, what: log.log(level, "marsopt: %s", what))


def own_compile(
    function: Callable, options: Mapping[str, Any] | None = None
) -> Callable:
    """torch.compile with a cache of its own.

    Dynamo keeps compiled code by code object: two optimizers that compile one function
    would share the limit on recompiles.
    """
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, fullgraph=True, dynamic=False, options=_known(options))


def _known(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return those that this inductor has: their names are no promise of torch's."""
    if options is None:
        return None
    from torch._inductor import list_options  # imported when something is compiled

    names = set(list_options())
    return {name: value for name, value in options.items() if name in names}
