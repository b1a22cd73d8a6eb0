"""Checkpoints that are damaged, or that somebody has prepared: nothing of them is run,
and one line names the file, and of a run the step to go back to.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaign.children import (
    DIFFERING,
    DONE,
    OTHERWISE,
    REFUSED,
    SILENT,
    Case,
    Command,
    Ended,
    Steps,
    Verdict,
    judge,
)
from tests.campaign.ground import (
    NEWEST,
    OLDER,
    Ground,
    linked,
    listing,
    losses,
    rewrite,
    strings,
)

INDEX, SUMS = ".metadata", "SHA256SUMS"
MARK = "payload-was-run"
FEW = 20  # with fewer cases no run of two ranks is damaged
KEPT, MADE, REMOVED = "sums kept", "sums made again", "sums removed"
# what is expected of all commands, of those that read the whole checkpoint, or of none
ALL, WHOLE, NONE = "all refuse", "those that read all of it refuse", "either"
AS_BEFORE, AS_CUT_OFF = "as before", "as if its saving was cut off"


class Damage(NamedTuple):
    """``do`` changes the folder of a step (given what to draw from, and a file that a
    payload would make); an error says one of ``names``.
    """

    name: str
    do: Callable[[Path, random.Random, Path], None]
    names: tuple[str, ...]
    expected: str = ALL
    sums: str = KEPT


def _pick(step: Path, draw: random.Random, kind: str) -> Path:
    return draw.choice(sorted(step.glob("*.distcp"))) if kind == "data" else step / kind


def _flip(kind: str):
    def do(step: Path, draw: random.Random, mark: Path) -> None:
        path = _pick(step, draw, kind)
        raw = bytearray(path.read_bytes())
        # at the end of a line another sign may end it as well
        places = [at for at in draw.sample(range(len(raw)), 9) if raw[at] != 0x0A]
        raw[places[0]] ^= 1 << draw.randrange(8)
        rewrite(path, bytes(raw))

    return do


def _change(kind: str, change: Callable[[bytes, random.Random], bytes]):
    def do(step: Path, draw: random.Random, mark: Path) -> None:
        path = _pick(step, draw, kind)
        rewrite(path, change(path.read_bytes(), draw))

    return do


def _without(kind: str):
    def do(step: Path, draw: random.Random, mark: Path) -> None:
        _pick(step, draw, kind).unlink()

    return do


def _as_folder(kind: str):
    def do(step: Path, draw: random.Random, mark: Path) -> None:
        path = _pick(step, draw, kind)
        path.unlink()
        path.mkdir()

    return do


def _swapped(*kinds: str, both: bool = False):
    def do(step: Path, draw: random.Random, mark: Path) -> None:
        other = step.with_name(f"step-{OLDER}")
        for kind in kinds:
            path = _pick(step, draw, kind)
            mine, theirs = path.read_bytes(), (other / path.name).read_bytes()
            rewrite(path, theirs)
            if both:
                rewrite(other / path.name, mine)

    return do


def _halved(raw: bytes, draw: random.Random) -> bytes:
    return raw[: draw.randrange(len(raw))]


def _shortened(raw: bytes, draw: random.Random) -> bytes:
    return raw[:-1]


def _emptied(raw: bytes, draw: random.Random) -> bytes:
    return b""


def _zeroed(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(max(1, len(raw) - 4096))
    return raw[:at] + b"\0" * min(4096, len(raw) - at) + raw[at + 4096 :]


def _touching(mark: Path) -> bytes:
    """Return a pickle, without its first and last opcodes, that makes a file."""
    words = f"touch {mark}".encode()
    return b"cposix\nsystem\n(X" + len(words).to_bytes(4, "little") + words + b"tR"


def _index_payload(step: Path, draw: random.Random, mark: Path) -> None:
    """Put a call before the index, which reads as before."""
    raw = (step / INDEX).read_bytes()
    rewrite(step / INDEX, raw[:2] + _touching(mark) + b"0" + raw[2:])


def _index_is_payload(step: Path, draw: random.Random, mark: Path) -> None:
    rewrite(step / INDEX, b"\x80\x04" + _touching(mark) + b".")


def _index(step: Path) -> Any:
    return pickle.loads((step / INDEX).read_bytes())


def _object_payload(step: Path, draw: random.Random, mark: Path) -> None:
    """Put a pickle in the place of an object that is no tensor."""
    index = _index(step)
    tensors = {
        name
        for name, entry in index.state_dict_metadata.items()
        if type(entry).__name__ == "TensorStorageMetadata"
    }
    places = [
        place for entry, place in index.storage_data.items() if entry.fqn not in tensors
    ]
    payload = b"\x80\x04" + _touching(mark) + b"."
    place = draw.choice([p for p in places if p.length >= len(payload)])
    path = step / place.relative_path
    raw = bytearray(path.read_bytes())
    raw[place.offset : place.offset + place.length] = payload.ljust(place.length, b"\0")
    rewrite(path, bytes(raw))


def _placed(change: Callable[[Any, Path], Any], every: bool = False):
    """Change where the index says that tensors lie."""

    def do(step: Path, draw: random.Random, mark: Path) -> None:
        index = _index(step)
        entries = list(index.storage_data)
        weights = [entry for entry in entries if entry.fqn.startswith("layers.")]
        for entry in entries if every else [draw.choice(weights)]:
            place = index.storage_data[entry]
            index.storage_data[entry] = change(place, step)
        rewrite(step / INDEX, pickle.dumps(index, 4))

    return do


def _elsewhere(place: Any, step: Path) -> Any:
    return replace(place, relative_path=f"../step-{OLDER}/{place.relative_path}")


def _absolute(place: Any, step: Path) -> Any:
    return replace(place, relative_path=str(step / place.relative_path))


def _above(place: Any, step: Path) -> Any:
    return replace(place, relative_path="..")


def _far(place: Any, step: Path) -> Any:
    return replace(place, offset=2**60)


def _negative(place: Any, step: Path) -> Any:
    return replace(place, offset=-5)


def _no_number(place: Any, step: Path) -> Any:
    return replace(place, length="9")


def _other_file(place: Any, step: Path) -> Any:
    return replace(place, relative_path="none.distcp")


def _resized(change: Callable[[Any], Any]):
    """Change what the index says of one weight."""

    def do(step: Path, draw: random.Random, mark: Path) -> None:
        index = _index(step)
        known = index.state_dict_metadata
        names = [name for name in known if name.startswith("layers.")]
        name = draw.choice(names)
        known[name] = change(known[name])
        rewrite(step / INDEX, pickle.dumps(index, 4))

    return do


def _damages() -> list[Damage]:
    data, index = (".distcp", INDEX), (INDEX,)
    found = [
        Damage("a bit of the data", _flip("data"), data),
        Damage("a bit of the index", _flip(INDEX), index),
        Damage("a bit of the sums", _flip(SUMS), (SUMS,)),
        Damage("a page of zeros in the data", _change("data", _zeroed), data),
        Damage("the data truncated", _change("data", _halved), data),
        Damage("the data short of a byte", _change("data", _shortened), data),
        Damage("the data empty", _change("data", _emptied), data),
        Damage("the index truncated", _change(INDEX, _halved), index),
        Damage("the index empty", _change(INDEX, _emptied), index),
        Damage("the sums truncated", _change(SUMS, lambda r, d: r[: len(r) // 3]),
               (SUMS,)),
        Damage("the sums empty", _change(SUMS, _emptied), (SUMS,)),
        Damage("no data", _without("data"), data),
        Damage("no index", _without(INDEX), index, AS_CUT_OFF),
        Damage("no sums", _without(SUMS), (SUMS,), AS_BEFORE),
        Damage("a folder for the data", _as_folder("data"), data),
        Damage("a folder for the index", _as_folder(INDEX), index, AS_CUT_OFF),
        Damage("a folder for the sums", _as_folder(SUMS), (SUMS,)),
        Damage("another step's data", _swapped("data"), data),
        Damage("another step's index", _swapped(INDEX), index),
        Damage("another step's sums", _swapped(SUMS), (SUMS,)),
        Damage("another step's data and index", _swapped("data", INDEX),
               (*data, *index)),
        Damage("two steps' data swapped", _swapped("data", both=True), data),
        Damage("two steps' sums swapped", _swapped(SUMS, both=True), (SUMS,)),
    ]  # fmt: skip
    outside = (*index, "outside")
    for sums in (KEPT, MADE, REMOVED):
        objects = ALL if sums == KEPT else WHOLE
        for name, do, names, expected in (
            ("a call before the index", _index_payload, index, ALL),
            ("a call for an index", _index_is_payload, index, ALL),
            ("a call for an object", _object_payload, (*data, "names"), objects),
            ("data in another step", _placed(_elsewhere), outside, ALL),
            ("data in another step, all", _placed(_elsewhere, True), outside, ALL),
            ("data at an absolute path", _placed(_absolute), outside, ALL),
            ("data in a folder above", _placed(_above), outside, ALL),
            ("data far behind the end", _placed(_far), (*data, *index), ALL),
            ("data at a negative place", _placed(_negative), outside, ALL),
            ("data of no length", _placed(_no_number), outside, ALL),
            ("data in a file that is missing", _placed(_other_file),
             (*data, *index), ALL),
            ("a weight that is no tensor", _resized(lambda entry: 3), index, ALL),
            ("a weight without parts",
             _resized(lambda e: replace(e, chunks=[])), index, ALL),
            ("a weight of parts that are none",
             _resized(lambda e: replace(e, chunks=[1])), index, ALL),
        ):  # fmt: skip
            found.append(Damage(f"{name}, {sums}", do, names, expected, sums))
    for sums in (MADE, REMOVED):
        flips = ("a bit of the index", "the index truncated")
        for damage in [d for d in found if d.name in flips]:
            name, either = f"{damage.name}, {sums}", NONE
            if damage.name == "the index truncated":
                either = ALL
            found.append(Damage(name, damage.do, damage.names, either, sums))
    return found


def _redo_sums(step: Path, kind: str) -> None:
    if kind == KEPT:
        return
    (step / SUMS).unlink()
    if kind == MADE:
        lines = [
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
            for path in sorted(step.iterdir())
        ]
        (step / SUMS).write_text("".join(lines))


# ---- what is done with it ------------------------------------------------------------


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
    pairs = [(d, a) for d in _damages() for a in ACTIONS]
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
        _redo_sums(_newest(run), damage.sums)
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
        if after != before or out.exists():
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
    if found != wanted:
        differing = sorted(set(found.items()) ^ set(wanted.items()))
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
