"""OpenWebText as nanoGPT prepares it, FineWeb-Edu as llm.c does, byte for byte."""

import hashlib
import math
from pathlib import Path

import numpy as np
from tqdm import tqdm

from train.data import source
from train.data.hub import Place
from train.data.shards import Ledger, tokenise
from train.data.source import DATASET, SHARD_TOKENS, SUBSET, Source
from train.data.token_files import Split, Stream, open_shard, read_content
from train.data.tokenizers import GPT2, Tokenizer
from train.data.tokens import SPLITS, Meta
from train.errors import UserError
from train.files import MADE, sync

OPENWEBTEXT = "Skylion007/openwebtext"
# the hub's own conversion of it to parquet: the data set itself is a script, which
# datasets 4 does not run
REVISION = "refs/convert/parquet"
# nanoGPT, data/openwebtext/prepare.py
VAL_FRACTION, SEED = 0.0005, 2357
NUM_DOCUMENTS, NUM_TOKENS = 8_013_769, {"train": 9_035_582_198, "val": 4_434_897}
PER_SHARD = 10**8  # tokens, as llm.c and modded-nanogpt
SLAB = 1 << 16  # documents that are put in order at a time, about 150 MB

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
# about how many documents, for the progress bar; the authors train on the second
SUBSETS = {"sample-10BT": 9_700_000, "sample-100BT": 97_000_000}


def _meta(request: dict, ledger: Ledger, coder: Tokenizer, **splits: Split) -> Meta:
    done = {"revision": ledger.revision, "documents": ledger.documents}
    return Meta(coder.name, coder.vocab_size, request | done, **splits)


class FineWebEdu(Source):
    """End of text before each document, shards of 100 million tokens, the first held
    out (llm.c, dev/data/fineweb.py); named as the MARS authors' scripts look for them.

    ``dataset`` is None for the hub's, or another one's name, or a folder.
    """

    name = "fineweb-edu"
    tokenizer = "gpt2"
    summary = (
        "shards with a header (2 GB per 1B tokens), of the hub's "
        f"{' or '.join(SUBSETS)} (default {list(SUBSETS)[-1]})"
    )
    options = (DATASET, SUBSET, SHARD_TOKENS)

    def __init__(
        self,
        dataset: str | None = None,
        subset: str | None = None,
        shard_tokens: int = PER_SHARD,
    ) -> None:
        if dataset is None:
            dataset, subset = FINEWEB_EDU, subset or list(SUBSETS)[-1]
        known = SUBSETS.get(subset) if dataset == FINEWEB_EDU else None
        place = Place(dataset, subset, num_documents=known)
        self._place, self._shard_tokens = place, shard_tokens
        own = {"source": self.name, "shard_tokens": shard_tokens}
        self.request = self.plan = own | place.identity()

    def make(self, work: Path, coder: Tokenizer, processes: int) -> Meta:
        """Write the shards; return what they hold."""

        def path_of(number: int) -> Path:
            split = "train" if number else "val"
            return work / MADE / f"fineweb_{split}_{number:06d}.bin"

        each = dict(mark_first=True, shard_tokens=self._shard_tokens)
        ledger = tokenise(self._place, work, path_of, coder, processes, **each)
        if len(ledger.shards) < 2:
            raise UserError(
                f"got {ledger.num_tokens:,} tokens, expected more than one shard of "
                f"{self._shard_tokens:,}: the first is held out; delete {work}, and "
                "give a smaller --shard-tokens"
            )
        shards = {path_of(i).name: shard for i, shard in enumerate(ledger.shards)}
        first = next(iter(shards))
        splits = {"val": _joined({first: shards.pop(first)}), "train": _joined(shards)}
        return _meta(self.request, ledger, coder, **splits)


def _joined(shards: dict[str, Split]) -> Split:
    """Return shards as one split, its checksum that of their list by sha256sum."""
    checksums = {name: shard.sha256 for name, shard in shards.items()}
    listing = "".join(f"{digest}  {name}\n" for name, digest in checksums.items())
    text_bytes = [shard.text_bytes for shard in shards.values()]
    return Split(
        sum(shard.tokens for shard in shards.values()),
        None if None in text_bytes else sum(text_bytes),
        hashlib.sha256(listing.encode()).hexdigest(),
        checksums,
    )


class OpenWebText(Source):
    """nanoGPT's files: end of text after each document, its split, its order.

    The order is a permutation of all documents, so all are tokenised first, into a
    stream of shards in the order in which they come, and then put in order: 18 GB twice
    on the disk, until the second is complete.

    ``dataset`` is None for the hub's, or another one's name, or a folder.
    """

    name = "openwebtext"
    tokenizer = "gpt2"
    summary = "nanoGPT's files (needs 36 GB of disk, 18 stay)"
    options = (source.VAL_FRACTION, DATASET, SUBSET, SHARD_TOKENS)

    def __init__(
        self,
        dataset: str | None = None,
        subset: str | None = None,
        val_fraction: float = VAL_FRACTION,
        shard_tokens: int = PER_SHARD,
    ) -> None:
        self._published, self._val_fraction = dataset is None, val_fraction
        if dataset is None:
            place = Place(OPENWEBTEXT, subset, REVISION, NUM_DOCUMENTS)
        else:
            place = Place(dataset, subset)
        self._place, self._shard_tokens = place, shard_tokens
        own = {"source": self.name, "val_fraction": val_fraction, "seed": SEED}
        self.request = own | place.identity()
        self.plan = {**self.request, "shard_tokens": shard_tokens}

    def make(self, work: Path, coder: Tokenizer, processes: int) -> Meta:
        """Write train.bin and val.bin; return what they hold."""
        folder = work / "stream"
        folder.mkdir(exist_ok=True)

        def path_of(number: int) -> Path:
            return folder / f"{number:06d}.bin"

        each = dict(mark_first=False, shard_tokens=self._shard_tokens)
        ledger = tokenise(self._place, work, path_of, coder, processes, **each)
        stream = Stream([open_shard(path) for path in sorted(folder.glob("*.bin"))])
        ends = document_ends(stream, coder.end_of_text)
        if len(ends) != ledger.documents:
            raise UserError(
                f"got {len(ends)} documents in {folder}, expected the "
                f"{ledger.documents} of its ledger: delete {work} to begin again"
            )
        splits = {}
        for split, order in split_order(len(ends), self._val_fraction).items():
            path = work / MADE / f"{split}.bin"
            gather(stream, ends, order, path)
            splits[split] = read_content(path, coder.byte_lengths())
        meta = _meta(self.request, ledger, coder, **splits)
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


def split_order(num_documents: int, val_fraction: float) -> dict[str, np.ndarray]:
    """Return {split: numbers of its documents in the order of its file}, int64.

    That of datasets' ``train_test_split(test_size=val_fraction, seed=2357,
    shuffle=True)``: one permutation of all documents, held-out ones first. nanoGPT
    writes the training file in that order, too.
    """
    num_val = math.ceil(val_fraction * num_documents)
    if num_val >= num_documents:
        raise UserError(
            f"got {num_documents} documents and --val-fraction {val_fraction}, which "
            f"holds out {num_val}, expected some to train on: give more, hold out less"
        )
    order = np.random.default_rng(SEED).permutation(num_documents)
    return {"train": order[num_val:], "val": order[:num_val]}


def document_ends(stream: Stream, end_of_text: int) -> np.ndarray:
    """Return where each document ends, (num_documents,) int64."""
    ends, before = [np.empty(0, np.int64)], 0
    for part in stream.parts:
        ends.append(np.flatnonzero(part == end_of_text) + before + 1)
        before += len(part)
    return np.concatenate(ends)


def gather(stream: Stream, ends: np.ndarray, order: np.ndarray, path: Path) -> None:
    """Write the documents of ``stream`` in another order, as a raw file.

    A file that was cut off is continued from its last whole slab. ``ends`` come from
    ``document_ends``; ``order`` are numbers of documents, (num,) int64.
    """
    starts = np.concatenate([[0], ends[:-1]])
    lengths = (ends - starts)[order]
    slabs = [slice(at, at + SLAB) for at in range(0, len(order), SLAB)]
    after = np.cumsum([0, *(int(lengths[slab].sum()) for slab in slabs)]) * 2
    with path.open("ab") as file:
        done = int(np.searchsorted(after, file.tell(), side="right")) - 1
        file.truncate(int(after[done]))
        file.seek(0, 2)
        what, rest = f"write {path.name}", slabs[done:]
        for slab in tqdm(rest, what, len(slabs), initial=done, disable=None):
            file.write(_slab(stream, starts[order[slab]], lengths[slab]))
            sync(file)


def _slab(stream: Stream, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return documents one behind the other, read in the stream's order: faster."""
    places = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), dtype="<u2")
    for i in np.argsort(starts):
        start, length, place = int(starts[i]), int(lengths[i]), int(places[i])
        out[place : place + length] = stream[start : start + length]
    return out
