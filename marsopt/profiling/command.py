"""python -m marsopt.profile: what a step of MARS costs on the tensors of a GPT-2,
or of a model of yours.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from marsopt.optim.compiled import declined, missing_for
from marsopt.profiling.gpt2 import MODELS, VOCAB_SIZE, Subject, shapes
from marsopt.profiling.machine import free_memory
from marsopt.profiling.optimizer import profile_optimizer
from marsopt.rules.registry import REGISTRY, canonical

# by which a call ends in an answer, not in hours of lists
MOST = {"layers": 100_000, "width": 2**20, "vocab": 2**24, "steps": 10**6}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, checked.

    Raises:
        ValueError: something that cannot be profiled here.
    """
    parser = argparse.ArgumentParser(
        prog="python -m marsopt.profile",
        description="Profile the optimizer step on a model's tensors, with both clips: "
        "graphs, breaks, recompiles, kernels, bytes, times. For a step of your own: "
        "print(marsopt.profile(step_fn, *args)).",
    )
    add = parser.add_argument
    dtypes = ["float32", "bfloat16"]
    apart = (
        "apart: as autograd leaves them; joined: one buffer per shape "
        "(MARS.join_gradients)"
    )
    warm = "reuse binaries on disk: sooner, but the first call's time means little"
    log = "torch's structured compile log, for tlparse"
    model = (
        f"one of {', '.join(MODELS)}, or MODULE:FUNCTION: it returns a torch.nn.Module "
        "(built on the meta device) or {name: shape} (default: %(default)s)"
    )
    add("--model", default="gpt2-small", help=model)
    for name in ("--layers", "--width"):
        add(name, type=int, help="instead of the GPT-2's own")
    add("--vocab", type=int, help=f"rows of wte (default: {VOCAB_SIZE})")
    add("--rule", type=canonical, choices=list(REGISTRY), default="mars-adamw")
    add("--correction", choices=["approximate", "transport"], default="approximate")
    add("--h-dtype", choices=dtypes, help="of the kept gradient")
    add("--gradients", choices=["apart", "joined"], default="apart", help=apart)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--steps", type=int, default=10, help="that are timed")
    add("--warm", action="store_true", help=warm)
    add("--json", type=Path, metavar="FILE", help="everything")
    add("--trace", type=Path, metavar="FILE", help="Chrome trace")
    add("--compile-log", type=Path, metavar="DIR", help=log)
    args = parser.parse_args(argv)
    check(args)
    return args


def tensors(args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of ``--model``, by name.

    Raises:
        ValueError: no such model or function, or a function that returns neither a
            model nor shapes.
    """
    if args.model in MODELS:
        depth, width = MODELS[args.model]
        return shapes(
            args.layers or depth, args.width or width, args.vocab or VOCAB_SIZE
        )
    for name in ("layers", "width", "vocab"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"got --{name} with --model {args.model}, expected it with "
                f"{', '.join(MODELS)}: leave it out"
            )
    return user_shapes(args.model)


def user_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the function at ``path``, "module:function", returns, or
    those of the parameters of the model that it returns.

    Raises:
        ValueError: no such module or function, or it returns something else.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(
            f"got --model {path}, expected one of {', '.join(MODELS)}, or "
            "module:function: change it"
        )
    try:
        module = pkgutil.resolve_name(f"{module_name}:")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"got --model {path} ({error}), expected a module that can be imported: "
            "run in its folder, or set PYTHONPATH"
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        raise ValueError(
            f"got --model {path}, expected a function {name} in {module_name}: name "
            "one that it has"
        )
    with torch.device("meta"):
        model = function()
    if isinstance(model, nn.Module):
        return {n: tuple(p.shape) for n, p in model.named_parameters()}
    if isinstance(model, Mapping) and model and all(map(_is_shape, model.values())):
        return {str(n): tuple(shape) for n, shape in model.items()}
    raise ValueError(
        f"got {type(model).__name__} from {path}, expected a torch.nn.Module or "
        "{name: shape}, each shape a tuple of positive integers: return one of these"
    )


def _is_shape(shape: object) -> bool:
    return isinstance(shape, Sequence) and all(
        isinstance(size, int) and size > 0 for size in shape
    )


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
    missing = missing_for(args.device)
    if missing is not None:
        raise ValueError(
            f"got {missing}, expected what torch.compile needs: install it, since the "
            "profiler counts compiled graphs"
        )
    off = declined()
    if off is not None:
        raise ValueError(
            f"got {off.removeprefix('with ')}, expected torch.compile to work: unset "
            "it, since the profiler counts compiled graphs"
        )
    # x, g, h, m, v, packed gradients, and what Newton-Schulz or a copy takes beside
    num_params = sum(map(math.prod, tensors(args).values()))
    needed, free = 28 * num_params, free_memory(args.device)
    if needed > free:
        raise ValueError(
            f"got a model that needs about {needed / 1e9:.0f} GB, expected at most the "
            f"{free / 1e9:.0f} GB that are free: take fewer --layers, or a smaller "
            "model"
        )
    for name in ("json", "trace"):
        path = getattr(args, name)
        if path is not None:
            _make_folder(f"--{name}", path)


def _make_folder(option: str, path: Path) -> None:
    why = "it is a folder"
    if not path.is_dir():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return
        except OSError as error:
            why = str(error.strerror)
    raise ValueError(
        f"got {option} {path} ({why}), expected a file in a folder that exists or can "
        "be made: name another"
    )


def title(args: argparse.Namespace) -> str:
    """Return what was profiled, in words."""
    changed = {
        f", {args.layers} layers": args.layers is not None,
        f", width {args.width}": args.width is not None,
        f", vocabulary {args.vocab}": args.vocab is not None,
        f", h in {args.h_dtype}": args.h_dtype is not None,
        f", {args.correction}": args.correction != "approximate",
    }
    more = "".join(text for text, differs in changed.items() if differs)
    return f"{args.rule} with both clips on {args.model}{more}"


def main() -> None:
    """Profile what the command line names; exit with 2 where that cannot be done."""
    try:
        run(arguments())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped before its end: run the same command again", file=sys.stderr)
        sys.exit(130)


def run(args: argparse.Namespace) -> None:
    """Profile; print and write what came out."""
    subject = Subject(
        tensors(args),
        args.rule,
        num_steps=args.steps + 2,
        device=args.device,
        h_dtype=args.h_dtype and getattr(torch, args.h_dtype),
        joined=args.gradients == "joined",
        correction=args.correction,
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
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict(), indent=1) + os.linesep)
    for name in ("json", "trace", "compile_log"):
        path = getattr(args, name)
        if path is not None:
            print(f"{name.replace('_', ' '):14}{path}")
