"""Pretrain a GPT-2 in a plain loop, one method after the other, at equal tokens.

    python -m benchmarks.pretrain --data FOLDER [--model gpt2-small] [--tokens 100e6]
        [--methods adamw mars-adamw-transport ...] [--sweep 0.5 1 2] [--device cuda]
        [--limit SECONDS] [--json FILE] [--png FILE]

FOLDER holds train.bin and val.bin (uint16), as train.prepare or nanoGPT makes them, or
llm.c's shards. Every method starts from the same weights and sees the same batches; its
learning rate is the recipe's, or the best of a sweep around it at a smaller depth. With
--json, what is done is not done again: a call that --limit ended is continued by the
same command. torch, numpy and matplotlib are enough.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import checks
from benchmarks.pretrain import report
from benchmarks.pretrain.loop import Machine, Plan, Run, Tokens, TooLong, run
from benchmarks.pretrain.methods import DEFAULT, Method, method
from benchmarks.pretrain.study import Study
from marsopt.profiling.gpt2 import MODELS, NUM_POSITIONS, VOCAB_SIZE
from marsopt.profiling.machine import describe, matmul_rate
from train.data.token_files import Stream, open_raw, open_shard
from train.errors import UserError, check_least, command
from train.gpt2 import Shape

HEAD_WIDTH = 64


def arguments() -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pretrain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--data", type=Path, required=True, metavar="FOLDER", help="of token files")
    add("--model", default="gpt2-small", choices=MODELS)
    add("--layers", type=int, help="instead of the model's own number")
    add("--width", type=int, help=f"the same, in heads of {HEAD_WIDTH}")
    add("--vocab", type=int, default=VOCAB_SIZE, help="(%(default)s)")
    add("--methods", nargs="+", default=DEFAULT, metavar="NAME",
        help="a rule, with -transport or -exact behind it, or torch-adamw (default: "
        "eight of them)")
    add("--lrs", nargs="+", default=[], metavar="NAME=RATE", help="peak rates")
    add("--tokens", type=float, default=1e8, help="for every method (100e6)")
    add("--seq-len", type=int, default=NUM_POSITIONS, help="(%(default)s)")
    add("--batch", type=int, default=128, help="sequences a step (%(default)s)")
    add("--micro-batch", type=int, default=32, help="of one pass (%(default)s)")
    add("--warmup", type=float, default=0.1, help="share of the steps (%(default)s)")
    add("--floor", type=float, default=0.05, help="last rate / peak (%(default)s)")
    add("--held-out", type=int, default=512, help="sequences (%(default)s)")
    add("--validations", type=int, default=20, help="in a run (%(default)s)")
    add("--sweep", nargs="+", type=float, default=[], metavar="FACTOR",
        help="of the rates to try first; grids whose end is best grow")
    add("--extensions", type=int, default=3, help="of a grid, at most (%(default)s)")
    add("--sweep-layers", type=int, default=4, help="depth of its model (%(default)s)")
    add("--sweep-tokens", type=float, default=2e7, help="of its runs (20e6)")
    add("--seed", type=int, default=0)
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"],
        help="of products, by autocast (%(default)s)")
    add("--eager", action="store_true", help="do not compile")
    add("--limit", type=float, default=float("inf"), metavar="SECONDS",
        help="start nothing that would not end in time")
    add("--json", type=Path, metavar="FILE", help="everything; continued where it is")
    add("--png", type=Path, metavar="FILE", help="losses against tokens and seconds")
    # fmt: on
    args = parser.parse_args()
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Raise UserError where the command line does not fit together."""
    sizes = dict(layers=args.layers, width=args.width, vocab=args.vocab)
    sizes |= dict(seq_len=args.seq_len, batch=args.batch, tokens=args.tokens)
    sizes |= dict(micro_batch=args.micro_batch, held_out=args.held_out)
    sizes |= dict(sweep_layers=args.sweep_layers, sweep_tokens=args.sweep_tokens)
    check_least(1, **sizes, validations=args.validations)
    check_least(0, extensions=args.extensions)
    check_least(0, 1, warmup=args.warmup, floor=args.floor)
    for name in ("batch", "held_out"):
        if getattr(args, name) % args.micro_batch:
            raise UserError(
                f"got --{name.replace('_', '-')} {getattr(args, name)} and "
                f"--micro-batch {args.micro_batch}, expected a multiple of it: change "
                "one of the two"
            )
    width = args.width or MODELS[args.model][1]
    if width % HEAD_WIDTH:
        raise UserError(
            f"got --width {width}, expected a multiple of {HEAD_WIDTH}, which a head "
            "has: change it"
        )
    if len(args.sweep) == 1 or any(factor <= 0 for factor in args.sweep):
        raise UserError(
            f"got --sweep {args.sweep}, expected at least two positive factors: 0.5 1 2"
        )
    checks.outputs(args.json, args.png)
    checks.device(args.device)


def methods(args: argparse.Namespace) -> list[Method]:
    """Return what is asked for, at the rates that are given or the recipes'."""
    rates = {}
    for text in args.lrs:
        name, _, value = text.partition("=")
        try:
            rates[name] = float(value)
        except ValueError:
            rates[name] = 0.0
        if rates[name] <= 0 or name not in args.methods:
            raise UserError(
                f"got --lrs {text}, expected NAME=RATE with one of {args.methods} and "
                "a positive number: change it"
            )
    size = args.model.removeprefix("gpt2-")
    return [method(name, size, rates.get(name)) for name in dict.fromkeys(args.methods)]


def tokens(folder: Path, split: str) -> Tokens:
    """Return the tokens of a split, "train" or "val"."""
    raw, shards = folder / f"{split}.bin", sorted(folder.glob(f"*_{split}*.bin"))
    if shards and not raw.exists():
        return Stream([open_shard(path) for path in shards])
    return open_raw(raw)


def plan_of(args: argparse.Namespace, num_tokens: float, num_layers: int) -> Plan:
    """Return how runs of so many tokens go, at a depth."""
    width = args.width or MODELS[args.model][1]
    steps = max(1, round(num_tokens / (args.batch * args.seq_len)))
    return Plan(
        shape=Shape(
            num_layers=num_layers,
            num_heads=width // HEAD_WIDTH,
            width=width,
            block_size=args.seq_len,
            vocab_size=args.vocab,
        ),
        seq_len=args.seq_len,
        batch=args.batch,
        micro_batch=args.micro_batch,
        steps=steps,
        warmup=max(1, round(args.warmup * steps)),
        floor=args.floor,
        held_out=args.held_out,
        interval=-(-steps // args.validations),
        seed=args.seed,
        device=args.device,
        dtype=args.dtype,
        compile=not args.eager,
    )


def title(args: argparse.Namespace) -> str:
    """Return what is trained, in words."""
    changed = dict(layers=args.layers, width=args.width)
    if args.vocab != VOCAB_SIZE:
        changed["vocabulary"] = args.vocab
    own = [f"{name} {value}" for name, value in changed.items() if value is not None]
    return ", ".join([args.model, *own])


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Run what is not done yet; return everything, ready for ``report``."""
    depth = args.layers or MODELS[args.model][0]
    chosen, began = methods(args), time.perf_counter()
    swept = plan_of(args, args.sweep_tokens, min(depth, args.sweep_layers))
    found = Study(
        plan=plan_of(args, args.tokens, depth),
        sweep_plan=replace(swept, interval=swept.steps),  # its last loss counts alone
        factors=args.sweep,
        extensions=args.extensions,
        path=args.json,
    )
    found.load()
    about = describe(args.device)
    rate = matmul_rate(args.device, getattr(torch, args.dtype))
    machine = Machine(about.get("gpu", about["cpu"]), rate)
    not_run: list[str] = []
    found.about = dict(model=title(args), machine=about, not_run=not_run)
    data = tokens(args.data, "train"), tokens(args.data, "val")

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def train(method: Method, plan: Plan) -> Run:
        left = args.limit - (time.perf_counter() - began)
        if left <= 0:
            raise TooLong(f"{method.name}: no time is left")
        tell(f"{method.name} at lr {method.lr:.3g}, {plan.shape.num_layers} layers")
        own = dict(machine=machine, seconds_left=left, tell=tell)
        done = run(method, plan, *data, **own)
        if plan is found.plan:
            found.runs.append(done)
        return done

    for each in chosen:
        try:
            each = found.best(each, train)
            same = [r for r in found.runs if r.method == each.name]
            if not any(math.isclose(r.lr, each.lr) for r in same):
                train(each, found.plan)
        except TooLong as error:
            not_run.append(f"{error}; nor what comes after it")
            found.save()
            break
        except RuntimeError as error:  # no memory, a backend: others may do better
            not_run.append(f"{each.name}: {type(error).__name__}: {error}"[:500])
        found.save()
    names = [each.name for each in chosen]
    found.runs.sort(key=lambda r: names.index(r.method) if r.method in names else 99)
    done = dict(edges=found.edges, trials=found.trials, runs=found.runs)
    return found.about | dict(plan=vars(found.plan)) | done


def main() -> None:
    """Run the command."""
    args = arguments()
    found = study(args)
    if not found["runs"]:
        raise UserError(
            f"got no run that ends in time ({found['not_run']}), expected one: give a "
            "larger --limit, or fewer --tokens"
        )
    print(report.table(found))
    if args.png is not None:
        report.draw(found, args.png)


if __name__ == "__main__":
    command(main)
