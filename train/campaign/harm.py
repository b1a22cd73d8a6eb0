"""What happens to a checkpoint: bits, pages and files are lost, or somebody has put a
call, or a place elsewhere, into it.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from train.campaign.ground import OLDER, rewrite

INDEX, SUMS = ".metadata", "SHA256SUMS"

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


def _as_fifo(kind: str):
    def do(step: Path, draw: random.Random, mark: Path) -> None:
        path = _pick(step, draw, kind)
        path.unlink()
        os.mkfifo(path)

    return do


def _as_link(kind: str):
    def do(step: Path, draw: random.Random, mark: Path) -> None:
        path = _pick(step, draw, kind)
        path.unlink()
        path.symlink_to("/none/none")

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


def damages() -> list[Damage]:
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
        Damage("no index", _without(INDEX), index),
        Damage("no index, sums removed", _without(INDEX), index, AS_CUT_OFF, REMOVED),
        Damage("no sums", _without(SUMS), (SUMS,), AS_BEFORE),
        Damage("a folder for the data", _as_folder("data"), data),
        Damage("a dead link for the index", _as_link(INDEX), index),
        Damage("a FIFO for the index", _as_fifo(INDEX), index),
        Damage("a folder for the sums", _as_folder(SUMS), (SUMS,)),
        Damage("a FIFO for the sums", _as_fifo(SUMS), (SUMS,)),
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


def redo_sums(step: Path, kind: str) -> None:
    if kind == KEPT:
        return
    (step / SUMS).unlink()
    if kind == MADE:
        lines = [
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
            for path in sorted(step.iterdir())
        ]
        (step / SUMS).write_text("".join(lines))
