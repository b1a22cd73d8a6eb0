"""Moonlight, NorMuon, SOAP and SOAP-Muon on a tiny GPT-2, each at its own best rate and
beta1: held-out loss after equal steps, and after equal time.

    OMP_NUM_THREADS=1 python -m benchmarks.frontier --json FILE [FILE ...]

The folder of --data holds train.bin and val.bin, as train.prepare makes them. For each
method a search walks from a guess to a rate and a beta1 that no neighbour beats (half
and twice the rate; the next one of 0.6, 0.8, 0.9, 0.95, 0.98), by one seed; then other
seeds run there. Runs of one seed begin with the same weights and see the same batches.
Seconds of a step are measured first, all methods in turns; "equal time" is as many
steps as fit into the time of Moonlight's, on a schedule of that length.

What the files have is not run again: a call that was ended is continued by the same
command, and calls with other --methods and a first FILE of their own may go on beside
it. The table is of all files.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import LambdaLR

from benchmarks import tiny
from benchmarks.pretrain.loop import Plan, Task
from marsopt import MARS, param_groups
from marsopt.profiling.machine import describe, one_line
from train.data.token_files import open_raw
from train.engine.schedule import cosine
from train.errors import UserError, command
from train.files import write_json

WARMUP = 0.1  # of the steps
BETAS = (0.6, 0.8, 0.9, 0.95, 0.98)
TRANSPORT = dict(correction="transport", gamma=0.05)
BASELINE = "Moonlight"
TURNS, TURN = 7, 10  # of the measurement of time, and steps of each


class Method(NamedTuple):
    """A rule with its options, and the rate from which its search starts."""

    rule: str
    lr: float
    options: dict[str, Any]


def _methods() -> dict[str, Method]:
    """Return all methods, by title."""
    plain = {
        BASELINE: Method("moonlight", 8e-3, {}),
        "NorMuon": Method("normuon", 8e-3, {}),
    }
    for often in (10, 1):
        for sides in ("both", "short"):
            own = dict(sides=sides, precondition_frequency=often)
            said = f"{sides}, N = {often}"
            plain[f"SOAP, {said}"] = Method("soap", 8e-3, own)
            plain[f"SOAP-Muon, {said}"] = Method("soap-muon", 8e-3, own)
    ahead = {
        f"{title}, transport": Method(
            one.rule if one.rule == "moonlight" else f"mars-{one.rule}",
            one.lr,
            one.options | TRANSPORT,
        )
        for title, one in plain.items()
    }
    cautious = dict(cautious_weight_decay=True)
    return (
        plain | ahead | {f"{BASELINE}, cautious": Method("moonlight", 8e-3, cautious)}
    )


METHODS = _methods()


class Point(NamedTuple):
    """Where a method is run."""

    lr: float
    beta1: float


def neighbours(point: Point) -> list[Point]:
    """Return the points of the grid beside one."""
    lr, beta1 = point
    at = BETAS.index(beta1)
    betas = [*BETAS[max(0, at - 1) : at], *BETAS[at + 1 : at + 2]]
    return [Point(lr / 2, beta1), Point(2 * lr, beta1), *(Point(lr, b) for b in betas)]


def optimum(loss: Callable[[Point], float], start: Point) -> Point:
    """Return a point whose neighbours are all worse."""
    best = start
    while True:
        found = min([best, *neighbours(best)], key=loss)
        if found == best:
            return best
        best = found


def plan(args: argparse.Namespace, seed: int, steps: int) -> Plan:
    """Return how runs of a seed go."""
    warmup = max(1, round(WARMUP * steps))
    return tiny.plan(args, seed, steps=steps, warmup=warmup, compile=False)


class Training:
    """A run of one method."""

    def __init__(self, folder: Path, plan: Plan, method: Method, point: Point) -> None:
        self._task = Task(
            plan, open_raw(folder / "train.bin"), open_raw(folder / "val.bin")
        )
        self._optimizer = MARS(
            param_groups(self._task.model, method.rule, lr=point.lr, weight_decay=0.1),
            mars_type=method.rule,
            betas=(point.beta1, 0.95),
            max_norm=1.0,
            compile=False,
            **method.options,
        )
        rate = partial(cosine, warmup=plan.warmup, total=plan.steps, floor=plan.floor)
        self._scheduler = LambdaLR(self._optimizer, rate)
        self._batches = self._task.batches()

    def go(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._task.gradient(self._batches.next())
            self._optimizer.step()
            self._scheduler.step()

    def loss(self) -> float:
        """Return the held-out loss of what is trained."""
        self._optimizer.eval()
        found = self._task.validate()
        self._optimizer.train()
        return found


def seconds(args: argparse.Namespace) -> dict[str, float]:
    """Return those of a step of each method: medians over turns."""
    start = plan(args, 0, args.steps)
    every = {
        title: Training(args.data, start, one, Point(one.lr, 0.95))
        for title, one in METHODS.items()
    }
    found: dict[str, list[float]] = {title: [] for title in every}
    for turn in range(TURNS + 1):  # the first one makes bases and caches
        for title, run in every.items():
            began = time.perf_counter()
            run.go(TURN)
            if turn:
                found[title].append((time.perf_counter() - began) / TURN)
    return {title: statistics.median(own) for title, own in found.items()}


class Study:
    """What was run, and is.

    Args:
        args: of the command.
        about: what runs of one study share.
    """

    def __init__(self, args: argparse.Namespace, about: dict[str, Any]) -> None:
        self._args, self._path, self._began = args, args.json[0], time.monotonic()
        first, *others = (
            tiny.known(path, about, seconds={}, losses={}, best={})
            for path in args.json
        )
        self._mine, self._others = first, others
        seen: dict[str, float] = {}
        for path, one in zip(args.json, [first, *others], strict=True):
            twice = sorted(seen.keys() & one["losses"].keys())
            if any(seen[name] != one["losses"][name] for name in twice):
                raise UserError(
                    f"got {len(twice)} runs twice, in {path} and a file before it, "
                    f"expected each in one ({twice[0]}), since runs of one seed differ "
                    "a little: give calls beside each other other --methods"
                )
            seen |= one["losses"]

    def _found(self, kind: str) -> dict[str, Any]:
        every = {}
        for one in (*self._others, self._mine):
            every |= one[kind]
        return every

    def _write(self, kind: str, found: dict[str, Any]) -> None:
        self._mine[kind] |= found
        write_json(self._path, self._mine)

    def measure(self) -> None:
        """Measure the time of steps, once."""
        if not self._found("seconds"):
            self._write("seconds", seconds(self._args))

    def loss(self, title: str, seed: int, steps: int, point: Point) -> float:
        """Return the loss of a run, run if it was not.

        Raises:
            TimeoutError: it would start after the time that the command has.
        """
        name = f"{title}; lr {point.lr:g}, beta1 {point.beta1:g}"
        name += f"; seed {seed}, {steps} steps"
        if name not in self._found("losses"):
            limit = self._args.minutes
            if limit is not None and time.monotonic() - self._began > 60 * limit:
                raise TimeoutError
            start = plan(self._args, seed, steps)
            run = Training(self._args.data, start, METHODS[title], point)
            run.go(steps)
            self._write("losses", {name: run.loss()})
        return self._found("losses")[name]

    def go(self, title: str) -> None:
        """Run all of a method.

        Raises:
            TimeoutError: as ``loss``.
        """
        steps = self._args.steps
        start = Point(METHODS[title].lr, 0.95)
        best = optimum(partial(self.loss, title, 0, steps), start)
        self._write("best", {title: best})
        for seed in range(self._args.seeds):
            self.loss(title, seed, steps, best)
            self.loss(title, seed, self.steps_in_time(title), best)

    def steps_in_time(self, title: str) -> int:
        """Return how many fit into the time of the baseline's."""
        found = self._found("seconds")
        return round(self._args.steps * found[BASELINE] / found[title])

    def table(self) -> Iterator[str]:
        """Yield the lines of the table, of the methods that are done."""
        yield (
            "| method | rate | beta1 | equal steps | ms a step, times Moonlight's | "
            "steps in its time | equal time |"
        )
        yield "|---|---|---|---|---|---|---|"
        best, times, losses = map(self._found, ("best", "seconds", "losses"))
        for title in METHODS:
            if title not in best:
                continue
            point, fits = Point(*best[title]), self.steps_in_time(title)
            name = f"{title}; lr {point.lr:g}, beta1 {point.beta1:g}"
            cells = [title, f"{point.lr:g}", f"{point.beta1:g}"]
            every = []
            for steps in (self._args.steps, fits):
                keys = [
                    f"{name}; seed {seed}, {steps} steps"
                    for seed in range(self._args.seeds)
                ]
                here = [losses[key] for key in keys if key in losses]
                whole = len(here) == len(keys)
                every.append(tiny.spread(here) if whole else "not run")
            ratio = times[title] / times[BASELINE]
            cells += [every[0], f"{1e3 * times[title]:.1f}, {ratio:.2f}"]
            cells += [f"{fits}", every[1]]
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--json", type=Path, required=True, nargs="+", metavar="FILE", help="the first one is written, all are read")  # noqa: E501
    add("--methods", nargs="*", choices=list(METHODS), default=list(METHODS), metavar="METHOD", help="to run, of: " + "; ".join(METHODS) + " (all); none: the table alone")  # noqa: E501
    add("--minutes", type=float, help="start no run after so many")
    # fmt: on
    tiny.add_sizes(
        parser, layers=2, width=64, seq_len=64, steps=600, batch=8, held_out=512
    )
    args = parser.parse_args()
    about = tiny.sizes(args, args.json)
    print(one_line(describe("cpu")))
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    study = Study(args, about)
    study.measure()
    try:
        for title in args.methods:
            study.go(title)
    except TimeoutError:
        print(f"ended after {args.minutes:g} minutes: the same command goes on")
    print(f"held-out loss, nats a byte, mean ± deviation of {args.seeds} seeds")
    print(*study.table(), sep="\n")


if __name__ == "__main__":
    command(main)
