"""A folder that is made beside its place, and moved there when it is complete."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train.errors import UserError
from train.token_files import sync

PLAN, LEDGER, MADE = "plan.json", "ledger.json", "made"


def unfinished(out: Path) -> Path:
    """Where the work on ``out`` lies."""
    place = out.absolute()
    return place.parent / f".{place.name}.unfinished"


@contextmanager
def workspace(out: Path, plan: dict) -> Iterator[Path]:
    """The folder for the work on ``out``, this process's alone.

    What is complete goes into its folder "made", with meta.json last; it becomes
    ``out``. Work that wrote a ledger stays when it is cut off, and is found again by a
    call with the same ``plan``; other work is removed.

    Raises:
        UserError: another process works there, or it holds the work of another plan.
    """
    work = unfinished(out)
    work.mkdir(parents=True, exist_ok=True)
    lock = os.open(work, os.O_RDONLY)
    try:
        _lock(lock, work, out)  # whoever fails here cleans up nothing: it is another's
        try:
            _claim(work, plan)
            yield work
            publish(work, out)
        finally:
            if not (work / LEDGER).exists() and not is_complete(work):
                shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(lock)


def _lock(lock: int, work: Path, out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"got {out}, on which another train.prepare is at work, expected none: "
            "wait for it, or choose another --out"
        ) from error
    # it may have finished, and removed the folder, between our opening and locking it
    work.mkdir(exist_ok=True)
    if not os.path.samestat(os.fstat(lock), work.stat()):
        raise UserError(
            f"got {out}, on which another train.prepare was at work until now, "
            "expected none: run the command again"
        )


def _claim(work: Path, plan: dict) -> None:
    """Find the work of this plan, or begin it."""
    path = work / PLAN
    begun = (work / LEDGER).exists() or is_complete(work)
    if begun and json.loads(path.read_text()) != plan:
        raise UserError(
            f"got {work}, which holds unfinished work on other data or with other "
            "options, expected this command's: delete that folder, or repeat the "
            "command that began it"
        )
    if not begun:
        for left in work.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        save_json(path, plan)


def is_complete(work: Path) -> bool:
    """Whether all is made, and only has to be moved."""
    return (work / MADE / "meta.json").exists()


def publish(work: Path, out: Path) -> None:
    """Move what was made to its place."""
    (work / LEDGER).unlink(missing_ok=True)  # from here on, "made" is all that counts
    if out.exists():
        out.rmdir()
    (work / MADE).rename(out)


def save_json(path: Path, value: dict) -> None:
    """Replace a file by another, complete or not at all."""
    draft = path.with_suffix(".tmp")
    with draft.open("w") as file:
        json.dump(value, file)
        sync(file)
    draft.rename(path)
