"""python -m marsopt.profile: what a step of MARS costs on the tensors of a GPT-2."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from marsopt.optim.compiling import missing_for
from marsopt.profile.gpt2 import MODELS, VOCAB_SIZE, shapes, subject
from marsopt.profile.optimizer_report import OptimizerReport, profile_optimizer
from marsopt.rules.registry import REGISTRY

RULES = [name.replace("-", "_") for name in REGISTRY]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked.

    Raises:
        ValueError: something that cannot be profiled here.
    """
    parser = argparse.ArgumentParser(
        prog="python -m marsopt.profile",
        description="Profile the optimizer step on a GPT-2's tensors, with both clips: "
        "graphs, breaks, recompiles, kernels, bytes, times. For a step of your own: "
        "print(marsopt.profile(step_fn, *args)).",
    )
    parser.add_argument("--model", choices=MODELS, default="gpt2-small")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--width", type=int, help="instead of the model's own")
    parser.add_argument("--vocab", type=int, default=VOCAB_SIZE, help="rows of wte")
    parser.add_argument("--rule", choices=RULES, default="mars_adamw")
    parser.add_argument(
        "--h-dtype", choices=["float32", "bfloat16"], help="of the kept gradient"
    )
    parser.add_argument(
        "--gradients",
        choices=["apart", "joined"],
        default="apart",
        help="apart: as autograd leaves them; joined: one buffer per shape "
        "(MARS.join_gradients)",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=10, help="that are timed")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="reuse binaries on disk: sooner, but the first call's time means little",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Chrome trace")
    parser.add_argument(
        "--compile-log",
        type=Path,
        metavar="DIR",
        help="torch's structured compile log, for tlparse",
    )
    args = parser.parse_args(argv)
    depth, width = MODELS[args.model]
    args.layers = depth if args.layers is None else args.layers
    args.width = width if args.width is None else args.width
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Raises ValueError before anything is built."""
    for name in ("layers", "width", "vocab", "steps"):
        if getattr(args, name) < 1:
            raise ValueError(
                f"got --{name} {getattr(args, name)}, expected at least 1: give a "
                "positive number"
            )
    for name in ("json", "trace"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            raise ValueError(
                f"got --{name} {path}, expected a file in a folder that exists: make "
                f"{path.parent} first"
            )
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
    # x, g, h, m, v, packed gradients, and what Newton-Schulz or a copy takes beside
    tensors = shapes(args.layers, args.width, args.vocab)
    needed = 28 * sum(torch.Size(shape).numel() for shape in tensors.values())
    free = free_memory(args.device)
    if needed > free:
        raise ValueError(
            f"got a model that needs about {needed / 1e9:.0f} GB, expected at most the "
            f"{free / 1e9:.0f} GB that are free: take fewer --layers"
        )


def free_memory(device: str) -> int:
    """Bytes that can be allocated now; on a CPU Linux's own estimate, if it has one."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo")
    if not info.exists():
        return sys.maxsize
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def title(args: argparse.Namespace) -> str:
    """What was profiled, in words."""
    depth, width = MODELS[args.model]
    changed = "" if args.layers == depth else f", {args.layers} layers"
    changed += "" if args.width == width else f", width {args.width}"
    changed += "" if args.vocab == VOCAB_SIZE else f", vocabulary {args.vocab}"
    h = "" if args.h_dtype is None else f", h in {args.h_dtype}"
    return f"{args.rule} with both clips on {args.model}{changed}{h}"


def run(args: argparse.Namespace) -> OptimizerReport:
    """Profile what the arguments name."""
    found = subject(
        shapes(args.layers, args.width, args.vocab),
        args.rule.replace("_", "-"),
        num_steps=args.steps + 2,
        device=args.device,
        h_dtype=None if args.h_dtype is None else getattr(torch, args.h_dtype),
        joined=args.gradients == "joined",
    )
    return profile_optimizer(
        found,
        title=title(args),
        steps=args.steps,
        cold=not args.warm,
        device=args.device,
        trace=args.trace,
        compile_log=args.compile_log,
    )


def main() -> None:
    """The command."""
    args = arguments()
    report = run(args)
    print(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict(), indent=1) + os.linesep)
    for name in ("json", "trace", "compile_log"):
        path = getattr(args, name)
        if path is not None:
            print(f"{name.replace('_', ' '):14}{path}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
