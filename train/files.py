"""Files and folders of the application: a file is replaced whole, and a folder takes
its name when everything in it is made.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from train.errors import UserError, is_full

T = TypeVar("T")

PLAN, LEDGER, MADE = "plan.json", "ledger.json", "made"


class Limits:
    """What ``read_json`` checks of an annotated value, in pydantic_core's words."""

    def __init__(self, **limits: object) -> None:
        self._limits = limits

    def __get_pydantic_core_schema__(self, kind: object, handler: Callable) -> dict:
        return handler(kind) | self._limits


# ---- files ---------------------------------------------------------------------------


def opened(path: Path, expected: str) -> IO[bytes]:
    """Open a regular file to read; a FIFO would be waited for."""
    if not path.is_file():
        raise UserError(f"got {path}, which is no file, expected {expected}")
    return path.open("rb")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file beside ``path`` to write to; it becomes ``path`` when the block
    ends well, and is on the disk before anything says so.
    """
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            yield file
            sync(file)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write(path: Path, content: bytes) -> None:
    """Replace a file by another, complete or not at all."""
    with replacing(path) as file:
        file.write(content)


def check_writable(path: Path) -> None:
    """Check that a file may be put at ``path``."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(
            f"got {path}, which is a folder, or lies in one that may not be written, "
            "expected a file: choose another"
        )


def remove_folder(path: Path) -> None:
    """Delete a folder with all in it; of a link the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def sync(file: IO) -> None:
    """Put everything that was written on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sha256(path: Path) -> str:
    """Return the checksum of a file, in hexadecimal."""
    with opened(path, "a whole file: copy it again") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file by another, complete or not at all."""
    write(path, f"{json.dumps(value, indent=1)}\n".encode())


def read_json(path: Path, kind: type[T], expected: str, extra: str = "forbid") -> T:
    """Return what a JSON file holds, as pydantic checks it against ``kind``; ``extra``
    says whether keys that this does not name are an error ("ignore": they are not).
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        raw = path.read_bytes()
        return TypeAdapter(kind).validate_json(raw, strict=True, extra=extra)
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


# ---- folders -------------------------------------------------------------------------


def check_folder(option: str, path: Path) -> bool:
    """Check that the path of an option is no file; return whether it holds anything."""
    if path.exists() and not path.is_dir():
        raise UserError(
            f"got {option} {path}, which is a file, expected a folder: choose another"
        )
    return path.exists() and any(path.iterdir())


def check_new(option: str, path: Path) -> None:
    """Check that the path of an option is an empty folder, or may become one."""
    if check_folder(option, path):
        raise UserError(
            f"got {option} {path}, which is not empty, expected an empty or new "
            "folder: choose another, or delete it"
        )


def hold(path: Path, option: str, patience: float = 0.0) -> int:
    """Make a file or folder this process's alone; return the lock, which holds as long
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


def unfinished(out: Path) -> Path:
    """Return the folder of the work on ``out``: beside the folder itself if ``out`` is
    a link.
    """
    place = out.resolve()
    return place.parent / f".{place.name}.unfinished"


@contextmanager
def workspace(out: Path, plan: dict | None = None) -> Iterator[Path]:
    """Yield the folder for the work on ``out``, this process's alone.

    Its folder "made" becomes ``out`` when the block ends well. Work that wrote a
    ledger, or a meta.json as its last file, stays when it is cut off, and a call with
    an equal ``plan`` finds it again; other work is removed.
    """
    work, out = unfinished(out), out.resolve()
    work.mkdir(parents=True, exist_ok=True)
    held = hold(work, "--out")
    try:
        _claim(work, plan or {})
        try:
            yield work
            (work / LEDGER).unlink(missing_ok=True)  # "made" counts alone from here on
            if out.exists():
                out.rmdir()
            (work / MADE).rename(out)
        except Exception as error:  # libraries have errors of their own
            if is_full(error, work) and not isinstance(error, OSError | UserError):
                raise OSError(f"no space left on the disk of {out}") from error
            raise
        finally:
            if not _is_begun(work):
                with suppress(OSError):
                    _empty(work)
                    work.rmdir()
    finally:
        os.close(held)


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``out``, if that is free and the block ends well."""
    check_new("--out", out)
    with workspace(out) as work:
        yield work / MADE


def discard(out: Path) -> None:
    """Delete what a kill after the last step left of the work on ``out``."""
    work = unfinished(out)
    if (work / PLAN).exists():
        remove_folder(work)


def _claim(work: Path, plan: dict) -> None:
    """Begin the work of this plan, or go on with it."""
    names = {path.name for path in work.iterdir()} - {f".{PLAN}.tmp"}
    if names and PLAN not in names:
        raise UserError(
            f"got {work}, which holds files but no {PLAN}, expected unfinished work "
            "of ours: move that folder away"
        )
    if _is_begun(work):
        again = f"the plan of the work in {work}: delete that folder"
        if read_json(work / PLAN, dict[str, Any], again) != plan:
            raise UserError(
                f"got {work}, which holds unfinished work on other data or with other "
                "options, expected this command's: delete that folder, or repeat the "
                "command that began it"
            )
        return
    _empty(work)
    write_json(work / PLAN, plan)
    (work / MADE).mkdir()


def _empty(work: Path) -> None:
    """Delete everything in a folder of ours, last the plan, which says whose it is."""
    for left in sorted(work.iterdir(), key=lambda path: path.name == PLAN):
        remove_folder(left) if left.is_dir() else left.unlink()


def _is_begun(work: Path) -> bool:
    """Return whether a later call could go on with it."""
    return (work / LEDGER).exists() or is_complete(work)


def is_complete(work: Path) -> bool:
    """Return whether everything is made, and only has to be renamed."""
    return (work / MADE / "meta.json").exists()
