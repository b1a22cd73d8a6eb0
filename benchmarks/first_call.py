"""Seconds of the first step, which compiles: with an empty cache on disk, and again in
a new process with the cache that the first left; and of the next optimizer of the same
shapes in that process, which takes the graphs that are there.

    python -m benchmarks.first_call [--layers 12] [--width 768] [--device cuda]

GPT-2's tensors without gradients of a model; what torch imports when it compiles is
part of it. Beside MARS, torch.compile of torch's own AdamW.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import checks
from marsopt import MARS
from marsopt.profiling.gpt2 import param_groups, shapes
from marsopt.profiling.machine import describe, one_line, seconds
from train.errors import command

RULES = {"MARS-AdamW": "mars-adamw", "Moonlight": "moonlight"}  # by contender
TORCH = "torch.compile(AdamW.step)"


def first_step(name: str, num_layers: int, width: int, device: str) -> float:
    """Return the seconds of the contender's first step, made for it."""
    torch.manual_seed(0)
    params = {
        key: nn.Parameter(0.02 * torch.randn(shape, device=device))
        for key, shape in shapes(num_layers, width).items()
    }
    for p in params.values():
        p.grad = 1e-3 * torch.randn_like(p)
    step: Callable[[], object]
    if name == TORCH:
        step = torch.compile(torch.optim.AdamW(params.values()).step)
    else:
        rule = RULES[name]
        groups = param_groups(params, rule)
        step = MARS(groups, mars_type=rule, max_norm=1.0, compile=True).step
    return seconds(step, device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", choices=[*RULES, TORCH], help=argparse.SUPPRESS)
    args = parser.parse_args()
    checks.device(args.device)
    if args.only:
        model = args.layers, args.width, args.device
        print(*(first_step(args.only, *model) for _ in range(2)))
        return
    print(f"seconds of the first step; {one_line(describe(args.device))}", flush=True)
    print(f"{'':28}   empty cache   kept cache   next optimizer")
    options = ["--layers", str(args.layers), "--width", str(args.width)]
    options += ["--device", args.device]
    for name in [*RULES, TORCH]:
        call = [sys.executable, "-m", "benchmarks.first_call", "--only", name, *options]
        with tempfile.TemporaryDirectory() as folder:
            there = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
            (cold, _), (warm, after) = (
                map(float, subprocess.check_output(call, env=there).split())
                for _ in range(2)
            )
        print(f"{name:28} {cold:13.1f} {warm:12.1f} {after:16.1f}", flush=True)


if __name__ == "__main__":
    command(main)
