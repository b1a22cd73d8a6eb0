"""A stream of documents tokenised into shards; cut off at any moment, it goes on."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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

    revision: str | None
    shards: list[Split]
    position: dict[str, Any] | None
    skip: Count
    documents: Count
    complete: bool

    @property
    def num_tokens(self) -> int:
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


class Meter(tqdm):
    """A bar on a terminal, a line per shard in a log."""

    def __init__(self, num_documents: int | None, ledger: Ledger) -> None:
        super().__init__(
            desc="tokenize", total=num_documents, initial=ledger.documents,
            unit="document", unit_scale=True, disable=None,
        )  # fmt: skip
        self._began, self._before = time.perf_counter(), ledger.num_tokens

    def shard(self, ledger: Ledger) -> None:
        """Show that one more is written."""
        seconds = time.perf_counter() - self._began
        speed = (ledger.num_tokens - self._before) / seconds
        line = f"{ledger.num_tokens:,} tokens, {speed:,.0f} tokens/s"
        if self.disable:
            print(f"{ledger.documents:,} documents, {line}", flush=True)
        self.set_postfix_str(line)


def tokenise(
    place: Place,
    work: Path,
    path_of: Callable[[int], Path],
    coder: Tokenizer,
    processes: int,
    *,
    mark_first: bool,
    shard_tokens: int,
) -> Ledger:
    """Write all documents' tokens, cut into shards of equal size but the last;
    ``mark_first``: the end-of-text token stands before each document, not after it.

    A shard is on the disk before the ledger names it; one that it does not name is
    written again, equal. So the files do not depend on where a run was cut off, nor on
    the number of processes.

    The ledger lies in ``work``; ``path_of`` names the file of a shard by its number.
    """
    ledger = Ledger.load(work) or Ledger(place.revision, [], None, 0, 0, False)
    if ledger.complete:
        return ledger
    ledger.revision = place.commit(ledger.revision)
    found = Corpus(place, ledger.revision).batches(ledger.position)
    batches = (((position, len(texts)), texts) for position, texts in found)
    ids = encoded(batches, coder.name, mark_first=mark_first, processes=processes)
    byte_lengths = coder.byte_lengths()
    with Meter(place.num_documents, ledger) as meter:
        for tokens in _cut(ids, ledger, shard_tokens, meter):
            path = path_of(len(ledger.shards))
            ledger.shards.append(write_shard(path, tokens, byte_lengths))
            ledger.save(work)
            meter.shard(ledger)
    ledger.save(work)
    return ledger


Batch = tuple[dict | None, int]  # position, number of documents


def _cut(
    batches: Iterator[tuple[Batch, np.ndarray]],
    ledger: Ledger,
    shard_tokens: int,
    meter: Meter,
) -> Iterator[np.ndarray]:
    """Yield each shard's tokens, the ledger saying where the next one begins."""
    buffer, filled, skip = np.empty(shard_tokens, np.uint16), 0, ledger.skip
    done = ledger.documents
    for (position, documents), ids in batches:
        at = min(skip, len(ids))
        skip -= at
        while at < len(ids):
            count = min(len(ids) - at, shard_tokens - filled)
            buffer[filled : filled + count] = ids[at : at + count]
            filled, at = filled + count, at + count
            if filled == shard_tokens:
                ledger.position, ledger.skip, ledger.documents = position, at, done
                yield buffer
                filled = 0
        done += documents
        meter.update(documents)
    ledger.documents, ledger.complete = done, True
    if filled:
        yield buffer[:filled]
