"""Checkpoints that are damaged, or that somebody has prepared: nothing of them is run,
and one line names the file, and of a run the step to go back to.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from train.campaign.children import Case, Command, Steps
from train.campaign.ground import (
    NEWEST,
    OLDER,
    Ground,
    linked,
    listing,
    losses,
    rewrite,
    strings,
)
from train.campaign.harm import (
    ALL,
    AS_BEFORE,
    AS_CUT_OFF,
    WHOLE,
    Damage,
    damages,
    redo_sums,
)
from train.campaign.law import (
    DIFFERING,
    DONE,
    OTHERWISE,
    REFUSED,
    SILENT,
    Ended,
    Verdict,
    judge,
)

MARK = "payload-was-run"
FEW = 20  # with fewer cases no run of two ranks is damaged


class Action(NamedTuple):
    """A command that reads a run, with another folder to write to."""

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


def _reading(module: str, *options: object, out: bool = False):
    def command(ground: Ground, run: Path, folder: Path) -> Command:
        words = ["--run", run, *options]
        if out:
            words += ["--out", folder]
        if "--loss" in options:
            words += ["--data", ground.data]
        words += ["--step", NEWEST]
        return Command(module, strings(*words))

    return command


ACTIONS = (
    Action("continue", _going_on(1), True, True),
    Action("continue on 2 ranks", _going_on(2), True, True),
    Action("sample", _reading("train.sample", "--tokens", 3), False),
    Action("export", _reading("train.export", out=True), False),
    Action(
        "export all", _reading("train.export", "--training-state", out=True), True
    ),
    Action("evaluate", _reading("train.evaluate", "--loss", out=True), False),
    Action("start from its weights", _starting(), False),
    Action(
        "start from all of it",
        _starting("--checkpoint.no-initial-load-model-only"),
        True,
    ),
)  # fmt: skip


SOON = ("sample", "export", "evaluate")


def _newest(run: Path) -> Path:
    return run / "checkpoint" / f"step-{NEWEST}"


class Runs(NamedTuple):
    """Runs of eight steps on one rank and on two, and the losses of all steps."""

    folders: dict[int, Path]
    losses: dict[tuple[str, int], str]


def commands(ground: Ground, num: int) -> dict[str, list[Command]]:
    """Return what makes the run of two ranks, where there are cases enough for it."""
    if num < FEW:
        return {}
    two = ground.root / "two"
    return {"two": [ground.train(two, steps=NEWEST, ranks=2)]}


def cases(
    ground: Ground, ends: dict, seed: int, num: int, brief: bool
) -> Iterator[Case]:
    """Yield ``num`` damaged checkpoints: a third of them flips, which differ by where
    they lie, a tenth of settings; ``brief``: one of them continues, none starts anew.
    """
    folders = {1: ground.stopped, 2: ground.root / "two"}
    runs = Runs(folders, losses(ends["run"][0].out))
    draw = random.Random(f"{seed} damage")
    pairs = [(d, a) for d in damages() for a in ACTIONS]
    draw.shuffle(pairs)
    if brief:
        (first, *_), pairs = pairs, [p for p in pairs if p[1].name in SOON]
        pairs.append((first[0], ACTIONS[0]))
    flips = [pair for pair in pairs if pair[0].do.__qualname__.startswith("_flip")]
    settings = list(_settings_cases())
    draw.shuffle(settings)
    for number in range(1, num + 1):
        own = random.Random(f"{seed} damage {number}")
        ranks = 1 if num < FEW else own.choice((1, 1, 2))
        if number % 10 == 0 and settings:
            key, value, action = settings.pop()
            name = f"{action.name}: settings.json, {key} = {value!r}"
            do = _of_settings(ground, runs, key, value, action)
            yield Case("damage", number, name, do)
            continue
        flip = number % 3 == 0 or not pairs
        damage, action = own.choice(flips) if flip else pairs.pop()
        name = f"{action.name}: {damage.name}, of {ranks} ranks"
        do = _of_damage(ground, runs, damage, action, ranks, own)
        yield Case("damage", number, name, do)


def _of_damage(
    ground: Ground,
    runs: Runs,
    damage: Damage,
    action: Action,
    ranks: int,
    draw: random.Random,
) -> Callable[[Path], Steps]:
    def steps(folder: Path) -> Steps:
        run = linked(runs.folders[ranks], folder / "run")
        for path in _newest(run).glob("*.distcp"):
            rewrite(path, path.read_bytes())  # a run without its index writes it again
        out, mark = folder / "made", folder / MARK
        damage.do(_newest(run), draw, mark)
        redo_sums(_newest(run), damage.sums)
        before, kept = listing(run), listing(run / "checkpoint")
        ended = yield action.command(ground, run, out)
        if mark.exists():
            return Verdict(SILENT, "the payload was run")
        expected = damage.expected
        if expected == AS_CUT_OFF and not action.goes_on:
            expected = ALL
        if expected in (AS_BEFORE, AS_CUT_OFF):
            return _as_before(ended, action, runs, expected)
        must = expected == ALL or (expected == WHOLE and action.whole)
        # an export copies the object, and does not read it
        if expected == WHOLE and action.name == "export all":
            must = False
        verdict = judge(ended, True if must else None)
        if verdict.kind != REFUSED:
            return verdict
        after, line = listing(run), ended.err.strip().splitlines()[-1]
        if not any(name in line for name in damage.names):
            return Verdict(OTHERWISE, f"none of {damage.names} is named")
        if listing(run / "checkpoint") != kept:
            return Verdict(OTHERWISE, "the checkpoints have changed")
        begun = "ing the run in" in ended.out or "starting a new run" in ended.out
        if begun:  # an object is read after the processes have met: they keep logs
            written = (out / "checkpoint").exists()
        else:
            written = after != before or out.exists()
        if written:
            changed = sorted(set(after.items()) ^ set(before.items()))
            return Verdict(OTHERWISE, f"something was written: {out} {changed[:4]}")
        if not action.goes_on:
            return verdict
        if "two steps" in damage.name:  # nothing to go back to
            told = f"no other step is whole; to start anew: mv {_newest(run)}" in line
            return verdict if told else Verdict(OTHERWISE, "the whole step is wrong")
        return (yield from _go_back(ground, run, action, runs, line))

    return steps


def _as_before(ended: Ended, action: Action, runs: Runs, expected: str) -> Verdict:
    """Judge a command that goes on as if nothing, or the newest step, was lost."""
    verdict = judge(ended, False)
    if verdict.kind != DONE or not action.goes_on:
        return verdict
    first = NEWEST if expected == AS_BEFORE else OLDER
    return _same_losses(ended, runs, first)


def _same_losses(ended: Ended, runs: Runs, after: int) -> Verdict:
    found = losses(ended.outs[0])
    wanted = {key: loss for key, loss in runs.losses.items() if key[1] > after}
    differing = sorted(set(found.items()) ^ set(wanted.items()))
    # two ranks round their sums in other places than one
    differs = found.keys() != wanted.keys() or any(
        abs(float(found[k]) - float(wanted[k])) > 2e-5 for k in wanted
    )
    if differs:
        return Verdict(DIFFERING, f"{differing[:6]}")
    return Verdict(REFUSED)


def _go_back(ground: Ground, run: Path, action: Action, runs: Runs, line: str) -> Steps:
    """Do what the line says, and continue from the older step."""
    said = re.search(rf"step {OLDER} is whole; .*: mv (\S+) (\S+), then", line)
    if said is None:
        return Verdict(OTHERWISE, "neither the whole step nor the mv command is named")
    shutil.move(said[1], said[2])
    ended = yield action.command(ground, run, run)
    verdict = judge(ended, False)
    return verdict if verdict.kind != DONE else _same_losses(ended, runs, OLDER)


# ---- settings.json -------------------------------------------------------------------

SHAPE = "model_spec.model"
READ_BY_ALL: dict[str, tuple[Any, ...]] = {
    "num_layers": (None, "4", 3, 5, -1, 10**9, [4], 4.5),
    "num_heads": (None, "x", 0, -4, 3),
    "width": (None, 64, "128", -128),
    "block_size": (None, 64, 0, {}),
    "vocab_size": (None, 256, 10**12),
    "inverse_layer_scale": ("no", 3),
}
OTHERS: dict[str, tuple[Any, ...]] = {
    "optimizer.lr": (None, "x", 0.007, -1),
    "optimizer.betas": ([0.95], {}),
    "schedule_steps": (13, "12"),
    "data.train": ("", "0" * 64, None),
    "training.seq_len": (33, "32"),
    "tokenizer.name": ("gpt2", "xyz", None),
}


def _settings_cases() -> Iterator[tuple[str, Any, Action]]:
    for action in ACTIONS:
        by_all = action.name != "start from its weights"
        for key, values in READ_BY_ALL.items():
            yield from ((key, value, action) for value in values)
        if action.goes_on or action.name == "start from all of it":
            for key, values in OTHERS.items():
                yield from ((key, value, action) for value in values)
        elif by_all:
            yield from (("tokenizer.name", value, action) for value in ("xyz", None, 3))


def _of_settings(
    ground: Ground, runs: Runs, key: str, value: Any, action: Action
) -> Callable[[Path], Steps]:
    def steps(folder: Path) -> Steps:
        run, out = linked(runs.folders[1], folder / "run"), folder / "made"
        path = run / "settings.json"
        settings = json.loads(path.read_text())
        where = settings[SHAPE]["shape"] if key in READ_BY_ALL else settings
        where[key] = value
        rewrite(path, json.dumps(settings).encode())
        before = listing(run)
        ended = yield action.command(ground, run, out)
        verdict = judge(ended, True)
        if verdict.kind != REFUSED:
            return verdict
        line = ended.err.strip().splitlines()[-1]
        if not any(n in line for n in ("settings.json", key, SHAPE, "step-8")):
            return Verdict(OTHERWISE, "settings.json is not named")
        if listing(run) != before or out.exists():
            return Verdict(OTHERWISE, "something was written")
        return verdict

    return steps
