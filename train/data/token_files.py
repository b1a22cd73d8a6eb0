"""Token files: raw uint16 as nanoGPT's, and shards with a header as llm.c's."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np

from train.errors import UserError
from train.files import Limits, opened, replacing

Count = Annotated[int, Limits(ge=0, lt=2**63)]  # as meta.json may give it
Sha256 = Annotated[str, Limits(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Limits(pattern=r"^[^/\x00]+\.bin$")]  # of a file beside it

# llm.c, dev/data/data_common.py: 256 int32, then the tokens
COPY = "a token file: copy it there, or prepare the data again into another folder"
HEADER_BYTES, MAGIC, VERSION = 1024, 20240520, 1


@dataclass(frozen=True)
class Split:
    """Tokens of a split or a part of it: how many, and the bytes of text behind them
    (None: not known).

    One file, ``sha256`` its checksum; or ``shards`` with a header, {name: checksum} in
    their order, ``sha256`` that of the list of them.
    """

    tokens: Count
    text_bytes: Count | None
    sha256: Sha256
    shards: dict[Name, Sha256] = field(default_factory=dict)


class Stream:
    """Several uint16 arrays of tokens as one."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = list(parts)
        self._ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, window: slice) -> np.ndarray:
        """Return (num_tokens,) uint16 of a window; a copy where it spans parts."""
        start, stop, step = window.indices(len(self))
        assert step == 1, "windows are contiguous"
        first = int(np.searchsorted(self._ends, start, side="right"))
        pieces = []
        while start < stop:
            before = int(self._ends[first - 1]) if first else 0
            end = min(stop, int(self._ends[first]))
            pieces.append(self.parts[first][start - before : end - before])
            start, first = end, first + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([self.parts[0][:0], *pieces])


def open_raw(path: Path) -> np.ndarray:
    """Return the tokens of a raw file, (num_tokens,) uint16, memory-mapped to read."""
    size = _size(path)
    if size % 2:
        raise UserError(
            f"got {size:,} bytes in {path}, expected an even number (two a token): the "
            "file is truncated; copy or make it again"
        )
    return _mapped(path, 0)


def open_shard(path: Path) -> np.ndarray:
    """Return the tokens of a shard, (num_tokens,) uint16, as a read-only memory map."""
    size = _size(path)
    with opened(path, COPY) as file:
        raw = file.read(HEADER_BYTES)
    head = np.frombuffer(raw.ljust(HEADER_BYTES, b"\0"), dtype="<i4")
    if size < HEADER_BYTES or tuple(head[:2]) != (MAGIC, VERSION):
        found = f"magic {head[0]}, version {head[1]} in {len(raw):,} bytes of header"
        raise UserError(
            f"got {path} with {found}, expected a shard of GPT-2 tokens (magic {MAGIC},"
            f" version {VERSION}): copy or make it again, or move it out of the folder"
        )
    expected = HEADER_BYTES + 2 * int(head[2])
    if size != expected:
        raise UserError(
            f"got {size:,} bytes in {path}, expected {expected:,} for the {head[2]:,} "
            "tokens of its header: it is truncated or altered; copy or make it again"
        )
    return _mapped(path, HEADER_BYTES)


def write_shard(path: Path, tokens: np.ndarray, byte_lengths: np.ndarray) -> Split:
    """Write a shard, complete or not at all.

    ``tokens`` are (num_tokens,) uint16, fewer than 2**31; ``byte_lengths`` the bytes of
    text of each id, (vocab_size,).
    """
    head = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    head[:3] = MAGIC, VERSION, len(tokens)
    body = np.ascontiguousarray(tokens, dtype="<u2")
    digest = hashlib.sha256(head)
    digest.update(body)
    with replacing(path) as file:
        file.write(head)
        file.write(body)
    return Split(len(tokens), text_bytes(tokens, byte_lengths), digest.hexdigest())


def read_content(path: Path, byte_lengths: np.ndarray, window: int = 1 << 24) -> Split:
    """Return what a raw file holds, read in windows of that many tokens."""
    tokens, digest, num_bytes = open_raw(path), hashlib.sha256(), 0
    for at in range(0, len(tokens), window):
        part = tokens[at : at + window]
        digest.update(part)
        num_bytes += text_bytes(part, byte_lengths)
    return Split(len(tokens), num_bytes, digest.hexdigest())


def text_bytes(tokens: np.ndarray, byte_lengths: np.ndarray) -> int:
    """Return the bytes of text behind tokens."""
    return int(byte_lengths[tokens].sum(dtype=np.int64))


def _mapped(path: Path, offset: int) -> np.ndarray:
    if path.stat().st_size == offset:  # which no map can be of
        return np.empty(0, dtype="<u2")
    return np.memmap(path, dtype="<u2", mode="r", offset=offset)


def _size(path: Path) -> int:
    if not path.is_file():
        raise UserError(f"got no {path}, expected {COPY}")
    return path.stat().st_size
