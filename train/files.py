"""Files and folders that appear whole or not at all, and JSON files."""

import codecs
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from train.errors import UserError

T = TypeVar("T")

DEEPEST = 200  # folders in each other: pathlib makes them by recursion
PLAN, LEDGER, MADE = "plan.json", "ledger.json", "made"


class Limits:
    """What ``read_json`` checks of an annotated value, in pydantic_core's words."""

    def __init__(self, **limits: object) -> None:
        self._limits = limits

    def __get_pydantic_core_schema__(self, kind: object, handler: Callable) -> dict:
        return handler(kind) | self._limits


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO]:
    """Open a file beside ``path`` to write to; it becomes ``path`` when the block ends
    well, and is on the disk before anything says that it is there.
    """
    draft = path.with_suffix(".tmp")
    with draft.open(mode) as file:
        yield file
        sync(file)
    draft.rename(path)


def sync(file: IO) -> None:
    """Put what was written on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sha256(path: Path) -> str:
    """Return the checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file by another, complete or not at all."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1) + "\n")


def read_json(path: Path, kind: type[T], expected: str, extra: str = "forbid") -> T:
    """Return what a JSON file holds, as pydantic checks it against ``kind``; ``extra``
    says whether keys that this does not name are an error ("ignore": they are not).
    """
    from pydantic import TypeAdapter, ValidationError

    adapter = TypeAdapter(kind)
    check_file(path, expected)
    try:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # as some editors begin
        return adapter.validate_json(raw, strict=True, extra=extra)
    except FileNotFoundError:
        got = f"no {path}"
    except OSError as error:
        got = f"a {path} that does not read ({error})"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place, value = ".".join(map(str, first["loc"])), first["input"]
        got = f"a {path} that does not read ({place} {first['msg']})"
        if place and first["type"] != "missing" and not isinstance(value, dict | list):
            got = f"{place}={value!r:.60} in {path} ({first['msg']})"
    raise UserError(f"got {got}, expected {expected}")


def check_file(path: Path, expected: str) -> None:
    """Check that ``path`` is a file, if it is there: a FIFO would be waited for, and
    some devices have no end.
    """
    if os.path.lexists(path) and not path.is_file():
        raise UserError(
            f"got {path}, which is a folder, a FIFO, a device or a link to nothing, "
            f"expected {expected}"
        )


def check_folder(option: str, path: Path) -> bool:
    """Check that the path of an option is no file; return whether it holds anything."""
    if len(path.parts) > DEEPEST or (path.exists() and not path.is_dir()):
        raise UserError(
            f"got {option} {path}, which is a file or below more than {DEEPEST} others,"
            " expected a folder: choose another"
        )
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise UserError(
                f"got {option} {path}, where {place} is a link to nothing, expected a "
                "folder: make what it points to, or choose another"
            )
    return path.exists() and any(path.iterdir())


def unfinished(out: Path) -> Path:
    """Return where the work on ``out`` lies: beside what it is a link to, if it is."""
    place = out.resolve()
    return place.parent / f".{place.name}.unfinished"


@contextmanager
def workspace(out: Path, plan: dict | None = None) -> Iterator[Path]:
    """Yield the folder for the work on ``out``, this process's alone.

    What is put into its folder "made" becomes ``out`` when the block ends well. Work
    that wrote a ledger, or a meta.json as its last file, stays when it is cut off, and
    is found again by a call with the same ``plan``; other work is removed.
    """
    work, out = unfinished(out), out.resolve()
    work.mkdir(parents=True, exist_ok=True)
    held = hold(work, "--out")
    try:
        # another may have finished, and removed the folder, before we had it
        work.mkdir(exist_ok=True)
        if not os.path.samestat(os.fstat(held), work.stat()):
            raise UserError(
                f"got {out}, on which another process was at work until now, expected "
                "none: run the command again"
            )
        try:
            _claim(work, plan or {})
            yield work
            (work / LEDGER).unlink(missing_ok=True)  # from here on, "made" counts alone
            if out.exists():
                out.rmdir()
            (work / MADE).rename(out)
        finally:
            if not (work / LEDGER).exists() and not is_complete(work):
                shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(held)


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``out``, if that is free and the block ends well."""
    if check_folder("--out", out):
        raise UserError(
            f"got --out {out}, which is not empty, expected an empty or new folder: "
            "choose another, or delete it"
        )
    with workspace(out) as work:
        yield work / MADE


def hold(path: Path, option: str, patience: float = 0.0) -> int:
    """Make a file or folder this process's alone; return what holds the lock as long
    as it is open, here or in a child. ``patience`` are the seconds to wait for it.
    """
    held, began = os.open(path, os.O_RDONLY), time.monotonic()
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return held
        except BlockingIOError as error:
            if time.monotonic() - began >= patience:
                os.close(held)
                raise UserError(
                    f"got {path}, in which another process is at work, expected none: "
                    f"wait for it, end it, or choose another {option}"
                ) from error
        time.sleep(0.2)


def _claim(work: Path, plan: dict) -> None:
    """Find the work of this plan, or begin it."""
    path = work / PLAN
    begun = (work / LEDGER).exists() or is_complete(work)
    whose = f"the plan of the work in {work}: delete that folder"
    if begun and read_json(path, dict[str, Any], whose) != plan:
        raise UserError(
            f"got {work}, which holds unfinished work on other data or with other "
            "options, expected this command's: delete that folder, or repeat the "
            "command that began it"
        )
    if not begun:
        for left in work.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        write_json(path, plan)
    (work / MADE).mkdir(exist_ok=True)


def is_complete(work: Path) -> bool:
    """Return whether all is made, and only has to be moved."""
    return (work / MADE / "meta.json").exists()
