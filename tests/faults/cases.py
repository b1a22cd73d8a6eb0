"""What a case is, the law by which it is judged, and how cases are played.

The law: a command is refused in one line with exit code 2, or does as it is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.forks import POLL, Command, Ended, Running

REFUSED, DONE = "refused", "done"
SILENT, TRACEBACK, HANG, DIFFERING = "silent", "traceback", "hang", "differing"
OTHERWISE = "otherwise"  # another exit code, more or fewer lines, something written
KINDS = (REFUSED, DONE, SILENT, TRACEBACK, HANG, DIFFERING, OTHERWISE)
GOOD = (REFUSED, DONE)


class Verdict(NamedTuple):
    """How a case came out: one of KINDS, and why."""

    kind: str
    why: str = ""


Steps = Generator[Command, Ended, Verdict]
Play = Callable[[Path], Steps]


class Case(NamedTuple):
    """One case of a part: ``play`` gets a folder to itself, yields commands, is sent
    what became of them, and returns the verdict.
    """

    part: str
    number: int
    name: str
    play: Play


def without_warnings(err: str) -> list[str]:
    """Return the lines of stderr without Python's warnings, which bring a line of
    source along.
    """
    lines, after_warning = [], False
    for line in err.strip().splitlines():
        if after_warning and line.startswith("  "):
            continue
        after_warning = "Warning: " in line
        if not after_warning:
            lines.append(line)
    return lines


def not_one_error(err: str) -> str:
    """Say what is wrong where stderr does not end with its one error; "" if it does."""
    lines = without_warnings(err)
    errors = [line for line in lines if line.startswith("error: ")]
    if len(errors) == 1 and lines[-1] == errors[0]:
        return ""
    return f"{len(errors)} error lines of {len(lines)}"


def broken(ended: Ended) -> Verdict | None:
    """Return what no command may do: hang, or print a traceback."""
    if ended.hung:
        return Verdict(HANG, "did not end in time")
    if "Traceback (most recent call last)" in ended.out + ended.err:
        return Verdict(TRACEBACK, (ended.err or ended.out).strip().splitlines()[-1])
    return None


def judge(ended: Ended, must: bool | None = None) -> Verdict:
    """Apply the law. What ``must`` be refused may not be done; False: it must be done;
    None: either.
    """
    if verdict := broken(ended):
        return verdict
    if not any(ended.codes):
        return Verdict(SILENT, "it was done") if must else Verdict(DONE)
    if ended.code != 2:
        return Verdict(OTHERWISE, f"exit codes {ended.codes}")
    if must is False:
        return Verdict(OTHERWISE, "what is well was refused")
    if wrong := not_one_error(ended.err):
        return Verdict(OTHERWISE, wrong)
    return Verdict(REFUSED)


class Played(NamedTuple):
    """A case that is over: its verdict, its commands, and what became of each."""

    case: Case
    verdict: Verdict
    commands: list[Command]
    ends: list[Ended]


def play(cases: Iterator[Case], scratch: Path, at_once: int) -> Iterator[Played]:
    """Yield each case as it ends, ``at_once`` of them under way at a time."""
    under_way: list[tuple[Generator[Running, None, Played], Running]] = []
    more = True
    while more or under_way:
        while more and len(under_way) < at_once:
            case = next(cases, None)
            more = case is not None
            if case is not None:
                steps = _played(case, scratch / f"{case.part}{case.number}")
                under_way.append((steps, next(steps)))
        for steps, running in list(under_way):
            if not running.poll():
                continue
            under_way.remove((steps, running))
            try:
                under_way.append((steps, next(steps)))
            except StopIteration as stop:
                yield stop.value
        time.sleep(POLL)


def _played(case: Case, folder: Path) -> Generator[Running, None, Played]:
    """Yield a case's commands as they run; return what became of it."""
    folder.mkdir(parents=True)
    commands: list[Command] = []
    ends: list[Ended] = []
    steps = case.play(folder)
    try:
        command = next(steps)
        while True:
            commands.append(command)
            running = Running(command, folder, len(ends))
            yield running
            ends.append(running.ended())
            command = steps.send(ends[-1])
    except StopIteration as stop:
        return Played(case, stop.value, commands, ends)
