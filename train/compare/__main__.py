"""python -m train.compare --configs A B C --out DIR [--lrs ...] [--sweep ...] ..."""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from train.compare.sweep import MOST_SEEDS, rounded
from train.engine.launch import console
from train.errors import UserError, check_least, command
from train.files import hold

WAIT = 15  # seconds for the runs of a call that was killed to end
PARTS = ("runs", "timing", "report")
SEEDS = 3


def arguments(argv: list[str]) -> argparse.Namespace:
    """Return the command line, checked; what stands after -- goes to every run."""
    parser = argparse.ArgumentParser(
        "python -m train.compare",
        description="Train recipes at several rates and options, and compare the best.",
        epilog="What follows -- is given to every run: -- --dataloader.dataset-path D",
    )
    add = parser.add_argument
    # fmt: off
    add("--configs", nargs="+", metavar="CONFIG[:OPTION=VALUE...]",
        help="recipes, with options of the optimizer of their own, as in "
        "tiny_mars_m:gamma=0.05; left out: go on as --out says")
    add("--module", help="that has the recipes (default: configs)")
    add("--out", type=Path, required=True, help="folder of the comparison")
    add("--lrs", nargs="+", default=[], metavar="LR | CONFIG=LR,LR,...",
        help="rates for all recipes, or for one (default: half, once and twice the "
        "recipe's); a grid whose edge is best widens, a single rate stays")
    add("--sweep", nargs="+", default=[], metavar="[CONFIG:]OPTION=VALUE/VALUE/...",
        help="options of the optimizer to search beside the rate, of all recipes or "
        "of one, as in gamma=0.05/0.1/0.2 or tiny_adamw:betas=0.8,0.95/0.9,0.95: from "
        "the recipe's own value on, numbers beyond the list where its edge is best")
    add("--steps", type=int, help="of a run (default: the recipes')")
    add("--seeds", type=int, help=f"of the best point (default {SEEDS})")
    add("--jobs", type=int, help="runs at once (default: 1 on a GPU, else 2)")
    add("--timing", action=argparse.BooleanOptionalAction, default=True,
        help="measure seconds per step after the runs, recipes taking turns")
    add("--only", choices=PARTS, help="one part, with what is there")
    # fmt: on
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    given = [] if args.module is None else ["--module", args.module]
    args.options = given + argv[cut + 1 :]
    check_least(2, steps=args.steps)
    check_least(1, MOST_SEEDS, seeds=args.seeds, jobs=args.jobs)
    settings = (args.lrs, args.sweep, args.steps, args.seeds, args.options)
    if args.configs is None and any(settings):
        raise UserError(
            "got settings without --configs, expected none, for they are those of the "
            "comparison in --out: leave them out, or name the recipes too"
        )
    return args


def grids(texts: Sequence[str], names: Sequence[str]) -> dict[str, list[float]]:
    """Return {recipe: rates} of --lrs."""
    common: list[float] = []
    own: dict[str, list[float]] = {}
    for text in texts:
        name, _, rates = text.rpartition("=")
        if name and name not in names:
            raise UserError(
                f"got --lrs {text}, expected a recipe of --configs before the =: add "
                f"{name} there, or leave this out"
            )
        try:
            values = [rounded(float(rate)) for rate in rates.split(",")]
        except ValueError:
            values = [math.nan]
        if not all(0 < v < math.inf for v in values):
            raise UserError(
                f"got --lrs {text}, expected positive numbers: write 1e-3 2e-3 4e-3, "
                "or tiny_adamw=1e-3,2e-3,4e-3"
            )
        (own.setdefault(name, []) if name else common).extend(values)
    return {name: sorted(set(own.get(name, common))) for name in names}


def swept(texts: Sequence[str], names: Sequence[str]) -> dict[str, dict]:
    """Return {recipe: {option: values}} of --sweep."""
    found: dict[str, dict[str, list[str]]] = {}
    for text in texts:
        head, _, listed = text.rpartition("=")
        name, _, option = head.rpartition(":")
        option, values = option.replace("-", "_"), listed.split("/")
        if not option or "" in values or ":" in listed:
            raise UserError(
                f"got --sweep {text}, expected OPTION=VALUE/VALUE/...: write "
                "gamma=0.05/0.1/0.2, or tiny_adamw:betas=0.8,0.95/0.9,0.95"
            )
        if name and name not in names:
            raise UserError(
                f"got --sweep {text}, expected a recipe of --configs before the last :"
                f", add {name} there, or leave this out"
            )
        if option == "lr":
            raise UserError(f"got --sweep {text}, expected --lrs for rates: give that")
        for config in [name] if name else names:
            own = [part.partition("=")[0] for part in config.split(":")[1:]]
            if option in (key.replace("-", "_") for key in own):
                raise UserError(
                    f"got --sweep {text} for {config}, expected an option that the "
                    "recipe's name does not fix: leave it out of the name"
                )
            known = found.setdefault(config, {}).setdefault(option, [])
            known += [value for value in values if value not in known]
    return found


def say(line: str) -> None:
    """Print one line, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def chosen(args: argparse.Namespace, jobs: int):
    """Return the study of this call, with recipes of earlier ones."""
    from train.compare.study import Study, again, check, make

    threads = max(1, os.cpu_count() // jobs)
    if args.configs is None:
        theirs = Study.load(args.out)
        if args.only == "report":  # also where the data is not
            return theirs
        return check(again(theirs, threads), args.out)
    names = list(dict.fromkeys(args.configs))
    given = dict(steps=args.steps, num_seeds=args.seeds or SEEDS, options=args.options)
    points = grids(args.lrs, names), swept(args.sweep, names)
    study = make(names, *points, threads=threads, **given)
    return check(study, args.out)


def compare(args: argparse.Namespace) -> bool:
    """Do all parts, or that of --only; return whether every run needed is there."""
    import torch

    from train.compare.session import Session
    from train.compare.study import LOCK, check
    from train.compare.table import report
    from train.compare.timing import measure

    console(0)
    jobs = args.jobs or (1 if torch.cuda.is_available() else min(2, os.cpu_count()))
    study = chosen(args, jobs)
    if args.only == "report":  # reads alone: possible while runs go on
        report(study, args.out)
        return True
    complete = True
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / LOCK).touch()
    with open(hold(args.out / LOCK, "--out", WAIT)) as lock:
        held = lock.fileno()  # outlives this process where a run of it does
        study = check(study, args.out)  # another call may have begun one since
        study.save(args.out)
        if args.only in (None, "runs"):
            session = Session(study, args.out, jobs=jobs, lock=held, say=say)
            session.train()
            complete = not session.failed
        if args.only == "timing" or (args.only is None and args.timing):
            complete &= measure(study, args.out, held, say)
        if args.only is None:
            report(study, args.out)
    return complete


def main() -> None:
    """Run the command."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # background shells ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(0 if compare(arguments(sys.argv[1:])) else 1)


if __name__ == "__main__":
    command(main)
