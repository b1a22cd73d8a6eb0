"""What happens to a checkpoint: bits, pages and files are lost, or somebody has put a
call, or a place elsewhere, into it.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests.faults.ground import OLDER, rewrite
from train.runs import checksums

DATA, INDEX, SUMS = ".distcp", ".metadata", checksums.SUMS
KEPT, RENEWED, REMOVED = "sums kept", "sums renewed", "sums removed"
# what is expected of all commands, of those that read the whole checkpoint, or of none
ALL, WHOLE, NONE = "all refuse", "those that read all of it refuse", "either"
AS_BEFORE, AS_CUT_OFF = "as before", "as if its saving was cut off"


class Step(NamedTuple):
    """The folder of a step, what to draw from, and a file that a payload would make."""

    folder: Path
    draw: random.Random
    mark: Path

    def file(self, kind: str) -> Path:
        """Return a file of the step: its index, its checksums, or any of its data."""
        return self.draw.choice(sorted(self.folder.glob(f"*{kind}")))


class Damage(NamedTuple):
    """``do`` changes a step, whose checksums are then renewed, removed or left as they
    are; an error says one of ``names``.
    """

    name: str
    do: Callable[[Step], None]
    names: tuple[str, ...]
    expected: str = ALL
    sums: str = KEPT

    def apply(self, step: Step) -> None:
        """Damage a step."""
        self.do(step)
        if self.sums != KEPT:
            (step.folder / SUMS).unlink()
        if self.sums == RENEWED:
            checksums.write(step.folder)


# ---- files ---------------------------------------------------------------------------


def a_bit_of(path: Path, draw: random.Random) -> None:
    raw = path.read_bytes()
    changed = raw
    # in capitals, or with another end of a line, checksums are the same
    while changed.lower().split() == raw.lower().split():
        at = draw.randrange(len(raw))
        changed = raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]
    rewrite(path, changed)


def a_page_of_zeros_in(path: Path, draw: random.Random) -> None:
    raw = path.read_bytes()
    changed = raw
    while changed == raw:
        at = draw.randrange(max(1, len(raw) - 4096))
        num_zeros = len(raw[at : at + 4096])
        changed = raw[:at] + bytes(num_zeros) + raw[at + num_zeros :]
    rewrite(path, changed)


def half_of(path: Path, draw: random.Random) -> None:
    raw = path.read_bytes()
    rewrite(path, raw[: draw.randrange(len(raw) * 3 // 4)])


def all_but_a_byte_of(path: Path, draw: random.Random) -> None:
    rewrite(path, path.read_bytes()[:-1])


def nothing_in(path: Path, draw: random.Random) -> None:
    rewrite(path, b"")


def no(path: Path, draw: random.Random) -> None:
    path.unlink()


def a_folder_for(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def a_fifo_for(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def a_dead_link_for(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to("/none/none")


def _in_older(path: Path) -> Path:
    return path.parent.with_name(f"step-{OLDER}") / path.name


def another_step_s(path: Path, draw: random.Random) -> None:
    rewrite(path, _in_older(path).read_bytes())


def two_steps_swapped(path: Path, draw: random.Random) -> None:
    newer, older = path.read_bytes(), _in_older(path).read_bytes()
    rewrite(path, older)
    rewrite(_in_older(path), newer)


def _of_files() -> Iterator[Damage]:
    for kind in (DATA, INDEX, SUMS):
        for change in (
            a_bit_of, a_page_of_zeros_in, half_of, all_but_a_byte_of, nothing_in, no,
            a_folder_for, a_fifo_for, a_dead_link_for, another_step_s,
            two_steps_swapped,
        ):  # fmt: skip
            if (kind, change) == (SUMS, all_but_a_byte_of):
                continue  # the end of its last line
            expected = AS_BEFORE if (kind, change) == (SUMS, no) else ALL

            def do(step: Step, kind=kind, change=change) -> None:
                change(step.file(kind), step.draw)

            name = f"{change.__name__.replace('_', ' ')} {kind}"
            yield Damage(name, do, (DATA, INDEX, SUMS), expected)
            if kind == INDEX and change in (a_bit_of, half_of):
                expected = NONE if change is a_bit_of else ALL
                for sums in (RENEWED, REMOVED):
                    yield Damage(f"{name}, {sums}", do, (INDEX,), expected, sums)
            elif (kind, change) == (INDEX, no):
                yield Damage(f"{name}, {REMOVED}", do, (INDEX,), AS_CUT_OFF, REMOVED)


# ---- what the index says -------------------------------------------------------------


def _touching(mark: Path) -> bytes:
    """Return a pickle, without its first and last opcodes, that makes a file."""
    words = f"touch {mark}".encode()
    return b"cposix\nsystem\n(X" + len(words).to_bytes(4, "little") + words + b"tR"


def _call_before_the_index(step: Step) -> None:
    """Put a call before the index, which reads as before."""
    raw = step.file(INDEX).read_bytes()
    rewrite(step.file(INDEX), raw[:2] + _touching(step.mark) + b"0" + raw[2:])


def _call_for_the_index(step: Step) -> None:
    rewrite(step.file(INDEX), b"\x80\x04" + _touching(step.mark) + b".")


def _index(step: Step) -> Any:
    return pickle.loads(step.file(INDEX).read_bytes())


def _call_for_an_object(step: Step) -> None:
    """Put a pickle in the place of an object that is no tensor."""
    index = _index(step)
    payload = b"\x80\x04" + _touching(step.mark) + b"."
    places = [
        place
        for entry, place in index.storage_data.items()
        if isinstance(index.state_dict_metadata[entry.fqn], BytesStorageMetadata)
        and place.length >= len(payload)
    ]
    place = step.draw.choice(places)
    path = step.folder / place.relative_path
    raw = bytearray(path.read_bytes())
    raw[place.offset : place.offset + place.length] = payload.ljust(place.length, b"\0")
    rewrite(path, bytes(raw))


def _placed(change: Callable[[Path, str], dict[str, Any]], all_of_them: bool = False):
    """Change where the index says that a weight, or everything, lies."""

    def do(step: Step) -> None:
        index = _index(step)
        entries = sorted(index.storage_data, key=str)
        if not all_of_them:
            weights = [entry for entry in entries if entry.fqn.startswith("layers.")]
            entries = [step.draw.choice(weights)]
        for entry in entries:
            place = index.storage_data[entry]
            changes = change(step.folder, place.relative_path)
            index.storage_data[entry] = replace(place, **changes)
        rewrite(step.file(INDEX), pickle.dumps(index, 4))

    return do


def _described(change: Callable[[Any], Any]):
    """Change what the index says of one weight."""

    def do(step: Step) -> None:
        index = _index(step)
        entries = index.state_dict_metadata
        name = step.draw.choice(
            [name for name in entries if name.startswith("layers.")]
        )
        entries[name] = change(entries[name])
        rewrite(step.file(INDEX), pickle.dumps(index, 4))

    return do


def _elsewhere(folder: Path, name: str) -> dict[str, Any]:
    return dict(relative_path=f"../step-{OLDER}/{name}")


def _absolute(folder: Path, name: str) -> dict[str, Any]:
    return dict(relative_path=str(folder / name))


PREPARED = {
    "a call before the index": _call_before_the_index,
    "a call for the index": _call_for_the_index,
    "a call for an object": _call_for_an_object,
    "a weight in another step": _placed(_elsewhere),
    "all weights in another step": _placed(_elsewhere, all_of_them=True),
    "a weight at an absolute path": _placed(
        lambda f, n: dict(relative_path=f"{f}/{n}")
    ),
    "a weight in a folder above": _placed(lambda f, n: dict(relative_path="..")),
    "a weight in no file": _placed(lambda f, n: dict(relative_path="none.distcp")),
    "a weight far behind the end": _placed(lambda f, n: dict(offset=2**60)),
    "a weight at a negative place": _placed(lambda f, n: dict(offset=-5)),
    "a weight of no length": _placed(lambda f, n: dict(length="9")),
    "a weight that is no tensor": _described(lambda entry: 3),
    "a weight without parts": _described(lambda entry: replace(entry, chunks=[])),
    "a weight of other parts": _described(lambda entry: replace(entry, chunks=[1])),
}


def damages() -> list[Damage]:
    """Return all damages."""
    listed = list(_of_files())
    for name, do in PREPARED.items():
        for sums in (KEPT, RENEWED, REMOVED):
            by_few = do is _call_for_an_object and sums != KEPT
            names = (DATA, INDEX, "outside", "names", "cannot read its part")
            expected = WHOLE if by_few else ALL
            listed.append(Damage(f"{name}, {sums}", do, names, expected, sums))
    return listed
