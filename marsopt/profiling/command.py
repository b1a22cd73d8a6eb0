"""python -m marsopt.profile: what a step of MARS costs on the tensors of a GPT-2."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

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
        description="Profile the optimizer step on a GPT-2's tensors, with both clips: "
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
    add("--model", choices=MODELS, default="gpt2-small")
    for name in ("--layers", "--width"):
        add(name, type=int, help="instead of the model's own")
    add("--vocab", type=int, default=VOCAB_SIZE, help="rows of wte")
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
    depth, width = MODELS[args.model]
    args.layers = depth if args.layers is None else args.layers
    args.width = width if args.width is None else args.width
    check(args)
    return args


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
        if not 1 <= value <= most:
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
    tensors = shapes(args.layers, args.width, args.vocab)
    needed, free = 28 * sum(map(math.prod, tensors.values())), free_memory(args.device)
    if needed > free:
        raise ValueError(
            f"got a model that needs about {needed / 1e9:.0f} GB, expected at most the "
            f"{free / 1e9:.0f} GB that are free: take fewer --layers"
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
    depth, width = MODELS[args.model]
    changed = {
        f", {args.layers} layers": args.layers != depth,
        f", width {args.width}": args.width != width,
        f", vocabulary {args.vocab}": args.vocab != VOCAB_SIZE,
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
        shapes(args.layers, args.width, args.vocab),
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
