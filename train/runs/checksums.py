"""SHA-256 of a checkpoint's files, in the form of sha256sum: ``sha256sum --check
SHA256SUMS`` in the folder of a step says the same.
"""

import logging
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from train.errors import UserError
from train.files import replacing, sha256

SUMS = "SHA256SUMS"
LINE = re.compile(r"([0-9a-fA-F]{64})  ([^/]+)")

log = logging.getLogger(__name__)


def _digests(paths: list[Path]) -> list[str]:
    """Hash several files at once, on this process's share of the cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // ranks)) as pool:
        return list(pool.map(sha256, paths))


def write(path: Path) -> None:
    """Write the checksums of all files in the folder of a finished checkpoint."""
    paths = sorted(p for p in path.iterdir() if p.suffix != ".tmp")
    rows = zip(_digests(paths), paths, strict=True)
    lines = "".join(f"{digest}  {file.name}\n" for digest, file in rows)
    with replacing(path / SUMS) as sums:
        sums.write(lines.encode())


def verify(path: Path, names: Iterable[str]) -> None:
    """Check the files called ``names`` in the folder of a checkpoint.

    One without checksums, of a release before they were written or of a process killed
    just before it wrote them, is believed, which is said once.
    """
    if not os.path.lexists(path / SUMS):
        _say_unchecked(path)
        return
    text = (path / SUMS).read_text(errors="replace")
    lines = [LINE.fullmatch(line) for line in text.splitlines()]
    expected = {line[2]: line[1].lower() for line in lines if line}
    files = [path / name for name in sorted(names)]
    for file, found in zip(files, _digests(files), strict=True):
        if found != expected.get(file.name):
            raise UserError(
                f"got {file} with SHA-256 {found[:12]}..., expected "
                f"{expected.get(file.name, 'one')[:12]}... of {SUMS} beside it: the "
                "file was altered; copy it again, or choose another checkpoint"
            )


@cache
def _say_unchecked(path: Path) -> None:
    log.warning(
        "%s has no %s, so that damage would go unnoticed: an earlier release saved it, "
        "or its saving was cut off at the very end",
        path,
        SUMS,
    )
