"""python -m marsopt.profile: the cost of a step of MARS on the tensors of a GPT-2, or
of a model of the user's.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import pkgutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from marsopt.models.names import HIDDEN, by_name
from marsopt.models.roles import roles
from marsopt.profiling.gpt2 import EMBEDDINGS, MODELS, VOCAB_SIZE, Subject, shapes
from marsopt.profiling.machine import free_memory
from marsopt.profiling.optimizer import profile_optimizer
from marsopt.rules.registry import REGISTRY, canonical
from marsopt.step.graphs import declined, missing_for

# limits by which a call ends in an answer, not in hours of lists
MOST = {"layers": 100_000, "width": 2**20, "vocab": 2**24, "steps": 10**6}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, checked.

    Raises:
        ValueError: something that cannot be profiled here.
    """
    parser = argparse.ArgumentParser(
        prog="python -m marsopt.profile",
        description="Profile the optimizer step on a GPT-2's tensors or your model's, "
        "with the rule's clips: graphs, breaks, recompiles, kernels, bytes, times. For "
        "a step of your own: print(marsopt.profile(step_fn, *args)).",
    )
    add = parser.add_argument
    dtypes = ["float32", "bfloat16"]
    h_dtype = "dtype of the gradient that MARS keeps (default: the parameters' own)"
    warm = "reuse compiled code on disk: faster, but the first call's time means little"
    source = "print the source of every kernel, too"
    log = "write torch's structured compile log, for tlparse"
    own = "a function without arguments that returns a module or {name: shape}"
    of = f"{', '.join(MODELS)}, or MODULE:FUNCTION, {own}"
    add("--model", default="gpt2-small", help=f"{of} (default: %(default)s)")
    for name in ("--layers", "--width"):
        add(name, type=int, help=f"{name[2:]} of the GPT-2 (default: the model's own)")
    add(
        "--vocab",
        type=int,
        help=f"vocabulary size of the GPT-2 (default: {VOCAB_SIZE})",
    )
    rules = f"one of {', '.join(REGISTRY)} (default: %(default)s)"
    add("--rule", type=canonical, choices=[*REGISTRY], default="moonlight", help=rules,
        metavar="RULE")  # fmt: skip
    log_time = "let every decay in step t be t / (t + DELTA) (default: off)"
    add("--log-time", type=float, metavar="DELTA", help=log_time)
    add("--h-dtype", choices=dtypes, help=h_dtype)
    state = "dtype of averages (default: float32)"
    add("--state-dtype", choices=[*dtypes, "int8"], help=state)
    bits = "bfloat16 parameters, with the bits below them in the state (default: off)"
    add("--master-weight-bits", type=int, choices=[32, 24], help=bits)
    devices = "where to run (default: %(default)s)"
    add("--device", choices=["cpu", "cuda"], default="cpu", help=devices)
    add("--steps", type=int, default=10, help="calls to time (default: %(default)s)")
    add("--warm", action="store_true", help=warm)
    add("--source", action="store_true", help=source)
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    add("--trace", type=Path, metavar="FILE", help="write a Chrome trace")
    add("--compile-log", type=Path, metavar="DIR", help=log)
    args = parser.parse_args(argv)
    check(args)
    return args


def tensors_of(
    args: argparse.Namespace,
) -> tuple[dict[str, tuple[int, ...]], Collection[str]]:
    """Return the shapes of the model by name, and which are embeddings and heads.

    Raises:
        ValueError: a model that there is not, or sizes of another than a GPT-2.
    """
    if args.model in MODELS:
        depth, width = MODELS[args.model]
        sizes = (args.layers, depth), (args.width, width), (args.vocab, VOCAB_SIZE)
        chosen = [usual if size is None else size for size, usual in sizes]
        return shapes(*chosen), EMBEDDINGS
    for name in ("layers", "width", "vocab"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"got --{name} with --model {args.model}, expected it with a GPT-2: "
                "change the function"
            )
    return own_tensors(args.model)


def own_tensors(name: str) -> tuple[dict[str, tuple[int, ...]], Collection[str]]:
    """Return the shapes in the result of MODULE:FUNCTION, and the names of embeddings
    and heads: of a module by its layers, else by their names.

    Raises:
        ValueError: it cannot be had, or returns neither a module nor a mapping from
            names to tensors or shapes.
    """
    if not name.partition(":")[2]:
        raise ValueError(
            f"got --model {name}, expected one of {', '.join(MODELS)} or "
            "MODULE:FUNCTION: write it as mine:model"
        )
    try:
        build = pkgutil.resolve_name(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(
            f"got --model {name} ({error}), expected MODULE:FUNCTION that Python "
            "finds: run from its folder, or name that in PYTHONPATH"
        ) from error
    calls = callable(build) and not isinstance(build, nn.Module)
    model = build() if calls else build
    if isinstance(model, nn.Module):
        used = [(n, p, role) for n, p, role in roles(model) if p.requires_grad]
        found = {n: tuple(p.shape) for n, p, _ in used}
        tables = {n for n, p, role in used if p.ndim > 1 and role not in HIDDEN}
    elif isinstance(model, Mapping):
        found = {n: _shape(n, value) for n, value in model.items()}
        tables = {n for n, shape in found.items() if len(shape) > 1 and by_name(n)}
    else:
        found, tables = {}, set()
    if not found:
        raise ValueError(
            f"got {type(model).__name__} of --model {name}, expected a module or a "
            "mapping from names to shapes, with a parameter at least: return one"
        )
    return found, tables


def _shape(name: object, value: object) -> tuple[int, ...]:
    shape = value.shape if isinstance(value, torch.Tensor) else value
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if not isinstance(name, str) or not all(
        isinstance(size, int) and size > 0 for size in sizes or [None]
    ):
        raise ValueError(
            f"got {name!r:.60}: {value!r:.60} of --model, expected a name and a tensor "
            "or its sizes, such as (768, 768): return these"
        )
    return sizes


def check(args: argparse.Namespace) -> None:
    """Check the arguments before anything is built, and make the folders of files.

    Raises:
        ValueError: something that cannot be profiled here.
    """
    for name, value in vars(args).items():
        if value == []:  # argparse's, of --rule=--
            raise ValueError(f"got --{name}=--, expected a value: give one")
    for name, most in MOST.items():
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            limit = "at least 1" if value < 1 else f"at most {most}"
            raise ValueError(f"got --{name} {value}, expected {limit}: change it")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "got --device cuda on a machine without it, expected cpu: leave it out"
        )
    missing = missing_for(torch.device(args.device))
    missing = missing or (declined() or "").removeprefix("with ")
    if missing:
        raise ValueError(
            f"got {missing}, expected torch.compile to work: install it or unset that, "
            "since the profiler counts compiled graphs"
        )
    # x, g, h, m, v, and the temporaries of Newton-Schulz or a copy
    args.tensors, args.tables = tensors_of(args)
    needed = 28 * sum(map(math.prod, args.tensors.values()))
    free = free_memory(args.device)
    if needed > free:
        raise ValueError(
            f"got a model that needs about {needed / 1e9:.0f} GB, expected at most the "
            f"{free / 1e9:.0f} GB that are free: take fewer layers"
        )
    for name in ("json", "trace"):
        path = getattr(args, name)
        if path is not None:
            _make_folder(f"--{name}", path)


def _make_folder(option: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
    except OSError as error:
        raise ValueError(
            f"got {option} {path} ({error.strerror}), expected a file in a folder that "
            "exists or can be made: name another"
        ) from error


def title(args: argparse.Namespace) -> str:
    """Return the title of the report: the profiled model and rule."""
    changed = {
        f", {args.layers} layers": args.layers is not None,
        f", width {args.width}": args.width is not None,
        f", vocabulary {args.vocab}": args.vocab is not None,
        f", h in {args.h_dtype}": args.h_dtype is not None,
        f", weights of {args.master_weight_bits} bits": bool(args.master_weight_bits),
        f", averages in {args.state_dtype}": args.state_dtype is not None,
        f", log time {args.log_time}": args.log_time is not None,
    }
    more = "".join(text for text, differs in changed.items() if differs)
    return f"{args.rule} with its clips on {args.model}{more}"


def main() -> None:
    """Profile the model on the command line; exit with 2 if that cannot be done."""
    try:
        run(arguments())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped before its end: run the same command again", file=sys.stderr)
        sys.exit(130)


def run(args: argparse.Namespace) -> None:
    """Profile; print and write the report."""
    subject = Subject(
        args.tensors,
        args.rule,
        tables=args.tables,
        num_steps=args.steps + 2,
        device=args.device,
        h_dtype=args.h_dtype and getattr(torch, args.h_dtype),
        state_dtype=args.state_dtype and getattr(torch, args.state_dtype),
        stochastic_rounding=args.state_dtype == "bfloat16",
        master_weight_bits=args.master_weight_bits,
        log_time=args.log_time,
    )
    report = profile_optimizer(
        subject,
        title=title(args),
        steps=args.steps,
        cold=not args.warm,
        device=args.device,
        trace=args.trace,
        compile_log=args.compile_log,
    )
    print(report)
    if args.source:
        print(f"\n{report.source}\n")
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict(), indent=1) + os.linesep)
    for name in ("json", "trace", "compile_log"):
        path = getattr(args, name)
        if path is not None:
            print(f"{name.replace('_', ' '):14}{path}")
