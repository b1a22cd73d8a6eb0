"""All that the application opens, writes, replaces and deletes, by one law each:

- what is read is a regular file within a limit of size;
- what is written is a new file, which then takes the place of the old one; a log grows;
- no link that we did not make is followed to write or to delete;
- a folder is emptied where its own plan.json says that we made it.
"""

import codecs
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from train.errors import UserError, system_errno

T = TypeVar("T")

DEEPEST = 200  # folders in each other: pathlib makes them by recursion
PLAN, LEDGER, MADE = "plan.json", "ledger.json", "made"
MARK = {"unfinished": "work of python -m train"}  # in a plan.json: we made the folder

# Small files may cost much. Bytes, unless said otherwise:
SMALL = 16 << 20  # a file that is read whole: JSON, checksums
LONG_TEXT = 4 << 30  # a text that is prepared
TOKENIZER = 32 << 20  # a tokenizer.json
WEIGHTS_HEADER = 8 << 20  # the names in a file of safetensors
INDEX = 32 << 20  # a checkpoint's .metadata
OBJECT = 1 << 20  # the pickle of one tensor or object in a checkpoint
WRITTEN_OUT = 128 << 20  # a pickle of which each reference is written out
SPARSE = 16  # times as long as what a file takes of the disk


class Limits:
    """What ``read_json`` checks of an annotated value, in pydantic_core's words."""

    def __init__(self, **limits: object) -> None:
        self._limits = limits

    def __get_pydantic_core_schema__(self, kind: object, handler: Callable) -> dict:
        return handler(kind) | self._limits


def opened(path: Path, expected: str, most: int | None = None) -> IO[bytes]:
    """Open a regular file of at most so many bytes to read, through links too."""
    check_file(path, expected)
    file = open(path, "rb", opener=_opener(os.O_NONBLOCK))  # noqa: SIM115  (returned)
    status = os.fstat(file.fileno())
    size, taken = status.st_size, status.st_blocks * 512
    is_sparse = size > max(SMALL, SPARSE * taken) and _has_holes(file)
    if is_sparse or (most is not None and size > most):
        file.close()
        limit = "as many on the disk" if is_sparse else f"at most {most:,}"
        raise UserError(f"got {path} of {size:,} bytes, expected {limit}: {expected}")
    return file


def _opener(more: int) -> Callable[[str, int], int]:
    return lambda path, flags: os.open(path, flags | more, 0o666)


def _has_holes(file: IO[bytes]) -> bool:
    """Return whether it has any; a compressed file, too, takes less of the disk."""
    hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    return hole < os.fstat(file.fileno()).st_size


def read(path: Path, expected: str, most: int = SMALL) -> bytes:
    """Return what a regular file of at most so many bytes holds."""
    with opened(path, expected, most) as file:
        return file.read(most)


def file_size(path: Path, expected: str) -> int:
    """Return how many bytes a regular file has."""
    with opened(path, expected) as file:
        return os.fstat(file.fileno()).st_size


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file beside ``path`` to write to; it becomes ``path`` when the block
    ends well, and is on the disk before anything says so. A device is written to.
    """
    if check_writable(path):
        with path.open("wb") as file:
            yield file
        return
    draft = path.with_name(_draft(path.name))
    remove(draft)  # of a call that was killed
    try:
        with draft.open("xb") as file:  # O_EXCL: through no link
            yield file
            sync(file)
        draft.rename(path)
    except BaseException:
        remove(draft)
        raise


def _draft(name: str) -> str:
    return f".{name}.tmp"


def write(path: Path, content: bytes) -> None:
    """Replace a file by another, complete or not at all."""
    with replacing(path) as file:
        file.write(content)


def check_writable(path: Path) -> bool:
    """Check that a file may be put at ``path``; return whether a device is there, such
    as /dev/null.
    """
    there = os.path.lexists(path)
    mode = path.lstat().st_mode if there else stat.S_IFREG
    may = os.access(path if there else path.parent, os.W_OK)
    if not may or not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        raise UserError(
            f"got {path}, which is a folder, a FIFO or a link, or may not be written, "
            "expected a file that can be written, or none: choose another, or move it "
            "away"
        )
    return stat.S_ISCHR(mode)


def growing(path: Path, mode: str = "ab") -> IO:
    """Open a file of ours, or a new one, to write at its end."""
    return open(path, mode, opener=_open_ours)


def _open_ours(path: str, flags: int) -> int:
    refused = UserError(
        f"got {path}, which is a link or no file, expected a file of its own: "
        "nothing was written to it; move it away"
    )
    try:
        descriptor = _opener(os.O_NOFOLLOW | os.O_NONBLOCK)(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO, a socket
            raise refused from error
        raise
    if _is_linked(os.fstat(descriptor)):  # of what is open: nobody can exchange it
        os.close(descriptor)
        raise refused
    return descriptor


def is_linked(path: Path) -> bool:
    """Return whether a path is a link, or a file with other names, or no file."""
    return _is_linked(path.lstat())


def _is_linked(status: os.stat_result) -> bool:
    return not stat.S_ISREG(status.st_mode) or status.st_nlink > 1


def remove(path: Path) -> None:
    """Delete a file that we wrote, if it is there; of a link the link."""
    path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Delete a folder that we made, with all in it; of a link the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def copy(path: Path, folder: Path) -> None:
    """Copy a file, which is no link, into a folder."""
    again = "a file: copy it there"
    if path.is_symlink():
        raise UserError(f"got {path}, which is a link, expected {again}")
    with opened(path, again) as source, replacing(folder / path.name) as target:
        shutil.copyfileobj(source, target)


def check_links(folder: Path, expected: str) -> None:
    """Check that no link in a folder leads out of it: libraries write there as well,
    and follow links.
    """
    root = folder.resolve()
    for place, folders, files in os.walk(root):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(
                root
            ):
                raise UserError(
                    f"got {path}, a link to {os.readlink(path)}, which lies elsewhere, "
                    f"expected {expected}"
                )


def sync(file: IO) -> None:
    """Put what was written on the disk."""
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

    adapter = TypeAdapter(kind)
    try:
        raw = read(path, expected).removeprefix(codecs.BOM_UTF8)  # as editors begin it
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


def check_new(option: str, path: Path) -> None:
    """Check that the path of an option is an empty folder, or may become one."""
    if check_folder(option, path):
        raise UserError(
            f"got {option} {path}, which is not empty, expected an empty or new "
            "folder: choose another, or delete it"
        )


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
    work.parent.mkdir(parents=True, exist_ok=True)
    _make(work)
    held = hold(work, "--out")
    try:
        _make(work)  # another may have finished, and removed it, before we had it
        if not os.path.samestat(os.fstat(held), work.lstat()):
            raise UserError(
                f"got {out}, on which another process was at work until now, expected "
                "none: run the command again"
            )
        _check_ours(work, plan or {})
        try:
            _claim(work, plan or {})
            yield work
            remove(work / LEDGER)  # from here on, "made" counts alone
            if out.exists():
                out.rmdir()
            (work / MADE).rename(out)
        except Exception as error:  # libraries have errors of their own
            number = system_errno(error, work)
            if number and not isinstance(error, OSError | UserError):
                raise OSError(number, os.strerror(number), str(out)) from error
            raise
        finally:
            if not _is_begun(work):
                with suppress(OSError):
                    _empty(work)
                    work.rmdir()
    finally:
        os.close(held)


def _make(work: Path) -> None:
    with suppress(FileExistsError):
        work.mkdir()
    if not stat.S_ISDIR(work.lstat().st_mode):
        raise UserError(
            f"got {work}, which is a link or a file, expected the folder of unfinished "
            "work, or none: move it away"
        )


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``out``, if that is free and the block ends well."""
    check_new("--out", out)
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


def _check_ours(work: Path, plan: dict) -> None:
    """Check that a folder is empty, or holds the work of this plan, or else work that
    cannot go on, which we may delete.
    """
    if {path.name for path in work.iterdir()} <= {_draft(PLAN)}:  # cut off at its plan
        return
    check_links(work, "none in unfinished work: move that folder away")
    begun = _is_begun(work)
    whose = f"the plan of the work in {work}: delete that folder"
    kept = read_json(work / PLAN, dict[str, Any], whose)
    if begun and {key: kept[key] for key in kept.keys() - MARK} != plan:
        raise UserError(
            f"got {work}, which holds unfinished work on other data or with other "
            "options, expected this command's: delete that folder, or repeat the "
            "command that began it"
        )
    if not begun and not kept.items() >= MARK.items():
        raise UserError(
            f"got {work}, whose {PLAN} is of somebody else, expected unfinished work "
            "of ours: move that folder away"
        )


def _claim(work: Path, plan: dict) -> None:
    """Go on with the work of this plan, or begin it."""
    if not _is_begun(work):
        _empty(work)
        write_json(work / PLAN, plan | MARK)
    (work / MADE).mkdir(exist_ok=True)


def _empty(work: Path) -> None:
    """Delete what a folder of ours holds, the plan last: what a kill leaves is ours."""
    for left in sorted(work.iterdir(), key=lambda path: path.name == PLAN):
        (remove_folder if left.is_dir() else remove)(left)


def discard(out: Path) -> None:
    """Delete what a kill after the last step left of the work on ``out``."""
    work = unfinished(out)
    with suppress(UserError, OSError):
        if stat.S_ISDIR(work.lstat().st_mode):
            _check_ours(work, {})
            _empty(work)
            work.rmdir()


def _is_begun(work: Path) -> bool:
    """Return whether a later call could go on with it."""
    return (work / LEDGER).exists() or is_complete(work)


def is_complete(work: Path) -> bool:
    """Return whether all is made, and only has to be moved."""
    return (work / MADE / "meta.json").exists()
