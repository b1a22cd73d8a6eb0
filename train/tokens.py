"""Token files: train.bin and val.bin as raw uint16 (nanoGPT reads them too), meta.json
beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from train.errors import UserError

SPLITS = ("train", "val")
VERIFY_LIMIT = (
    1 << 30
)  # bytes; larger files are checked for their size, and every batch for its ids


@dataclass(frozen=True)
class Split:
    """One token file: how many tokens, the bytes of text behind them, and the file's
    SHA-256.
    """

    tokens: int
    text_bytes: int
    sha256: str


@dataclass(frozen=True)
class Meta:
    """What meta.json says. ``source`` is what the files were made from, to recognise
    them again.
    """

    tokenizer: str
    vocab_size: int
    source: dict
    train: Split
    val: Split

    def save(self, folder: Path) -> None:
        """Write meta.json."""
        (folder / "meta.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Meta:
        """Read meta.json.

        Raises:
            UserError: no such file, or not one of ours.
        """
        path = folder / "meta.json"
        if not path.exists():
            raise UserError(
                f"got no {path}, expected the output of train.prepare: python -m "
                f"train.prepare --source python --out {folder}"
            )
        try:
            raw = json.loads(path.read_text())
            splits = {name: Split(**raw.pop(name)) for name in SPLITS}
            return cls(**raw, **splits)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"got a {path} that does not read ({error}), expected the output of "
                "train.prepare: prepare the data again "
                "into another folder"
            ) from error

    def nats_per_byte(self, split: str) -> float:
        """What a loss in nats per token is multiplied with to give nats per byte of
        text.
        """
        part = getattr(self, split)
        return part.tokens / part.text_bytes


class Writer:
    """Streams documents into one token file, counting and hashing on the way."""

    def __init__(self, path: Path) -> None:
        self._file, self._hash = path.open("wb"), hashlib.sha256()
        self.tokens = self.text_bytes = 0

    def add(self, ids: Iterable[int], text_bytes: int) -> None:
        """Append one document."""
        data = np.asarray(ids, dtype=np.uint16).astype("<u2").tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.tokens += len(data) // 2
        self.text_bytes += text_bytes

    @property
    def split(self) -> Split:
        """What the file holds."""
        return Split(self.tokens, self.text_bytes, self._hash.hexdigest())

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def open_tokens(
    folder: Path, split: str, *, vocab_size: int, verify: bool = True
) -> tuple[np.ndarray, Meta]:
    """The tokens of one split as a read-only uint16 memory map, checked.

    Args:
        folder: holds the output of train.prepare.
        split: "train" or "val".
        vocab_size: of the model that will read them.
        verify: compare the checksum of files up to 1 GiB.

    Raises:
        UserError: missing, truncated or altered file; a vocabulary larger than the
            model's.
    """
    meta = Meta.load(folder)
    path, expected = folder / f"{split}.bin", getattr(meta, split)
    if not path.exists():
        raise UserError(
            f"got no {path}, expected {expected.tokens:,} tokens: prepare the data "
            "again into another folder"
        )
    size = path.stat().st_size
    if size != 2 * expected.tokens:
        raise UserError(
            f"got {size:,} bytes in {path}, expected {2 * expected.tokens:,} (two a "
            "token): the file is truncated or not "
            "the one that meta.json describes; prepare the data again into another "
            "folder"
        )
    if verify and size <= VERIFY_LIMIT:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected.sha256:
            raise UserError(
                f"got checksum {found[:12]}... of {path}, expected "
                f"{expected.sha256[:12]}... from meta.json: the file was "
                "altered; prepare the data again into another folder"
            )
    if meta.vocab_size > vocab_size:
        raise UserError(
            f"got data of {meta.vocab_size:,} token ids ({meta.tokenizer}) in "
            f"{folder}, expected at most the model's "
            f"{vocab_size:,}: choose a configuration for this tokenizer, or prepare "
            "the data with another"
        )
    if expected.tokens == 0:
        return np.empty(0, dtype="<u2"), meta
    return np.memmap(path, dtype="<u2", mode="r"), meta
