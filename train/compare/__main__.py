"""python -m train.compare --configs A B C --out DIR [--lrs ...] [--steps N] ..."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

from train.errors import UserError, command

WAIT = 15  # seconds for the runs of a call that was killed to end
PARTS = ("runs", "timing", "report")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what stands after -- goes to every run."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="python -m train.compare",
        description="Train recipes at several learning rates, and compare the best.",
        epilog="What follows -- is given to every run: -- --dataloader.dataset-path D",
    )
    parser.add_argument(
        "--configs", nargs="+", help="recipes; left out: those of the comparison in DIR"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the comparison"
    )
    parser.add_argument(
        "--lrs",
        nargs="+",
        default=[],
        metavar="LR | CONFIG=LR,LR,...",
        help="rates for all recipes, or for one (default: half, once and twice the "
        "recipe's); a grid whose edge is best widens, a single rate stays",
    )
    parser.add_argument("--steps", type=int, help="of a run (default: the recipes')")
    parser.add_argument("--seeds", type=int, default=3, help="of the best rate")
    parser.add_argument(
        "--jobs", type=int, help="runs at once (default: one a core, 2 at most)"
    )
    parser.add_argument(
        "--timing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure seconds per step after the runs, one recipe at a time",
    )
    parser.add_argument("--only", choices=PARTS, help="one part, with what is there")
    args = parser.parse_args(argv[:cut])
    args.options = list(argv[cut + 1 :])
    for name, low in (("steps", 2), ("seeds", 1), ("jobs", 1)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise UserError(
                f"got --{name} {value}, expected at least {low}: give a larger number"
            )
    return args


def grids(texts: Sequence[str], names: Sequence[str]) -> dict[str, list[float]]:
    """{recipe: rates} of --lrs.

    Raises:
        UserError: no number, not positive, or of a recipe that is not compared.
    """
    from train.compare.sweep import rounded

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


@contextmanager
def alone(path: Path):
    """A folder's lock, which outlives this process as long as a run of it lives.

    Raises:
        UserError: another call is at work there.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        deadline = time.monotonic() + WAIT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"got --out {path.parent}, in which another call is at work, "
                        "expected one at a time: wait for it, or end it"
                    ) from error
                time.sleep(0.2)
        yield file.fileno()


def _interrupt(signum, frame):
    raise KeyboardInterrupt


def say(line: str) -> None:
    """One line, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def compare(args: argparse.Namespace) -> bool:
    """All parts, or the one of --only; whether every run that was needed is there."""
    from train.compare import plan as plans
    from train.compare.report import report
    from train.compare.session import Session
    from train.compare.timing import measure, seconds_per_run
    from train.launch import console

    console(0)
    if args.configs is None:
        saved = plan = plans.Plan.load(args.out)
    else:
        names = list(dict.fromkeys(args.configs))
        jobs = args.jobs or min(2, os.cpu_count())
        plan = plans.make(
            names,
            grids(args.lrs, names),
            steps=args.steps,
            num_seeds=args.seeds,
            threads=max(1, os.cpu_count() // jobs),
            options=args.options,
        )
        saved = plans.check(plan, args.out)
    jobs = args.jobs or max(1, os.cpu_count() // plan.threads)
    complete = True
    with alone(args.out / plans.LOCK) as lock:
        saved.save(args.out)
        if args.only in (None, "runs"):
            session = Session(
                plan,
                args.out,
                jobs=jobs,
                lock=lock,
                guess=seconds_per_run(plan),
                say=say,
            )
            session.train()
            complete = not session.failed
        if args.only == "timing" or (args.only is None and args.timing):
            complete &= measure(plan, args.out, lock, say)
        if args.only in (None, "report"):
            report(plan, args.out)
    return complete


def main() -> None:
    """The command."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)  # background shells ignore it
    try:
        complete = compare(arguments(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nstopped: the same command continues", file=sys.stderr)
        sys.exit(130)
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    command(main)
