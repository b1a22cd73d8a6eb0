"""Checkpoints that are damaged, or that somebody has prepared: nothing of them is run,
and one line names the file, and of a run the step to go back to.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tests.faults.cases import (
    DIFFERING,
    DONE,
    OTHERWISE,
    REFUSED,
    SILENT,
    Case,
    Play,
    Steps,
    Verdict,
    judge,
)
from tests.faults.ground import (
    NEWEST,
    OLDER,
    Ground,
    Losses,
    linked,
    listing,
    losses,
    rewrite,
    strings,
)
from tests.faults.harm import (
    ALL,
    AS_BEFORE,
    AS_CUT_OFF,
    WHOLE,
    Damage,
    Step,
    damages,
)
from tests.forks import Command, Ended

FEW = 20  # with fewer cases no run of two ranks is damaged
SECONDS = 60.0  # in which a command that is refused has to have ended


class Action(NamedTuple):
    """A command that reads a run, with another folder to write to; ``whole``: it reads
    all of the checkpoint.
    """

    name: str
    command: Callable[[Ground, Path, Path], Command]
    whole: bool
    goes_on: bool = False


def _going_on(ranks: int) -> Callable[[Ground, Path, Path], Command]:
    return lambda ground, run, out: ground.train(run, ranks=ranks)


def _starting(*options: str) -> Callable[[Ground, Path, Path], Command]:
    def command(ground: Ground, run: Path, out: Path) -> Command:
        path = ("--checkpoint.initial-load-path", _newest(run))
        return ground.train(out, *path, *options)

    return command


def _reading(module: str, *options: object) -> Callable[[Ground, Path, Path], Command]:
    def command(ground: Ground, run: Path, out: Path) -> Command:
        words = ["--run", run, "--step", NEWEST, *options]
        if module != "train.sample":
            words += ["--out", out]
        if module == "train.evaluate":
            words += ["--data", ground.data]
        return Command(module, strings(*words))

    return command


CONTINUE = Action("continue", _going_on(1), True, goes_on=True)
SOON = (
    Action("sample", _reading("train.sample", "--tokens", 3), False),
    Action("export", _reading("train.export"), False),
    Action("evaluate", _reading("train.evaluate", "--loss"), False),
)
COPIES = Action("export all", _reading("train.export", "--training-state"), True)
ACTIONS = (
    CONTINUE,
    Action("continue on 2 ranks", _going_on(2), True, goes_on=True),
    *SOON,
    COPIES,
    Action("start from its weights", _starting(), False),
    Action(
        "start from all of it", _starting("--checkpoint.no-initial-load-model-only"),
        True,
    ),
)  # fmt: skip


def _newest(run: Path) -> Path:
    return run / "checkpoint" / f"step-{NEWEST}"


def commands(ground: Ground, num: int) -> dict[str, Command]:
    """Return what makes the run of two ranks, where there are cases enough for it."""
    return (
        {"two": ground.train(ground.two, steps=NEWEST, ranks=2)} if num >= FEW else {}
    )


def cases(
    ground: Ground, ends: dict[str, Ended], seed: int, num: int, brief: bool
) -> Iterator[Case]:
    """Yield ``num`` damaged checkpoints: a third of them flips, which differ by where
    they lie; ``brief``: one of them continues, none starts anew.
    """
    expected = losses(ends["run"].out)
    draw = random.Random(f"{seed} damage")
    pairs = [(d, a) for d in damages() for a in (SOON if brief else ACTIONS)]
    draw.shuffle(pairs)
    if brief:
        pairs.append((pairs[0][0], CONTINUE))
    flips = [pair for pair in pairs if pair[0].name.startswith("a bit of")]
    for number in range(1, num + 1):
        case_draw = random.Random(f"{seed} damage {number}")
        ranks = 1 if num < FEW else case_draw.choice((1, 1, 2))
        is_flip = number % 3 == 0 or not pairs
        damage, action = case_draw.choice(flips) if is_flip else pairs.pop()
        source = ground.two if ranks == 2 else ground.stopped
        play = _case(ground, source, expected, damage, action, case_draw)
        name = f"{action.name}: {damage.name}, of {ranks} ranks"
        yield Case("damage", number, name, play)


def _case(
    ground: Ground,
    source: Path,
    expected: Losses,
    damage: Damage,
    action: Action,
    draw: random.Random,
) -> Play:
    def steps(folder: Path) -> Steps:
        run, out, mark = linked(source, folder / "run"), folder / "out", folder / "mark"
        for path in _newest(run).glob("*.distcp"):
            rewrite(path, path.read_bytes())  # a run without its index writes it again
        damage.apply(Step(_newest(run), draw, mark))
        before, kept = listing(run), listing(run / "checkpoint")
        command = action.command(ground, run, out)
        if damage.expected == ALL:
            command = replace(command, limit=SECONDS)
        ended = yield command
        if mark.exists():
            return Verdict(SILENT, "the payload was run")
        if damage.expected == AS_BEFORE:
            return _goes_on(ended, action, expected, NEWEST)
        if damage.expected == AS_CUT_OFF and action.goes_on:
            return _goes_on(ended, action, expected, OLDER)
        verdict = judge(ended, _must(damage, action))
        if verdict.kind != REFUSED:
            return verdict
        line = ended.err.strip().splitlines()[-1]
        if not any(name in line for name in damage.names):
            return Verdict(OTHERWISE, f"none of {damage.names} is named")
        if listing(run / "checkpoint") != kept:
            return Verdict(OTHERWISE, "the checkpoints have changed")
        begun = "ing the run in" in ended.out or "starting a new run" in ended.out
        # an object is read after the processes have met: they keep logs
        written = listing(run) != before or out.exists()
        if (out / "checkpoint").exists() if begun else written:
            return Verdict(OTHERWISE, "something was written")
        # a link that leads elsewhere is no damage: it is moved away by hand
        if not action.goes_on or "link" in damage.name:
            return verdict
        if "swapped" in damage.name:  # nothing to go back to
            said = f"no other step is whole; to start anew: mv {_newest(run)}" in line
            return verdict if said else Verdict(OTHERWISE, "the whole step is wrong")
        return (yield from _go_back(ground, run, action, expected, line))

    return steps


def _must(damage: Damage, action: Action) -> bool | None:
    """Return whether a command must refuse; None where it may."""
    if damage.expected == WHOLE and action is COPIES:
        return False  # an export copies the object, and does not read it
    by_all = damage.expected in (ALL, AS_CUT_OFF)
    return True if by_all or (damage.expected == WHOLE and action.whole) else None


def _goes_on(ended: Ended, action: Action, expected: Losses, after: int) -> Verdict:
    """Judge a command that does as told; a run continues after a step, with the losses
    of a run that nobody disturbed.
    """
    verdict = judge(ended, False)
    if verdict.kind != DONE or not action.goes_on:
        return verdict
    shown = losses(ended.outs[0])
    wanted = {key: loss for key, loss in expected.items() if key[1] > after}
    # two ranks round their sums in other places than one
    if shown.keys() != wanted.keys() or any(
        abs(float(shown[key]) - float(wanted[key])) > 2e-5 for key in wanted
    ):
        differing = sorted(set(shown.items()) ^ set(wanted.items()))
        return Verdict(DIFFERING, f"{differing[:6]}")
    return verdict


def _go_back(
    ground: Ground, run: Path, action: Action, expected: Losses, line: str
) -> Steps:
    """Do what the line says, and continue from the older step."""
    advice = re.search(rf"step {OLDER} is whole; .*: mv (\S+) (\S+), then", line)
    if advice is None:
        return Verdict(OTHERWISE, "neither the whole step nor the mv command is named")
    shutil.move(advice[1], advice[2])
    verdict = _goes_on(
        (yield action.command(ground, run, run)), action, expected, OLDER
    )
    return Verdict(REFUSED) if verdict.kind == DONE else verdict
