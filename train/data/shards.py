"""A stream of documents tokenised into shards; cut off at any moment, it goes on."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from train.data.encoding import encoded
from train.data.hub import Corpus, Place
from train.data.token_files import Count, Split, write_shard
from train.data.tokenizers import Tokenizer
from train.files import LEDGER, read_json, write_json


@dataclass
class Ledger:
    """What is done: all that a later process needs to go on.

    revision: of the data set that is read. shards: what those written hold. position,
    skip: where the next shard begins, as a position of the corpus and tokens after it.
    documents: read before that position; all of them once ``complete``.
    """

    revision: str | None = None
    shards: list[Split] = field(default_factory=list)
    position: dict[str, Any] | None = None
    skip: Count = 0
    documents: Count = 0
    complete: bool = False

    def num_tokens(self) -> int:
        """Return how many are written."""
        return sum(shard.tokens for shard in self.shards)

    def save(self, work: Path) -> None:
        """Replace the ledger in ``work``."""
        write_json(work / LEDGER, asdict(self))

    @classmethod
    def load(cls, work: Path) -> Self | None:
        """Return the ledger in ``work``; None where nothing was begun."""
        path = work / LEDGER
        if not path.exists():
            return None
        return read_json(path, cls, f"what was written there: delete {work}")


def tokenise(
    place: Place,
    mark_first: bool,
    shard_tokens: int,
    work: Path,
    path_of: Callable[[int], Path],
    coder: Tokenizer,
    processes: int,
) -> Ledger:
    """Write all documents' tokens, cut into shards of equal size but the last.

    A shard is on the disk before the ledger names it; one that it does not name is
    written again, equal. So the files do not depend on where a run was cut off, nor on
    the number of processes.

    With ``mark_first`` a document's end-of-text token stands before it. The ledger lies
    in ``work``; ``path_of`` names the file of a shard by its number.
    """
    ledger = Ledger.load(work)
    if ledger is not None and ledger.complete:
        return ledger
    revision = place.commit(ledger.revision if ledger else place.revision)
    ledger = ledger or Ledger(revision)
    corpus = Corpus(place, revision)
    found = corpus.batches(ledger.position)
    batches = (((position, len(texts)), texts) for position, texts in found)
    ids = encoded(batches, coder.name, mark_first=mark_first, processes=processes)
    byte_lengths = coder.byte_lengths()
    bar = tqdm(
        desc="tokenize", total=place.num_documents, initial=ledger.documents,
        unit="document", unit_scale=True, disable=None,
    )  # fmt: skip
    before, began = ledger.num_tokens(), time.perf_counter()
    with closing(bar):

        def commit(tokens: np.ndarray) -> None:
            path = path_of(len(ledger.shards))
            ledger.shards.append(write_shard(path, tokens, byte_lengths))
            ledger.save(work)
            count, seconds = ledger.num_tokens(), time.perf_counter() - began
            line = f"{count:,} tokens, {(count - before) / seconds:,.0f} tokens/s"
            bar.set_postfix_str(line)
            if bar.disable:  # a line per shard in a log
                print(f"{ledger.documents:,} documents, {line}", flush=True)

        _cut(ids, ledger, shard_tokens, commit, bar.update)
    ledger.save(work)
    return ledger


Batch = tuple[dict | None, int]  # position, documents in it


def _cut(
    batches: Iterator[tuple[Batch, np.ndarray]],
    ledger: Ledger,
    shard_tokens: int,
    commit: Callable[[np.ndarray], None],
    tell: Callable[[int], object],
) -> None:
    """Commit the tokens of all batches in shards, the ledger saying where the next one
    begins; ``tell`` is told how many documents are read.
    """
    buffer, filled, skip = np.empty(shard_tokens, np.uint16), 0, ledger.skip
    read = ledger.documents
    for (position, documents), ids in batches:
        at = min(skip, len(ids))
        skip -= at
        while at < len(ids):
            count = min(len(ids) - at, shard_tokens - filled)
            buffer[filled : filled + count] = ids[at : at + count]
            filled, at = filled + count, at + count
            if filled == shard_tokens:
                ledger.position, ledger.skip, ledger.documents = position, at, read
                commit(buffer)
                filled = 0
        read += documents
        tell(documents)
    ledger.documents, ledger.complete = read, True
    if filled:
        commit(buffer[:filled])
