"""python -m research.compare STUDY [--out DIR] ...: go on with a study, and report."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO

from train.errors import UserError, check_least, command, shown
from train.files import check_folder, hold

WAIT = 15  # seconds for the runs of a call that was killed to end
PARTS = ("runs", "report")


def arguments(argv: list[str]) -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        "python -m research.compare",
        description="Run what a study still needs, then print its table and draw its "
        "pictures: methods side by side, each searched with as many trials, judged by "
        "seeds that its search did not see.",
    )
    add = parser.add_argument
    # fmt: off
    add("study", metavar="STUDY", help="function of --module that returns a Study")
    add("--module", default="research.studies", help="(%(default)s)")
    add("--out", type=Path, help="folder of runs, tables and pictures (runs/STUDY)")
    add("--store", type=Path, help="file of what was run (OUT/runs.jsonl)")
    add("--methods", nargs="+", action="extend", metavar="TITLE",
        help="of the study (all), in order")
    add("--set", nargs="+", action="extend", default=[], dest="changes",
        metavar="NAME=VALUE",
        help="fields of the study or its setting: steps=100 device=cuda trials=8")
    add("--jobs", type=int, help="runs at once (1 on a GPU, else all cores)")
    add("--minutes", type=float, help="start no run that would not end in time")
    add("--only", choices=PARTS, help="one part, with what is there")
    # fmt: on
    args = parser.parse_args(argv)
    check_least(1, 1000, jobs=args.jobs)
    check_least(0, minutes=args.minutes)
    args.out = args.out or Path("runs") / args.study
    args.store = args.store or args.out / "runs.jsonl"
    return args


def changes(texts: list[str]) -> dict:
    """Return {field: value} of --set."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UserError(f"got --set {text}, expected NAME=VALUE: write steps=100")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def say(line: str) -> None:
    """Print one line, with the time of day."""
    print(shown(f"{time.strftime('%H:%M:%S')}  {line}"), flush=True)


def locked(store: Path) -> IO:
    """Return what holds the store as long as it is open, here or in a run."""
    store.touch()
    return open(hold(store, "--store", WAIT))  # noqa: SIM115  (returned)


def compare(args: argparse.Namespace) -> bool:
    """Do all parts, or that of --only; return whether every run needed is there."""
    from research.compare.report import report
    from research.compare.session import Session
    from research.compare.store import Store
    from research.compare.study import changed, named

    study = changed(named(args.study, args.module), changes(args.changes))
    titles = args.methods or list(study.methods)
    unknown = [title for title in titles if title not in study.methods]
    if unknown:
        raise UserError(
            f"got --methods {unknown[0]!r}, expected some of "
            f"{', '.join(map(repr, study.methods))}: name these"
        )
    check_folder("--out", args.out)
    if args.only == "report":  # only reads: possible while runs go on
        report(study, Store(args.store, args.study), args.out)
        return True
    study.setting.check({title: study.first(title) for title in titles})
    complete = True
    args.out.mkdir(parents=True, exist_ok=True)
    with locked(args.store) as lock:
        held = lock.fileno()  # outlives this process where a run of it does
        store = Store(args.store, args.study)
        store.agree(study.setting.identity())
        if args.only in (None, "runs"):
            on_gpu = getattr(study.setting, "device", "cpu") == "cuda"
            jobs = args.jobs or (1 if on_gpu else os.cpu_count())
            session = Session(
                study,
                store,
                args.out / "runs",
                titles,
                jobs=jobs,
                # the study's runs have one each: more would add in another order
                threads=max(1, os.cpu_count() // jobs) if on_gpu else 1,
                minutes=args.minutes,
                lock=held,
                say=say,
            )
            complete = session.train()
        if args.only is None:
            report(study, store, args.out)
    return complete


def main() -> None:
    """Run the command."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # background shells ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(0 if compare(arguments(sys.argv[1:])) else 1)


if __name__ == "__main__":
    command(main)
