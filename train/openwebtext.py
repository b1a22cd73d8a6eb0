"""OpenWebText as nanoGPT prepares it: the same train.bin and val.bin, byte for byte."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from tqdm import tqdm

from train.errors import UserError
from train.hub import Place
from train.meta import SPLITS, Meta, Split
from train.shards import tokenise
from train.token_files import Stream, open_shard, read_content, sync
from train.tokenizers import GPT2, Tokenizer

DATASET = "Skylion007/openwebtext"
# the hub's own conversion of the whole to parquet: the data set itself is a script,
# which datasets 4 does not run
REVISION = "refs/convert/parquet"
# nanoGPT, data/openwebtext/prepare.py
VAL_FRACTION, SEED = 0.0005, 2357
NUM_DOCUMENTS, NUM_TOKENS = 8_013_769, {"train": 9_035_582_198, "val": 4_434_897}
SLAB = 1 << 16  # documents that are put in order at a time, about 150 MB


def split_order(num_documents: int, val_fraction: float) -> dict[str, np.ndarray]:
    """{split: numbers of its documents in the order of its file}, int64.

    That of datasets' ``train_test_split(test_size=val_fraction, seed=2357,
    shuffle=True)``: one permutation of all documents, held-out ones first. nanoGPT
    writes the training file in that order, too.

    Raises:
        UserError: no document is left to train on.
    """
    num_val = math.ceil(val_fraction * num_documents)
    if num_val >= num_documents:
        raise UserError(
            f"got {num_documents} documents and --val-fraction {val_fraction}, which "
            f"holds out {num_val}, expected some to train on: give more documents, or "
            "a smaller fraction"
        )
    order = np.random.default_rng(SEED).permutation(num_documents)
    return {"train": order[num_val:], "val": order[:num_val]}


def document_ends(stream: Stream, end_of_text: int) -> np.ndarray:
    """(num_documents,) int64: the place after each document's end-of-text token."""
    ends, before = [np.empty(0, np.int64)], 0
    for part in stream.parts:
        ends.append(np.flatnonzero(part == end_of_text) + before + 1)
        before += len(part)
    return np.concatenate(ends)


def gather(
    stream: Stream, ends: np.ndarray, order: np.ndarray, path: Path, name: str
) -> None:
    """Write the documents of ``stream`` in another order, as a raw file.

    A file that was cut off is continued from its last whole slab.

    Args:
        stream: tokens of all documents.
        ends: from ``document_ends``.
        order: (num,) int64, numbers of documents.
        path: of the raw file.
        name: on the progress bar.
    """
    starts = np.concatenate([[0], ends[:-1]])
    lengths = (ends - starts)[order]
    slabs = [slice(at, at + SLAB) for at in range(0, len(order), SLAB)]
    after = np.cumsum([0, *(int(lengths[slab].sum()) for slab in slabs)]) * 2
    with path.open("ab") as file:
        done = int(np.searchsorted(after, file.tell(), side="right")) - 1
        file.truncate(int(after[done]))
        file.seek(0, 2)
        for slab in tqdm(
            slabs[done:], initial=done, total=len(slabs), desc=name, disable=None
        ):
            file.write(_slab(stream, starts[order[slab]], lengths[slab]))
            sync(file)


def _slab(stream: Stream, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(num_tokens,) uint16: documents one behind the other, read in the stream's order,
    which a disk serves faster.
    """
    places = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), dtype="<u2")
    for i in np.argsort(starts):
        start, length, place = int(starts[i]), int(lengths[i]), int(places[i])
        out[place : place + length] = stream[start : start + length]
    return out


class OpenWebText:
    """nanoGPT's files: end of text after each document, its split, its order.

    The order is a permutation of all documents, so all are tokenised first, into a
    stream of shards in the order in which they come, and then put in order: 18 GB twice
    on the disk, until the second is complete.

    Args:
        dataset: None for the hub's, or another one's name, or a folder.
        subset: of another one; None for the whole.
        val_fraction: share of the documents held out.
        shard_tokens: after so many tokens, work is saved.

    Raises:
        UserError: no such folder.
    """

    def __init__(
        self,
        dataset: str | None,
        subset: str | None,
        val_fraction: float,
        shard_tokens: int,
    ) -> None:
        self._published = dataset is None
        if dataset is None:
            self._place = Place(DATASET, subset, REVISION, NUM_DOCUMENTS)
        else:
            self._place = Place(dataset, subset)
        self._val_fraction, self._shard_tokens = val_fraction, shard_tokens
        self.request = {
            "source": "openwebtext",
            **self._place.identity(),
            "val_fraction": val_fraction,
            "seed": SEED,
        }
        self.plan = {**self.request, "shard_tokens": shard_tokens}

    def make(self, work: Path, made: Path, coder: Tokenizer, processes: int) -> Meta:
        """train.bin and val.bin in ``made``; what they hold.

        Raises:
            UserError: the data set cannot be had or read.
        """
        folder = work / "stream"
        folder.mkdir(exist_ok=True)
        ledger = tokenise(
            self._place,
            work,
            lambda number: folder / f"{number:06d}.bin",
            coder=coder,
            mark_first=False,
            processes=processes,
            shard_tokens=self._shard_tokens,
        )
        stream = Stream([open_shard(path) for path in sorted(folder.glob("*.bin"))])
        ends = document_ends(stream, coder.end_of_text)
        assert len(ends) == ledger.documents, "one end of text for each document"
        splits = {}
        for split, order in split_order(len(ends), self._val_fraction).items():
            path = made / f"{split}.bin"
            gather(stream, ends, order, path, f"write {path.name}")
            content = read_content(path, coder.byte_lengths())
            splits[split] = Split(content.tokens, content.text_bytes, content.sha256)
        source = {
            **self.request,
            "revision": ledger.revision,
            "documents": ledger.documents,
        }
        meta = Meta(coder.name, coder.vocab_size, source, **splits)
        if self._published and coder.name == GPT2.name:
            self._compare(meta)
        return meta

    def _compare(self, meta: Meta) -> None:
        """Say where the files are not nanoGPT's."""
        wanted = {"documents": NUM_DOCUMENTS, **NUM_TOKENS}
        found = {"documents": meta.source["documents"]}
        found |= {split: getattr(meta, split).tokens for split in SPLITS}
        if found != wanted and self._val_fraction == VAL_FRACTION:
            print(
                f"note: got {found}, where nanoGPT's OpenWebText has {wanted}: the "
                "data set on the hub has changed, these are not its files"
            )
