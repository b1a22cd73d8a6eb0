"""Small data sets in the formats of the Hugging Face hub, and what nanoGPT and llm.c
make of them, written again by the letter.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MARK = 256  # end of text of the bytes tokenizer


def documents(num: int, seed: int = 0) -> list[str]:
    """Texts of 0 to 400 bytes."""
    draw = random.Random(seed)
    words = ["wer", "im", "Wohlstand", "lebt", "€", "\n", "ä", "<|endoftext|>"]
    return [" ".join(draw.choices(words, k=draw.randrange(60))) for _ in range(num)]


def write_corpus(folder: Path, texts: list[str], form: str = "parquet") -> Path:
    """Three files with another column beside the text."""
    folder.mkdir()
    for i, part in enumerate(np.array_split(np.arange(len(texts)), 3)):
        rows = [{"id": str(k), "text": texts[k]} for k in part]
        path = folder / f"train-{i:05d}-of-00003.{form}"
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=17)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tokens_of(text: str) -> list[int]:
    """The bytes tokenizer."""
    return list(text.encode())


def nanogpt_files(texts: list[str], val_fraction: float) -> dict[str, bytes]:
    """data/openwebtext/prepare.py: train_test_split, encode, append the mark,
    concatenate.
    """
    whole = datasets.Dataset.from_dict({"text": texts})
    split = whole.train_test_split(test_size=val_fraction, seed=2357, shuffle=True)
    split["val"] = split.pop("test")
    return {
        name: np.concatenate(
            [np.array([*tokens_of(t), MARK], dtype=np.uint16) for t in part["text"]]
        ).tobytes()
        for name, part in split.items()
    }


def llmc_files(texts: list[str], shard_size: int) -> dict[str, bytes]:
    """dev/data/fineweb.py and data_common.py: prepend the mark, cut into shards, a
    header of 256 int32, the first for validation.
    """
    stream = np.array([i for t in texts for i in (MARK, *tokens_of(t))], np.uint16)
    files = {}
    for index, at in enumerate(range(0, len(stream), shard_size)):
        part = stream[at : at + shard_size]
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, len(part)
        split = "val" if index == 0 else "train"
        name = f"fineweb_{split}_{index:06d}.bin"
        files[name] = header.tobytes() + part.tobytes()
    return files
