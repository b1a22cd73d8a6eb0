"""Folders of token files as training reads them: meta.json, or somebody else's files
that need none; checked, memory-mapped, several shards as one.
"""

import hashlib
from dataclasses import asdict, dataclass
from os.path import lexists
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np

from train.data.token_files import Split, Stream, open_raw, open_shard
from train.data.tokenizers import GPT2
from train.errors import UserError
from train.files import Limits, read_json, sha256, write_json

SPLITS = ("train", "val")
VERIFY_LIMIT = 1 << 30  # bytes; of larger files only sizes and every batch's ids count
SAMPLED = "sampled:"  # what the checksum of found files begins with
NUM_SAMPLES, SAMPLE_TOKENS = 256, 4096
# sources of train.prepare whose folder the recipes name after them
NAMED = ("openwebtext", "fineweb-edu", "python")


@dataclass(frozen=True)
class Meta:
    """What meta.json says; by ``source``, what they are made of, files are known."""

    tokenizer: str
    vocab_size: Annotated[int, Limits(ge=1, le=2**16)]  # of uint16
    source: dict[str, Any]
    train: Split
    val: Split

    def save(self, folder: Path) -> None:
        """Write meta.json."""
        write_json(folder / "meta.json", asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read meta.json, or say how to make one."""
        source = folder.name if folder.name in NAMED else "text FILES"
        again = (
            "token files: train.prepare's, with its meta.json (python -m train.prepare "
            f"--source {source} --out {'NEW' if lexists(folder) else folder} makes "
            "them), nanoGPT's train.bin and val.bin, or llm.c's *_train_*.bin and "
            "*_val_*.bin"
        )
        return read_json(folder / "meta.json", cls, again)

    def nats_per_byte(self, split: str) -> float | None:
        """Return what a loss in nats per token is multiplied with to give nats per byte
        of text; None where the bytes are not known.
        """
        part = getattr(self, split)
        return part.tokens / part.text_bytes if part.text_bytes else None


def read_meta(folder: Path) -> Meta:
    """Return what is known of the token files in ``folder``: its meta.json; without
    one, what nanoGPT's files or header shards tell themselves.
    """
    if not lexists(folder / "meta.json"):
        files = {split: _find(folder, split) for split in SPLITS}
        if any(files.values()):
            return _describe(folder, files)
    return Meta.load(folder)


def open_tokens(
    folder: Path, split: str, *, vocab_size: int, verify: bool = True
) -> tuple[np.ndarray | Stream, Meta]:
    """Return the tokens of one split, read-only uint16 memory maps, checked.

    Args:
        folder: holds the output of train.prepare, or somebody else's GPT-2 tokens.
        split: "train" or "val".
        vocab_size: of the model that will read them.
        verify: compare the checksums of splits up to 1 GiB.
    """
    meta = read_meta(folder)
    expected = getattr(meta, split)
    if expected.shards:
        tokens = Stream([open_shard(folder / name) for name in expected.shards])
    else:
        tokens = open_raw(folder / f"{split}.bin")
    if len(tokens) != expected.tokens:
        raise UserError(
            f"got {2 * len(tokens):,} bytes in the {split} files of {folder}, expected "
            f"{2 * expected.tokens:,} (two a token): a file is truncated or not the "
            "one that meta.json describes; prepare the data again into another folder"
        )
    if verify and 2 * len(tokens) <= VERIFY_LIMIT:
        _verify(folder, split, expected)
        if len(tokens) and (largest := tokens[:].max()) >= meta.vocab_size:
            raise UserError(
                f"got token id {largest} in the {split} files of {folder}, expected "
                f"ids below {meta.vocab_size} ({meta.tokenizer}): these files hold "
                "something else; prepare the data again into another folder"
            )
    if meta.vocab_size > vocab_size:
        raise UserError(
            f"got data of {meta.vocab_size:,} token ids ({meta.tokenizer}) in {folder},"
            f" expected at most the model's {vocab_size:,}: choose a configuration for "
            "this tokenizer, or prepare the data with another"
        )
    return tokens, meta


def _verify(folder: Path, split: str, expected: Split) -> None:
    """Compare checksums; those of found files are of samples just read."""
    if expected.sha256.startswith(SAMPLED):
        return
    files = expected.shards or {f"{split}.bin": expected.sha256}
    for name, wanted in files.items():
        found = sha256(folder / name)
        if found != wanted:
            raise UserError(
                f"got checksum {found[:12]}... of {folder / name}, expected "
                f"{wanted[:12]}... from meta.json: the file was altered; prepare the "
                "data again into another folder"
            )


def _find(folder: Path, split: str) -> list[Path]:
    """Return nanoGPT's file, or the shards of llm.c in the order of their names."""
    raw, shards = folder / f"{split}.bin", sorted(folder.glob(f"*_{split}*.bin"))
    if raw.exists() and shards:
        raise UserError(
            f"got both {raw} and {len(shards)} shards beside it, such as "
            f"{shards[0].name}, expected one of them: move the other to another folder"
        )
    return [raw] if raw.exists() else shards


def _describe(folder: Path, files: dict[str, list[Path]]) -> Meta:
    """Return what a folder of somebody else's GPT-2 tokens holds.

    The checksum by which a run recognises its data is that of the number of tokens and
    of 256 evenly spaced samples of 8 KiB: the whole of 18 GB or more would take minutes
    at every start, and a checksum cached beside the data would need a writable folder
    and could be stale. It tells data sets, tokenizers and versions apart, not a flipped
    bit.
    """
    for split in SPLITS:
        if not files[split]:
            raise UserError(
                f"got no token file of the {split} split in {folder}, expected "
                f"{split}.bin or *_{split}_*.bin beside the other's: copy it there"
            )
    if (folder / "meta.pkl").exists():
        raise UserError(
            f"got {folder / 'meta.pkl'}, a vocabulary of characters, expected GPT-2 "
            "tokens: prepare that text with python -m train.prepare --source text"
        )
    splits = {split: _sample(folder, split, files[split]) for split in SPLITS}
    return Meta(GPT2.name, GPT2.vocab_size, {"source": "found"}, **splits)


def _sample(folder: Path, split: str, files: list[Path]) -> Split:
    raw = files == [folder / f"{split}.bin"]
    tokens = Stream([open_raw(f) if raw else open_shard(f) for f in files])
    digest = hashlib.sha256(str(len(tokens)).encode())
    spread = np.linspace(0, max(len(tokens) - SAMPLE_TOKENS, 0), NUM_SAMPLES)
    for at in np.unique(spread.astype(np.int64)):
        sample = tokens[int(at) : int(at) + SAMPLE_TOKENS]
        if len(sample) and sample.max() >= GPT2.vocab_size:
            raise UserError(
                f"got token id {sample.max()} in the {split} files of {folder}, "
                f"expected GPT-2's ids below {GPT2.vocab_size}: these files hold "
                "something else; choose another folder"
            )
        digest.update(np.ascontiguousarray(sample))
    shards = {} if raw else dict.fromkeys((f.name for f in files), "")
    return Split(len(tokens), None, SAMPLED + digest.hexdigest(), shards)
