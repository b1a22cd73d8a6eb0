"""Token files as training reads them: checked, memory-mapped, several shards as one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from train.errors import UserError
from train.found import SAMPLED, describe_found
from train.meta import SPLITS, Meta, Split
from train.token_files import Stream, open_raw, open_shard

__all__ = ["SPLITS", "Meta", "Split", "open_tokens", "read_meta"]

VERIFY_LIMIT = (
    1 << 30
)  # bytes; larger files are checked for their size, and every batch for its ids


def read_meta(folder: Path) -> Meta:
    """What is known of the token files in ``folder``: its meta.json; without one, what
    nanoGPT's files or header shards tell themselves.

    Raises:
        UserError: none of these there, or damaged.
    """
    if not (folder / "meta.json").exists():
        found = describe_found(folder)
        if found is not None:
            return found
    return Meta.load(folder)


def open_tokens(
    folder: Path, split: str, *, vocab_size: int, verify: bool = True
) -> tuple[np.ndarray | Stream, Meta]:
    """The tokens of one split, read-only uint16 memory maps, checked.

    Args:
        folder: holds the output of train.prepare, or somebody else's GPT-2 tokens.
        split: "train" or "val".
        vocab_size: of the model that will read them.
        verify: compare the checksums of splits up to 1 GiB.

    Raises:
        UserError: missing, truncated or altered file; a vocabulary larger than the
            model's.
    """
    meta = read_meta(folder)
    expected = getattr(meta, split)
    tokens = _open(folder, split, expected)
    if len(tokens) != expected.tokens:
        raise UserError(
            f"got {2 * len(tokens):,} bytes in the {split} files of {folder}, expected "
            f"{2 * expected.tokens:,} (two a token): a file is truncated or not the "
            "one that meta.json describes; prepare the data again into another folder"
        )
    if verify and 2 * len(tokens) <= VERIFY_LIMIT:
        _verify(folder, split, expected)
    if meta.vocab_size > vocab_size:
        raise UserError(
            f"got data of {meta.vocab_size:,} token ids ({meta.tokenizer}) in "
            f"{folder}, expected at most the model's "
            f"{vocab_size:,}: choose a configuration for this tokenizer, or prepare "
            "the data with another"
        )
    return tokens, meta


def _open(folder: Path, split: str, expected: Split) -> np.ndarray | Stream:
    if expected.shards:
        return Stream([open_shard(folder / name) for name in expected.shards])
    return open_raw(folder / f"{split}.bin")


def _verify(folder: Path, split: str, expected: Split) -> None:
    """Compare checksums; those of found files are of samples just read."""
    if expected.sha256.startswith(SAMPLED):
        return
    files = expected.shards or {f"{split}.bin": expected.sha256}
    for name, wanted in files.items():
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wanted:
            raise UserError(
                f"got checksum {found[:12]}... of {folder / name}, expected "
                f"{wanted[:12]}... from meta.json: the file was "
                "altered; prepare the data again into another folder"
            )
