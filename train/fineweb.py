"""FineWeb-Edu as llm.c and modded-nanogpt prepare it: shards with a header, the first
held out.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from train.errors import UserError
from train.hub import Place
from train.meta import Meta, Split
from train.shards import tokenise
from train.tokenizers import Tokenizer

DATASET = "HuggingFaceFW/fineweb-edu"
# about how many documents, for the progress bar; the authors train on the second
SUBSETS = {"sample-10BT": 9_700_000, "sample-100BT": 97_000_000}


class FineWebEdu:
    """End of text before each document, shards of 100 million tokens, the first held
    out (llm.c, dev/data/fineweb.py); named as the MARS authors' scripts look for them.

    Args:
        dataset: None for the hub's, or another one's name, or a folder.
        subset: of the hub's: "sample-100BT" or "sample-10BT".
        shard_tokens: tokens of a shard.

    Raises:
        UserError: no such folder.
    """

    def __init__(
        self, dataset: str | None, subset: str | None, shard_tokens: int
    ) -> None:
        if dataset is None:
            subset = subset or list(SUBSETS)[-1]
            self._place = Place(DATASET, subset, num_documents=SUBSETS.get(subset))
        else:
            self._place = Place(dataset, subset)
        self._shard_tokens = shard_tokens
        self.request = {
            "source": "fineweb-edu",
            **self._place.identity(),
            "shard_tokens": shard_tokens,
        }
        self.plan = self.request

    def make(self, work: Path, made: Path, coder: Tokenizer, processes: int) -> Meta:
        """Shards in ``made``; what they hold.

        Raises:
            UserError: the data set cannot be had or read, or fills no two shards.
        """

        def path_of(number: int) -> Path:
            split = "train" if number else "val"
            return made / f"fineweb_{split}_{number:06d}.bin"

        ledger = tokenise(
            self._place,
            work,
            path_of,
            coder=coder,
            mark_first=True,
            processes=processes,
            shard_tokens=self._shard_tokens,
        )
        if len(ledger.shards) < 2:
            raise UserError(
                f"got {sum(s.tokens for s in ledger.shards):,} tokens, expected more "
                f"than one shard of {self._shard_tokens:,}: the first is held out; "
                f"delete {work}, and give a smaller --shard-tokens"
            )
        checksums = {path_of(i).name: s.sha256 for i, s in enumerate(ledger.shards)}
        names = list(checksums)
        splits = {
            split: Split(
                sum(s.tokens for s in ledger.shards[part]),
                sum(s.text_bytes for s in ledger.shards[part]),
                _digest(shards := {n: checksums[n] for n in names[part]}),
                shards,
            )
            for split, part in (("train", slice(1, None)), ("val", slice(1)))
        }
        source = {
            **self.request,
            "revision": ledger.revision,
            "documents": ledger.documents,
        }
        return Meta(coder.name, coder.vocab_size, source, **splits)


def _digest(shards: dict[str, str]) -> str:
    """One checksum of the list of them, as ``sha256sum`` would print it."""
    listing = "".join(f"{digest}  {name}\n" for name, digest in shards.items())
    return hashlib.sha256(listing.encode()).hexdigest()
