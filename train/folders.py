"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train.errors import UserError


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """A draft folder beside ``out``, which becomes ``out`` when the block ends well.

    Raises:
        UserError: ``out`` is a file, or a folder that is not empty.
    """
    if out.exists() and not out.is_dir():
        raise UserError(
            f"got --out {out}, which is a file, expected a folder: choose one"
        )
    if out.exists() and any(out.iterdir()):
        raise UserError(
            f"got --out {out}, which is not empty, expected an empty or new folder: "
            "choose another, or delete it"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        yield draft
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o777 & ~mask)  # mkdtemp's is private
        if out.exists():
            out.rmdir()
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # gone already if all went well
