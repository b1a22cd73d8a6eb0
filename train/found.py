"""Token files without a meta.json: nanoGPT's train.bin and val.bin, and shards with a
header as llm.c and modded-nanogpt make and publish them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from train.errors import UserError
from train.meta import SPLITS, Meta, Split
from train.token_files import Stream, open_raw, open_shard
from train.tokenizers import GPT2

SAMPLED = "sampled:"  # what the checksum of found files begins with
NUM_SAMPLES, SAMPLE_TOKENS = 256, 4096


def describe_found(folder: Path) -> Meta | None:
    """What a folder of somebody else's GPT-2 tokens holds; None where it has none.

    The checksum by which a run recognises its data is that of the number of tokens and
    of 256 evenly spaced samples of 8 KiB: the whole of 18 GB or more would take minutes
    at every start, and a checksum cached beside the data would need a writable folder
    and could be stale. It tells data sets, tokenizers and versions apart, not a flipped
    bit.

    Raises:
        UserError: a split is missing, a damaged file, ids that are not GPT-2's.
    """
    files = {split: _files(folder, split) for split in SPLITS}
    if not any(files.values()):
        return None
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
    splits = {split: _describe(folder, split, files[split]) for split in SPLITS}
    return Meta(GPT2.name, GPT2.vocab_size, {"source": "found"}, **splits)


def _files(folder: Path, split: str) -> list[Path]:
    """nanoGPT's file, or the shards in the order of their names."""
    raw, shards = folder / f"{split}.bin", sorted(folder.glob(f"*_{split}*.bin"))
    if not raw.exists():
        return shards
    if shards:
        raise UserError(
            f"got both {raw} and {len(shards)} shards beside it, such as "
            f"{shards[0].name}, expected one of them: move the other to another folder"
        )
    return [raw]


def _describe(folder: Path, split: str, files: list[Path]) -> Split:
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
