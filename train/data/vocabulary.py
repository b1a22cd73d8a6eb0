"""python -m train.data.vocabulary: learn the small tokenizer's byte pairs."""

import argparse
import base64
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from train.data.tokenizer_files import letters
from train.data.tokenizers import BPE1024, BPE1024_RANKS, Bytes
from train.data.tokens import open_tokens
from train.errors import UserError, command
from train.files import write


def documents(folder: Path) -> Iterator[str]:
    """Yield the training documents of bytes that train.prepare put into ``folder``.

    Raises:
        UserError: tokens of a larger vocabulary than bytes.
    """
    tokens, _ = open_tokens(folder, "train", vocab_size=Bytes.vocab_size)
    ends = np.flatnonzero(tokens[:] == Bytes.end_of_text)
    begin = 0
    for end in ends:
        yield tokens[begin:end].astype(np.uint8).tobytes().decode()
        begin = end + 1


def learn(texts: Iterable[str], num_pieces: int) -> list[bytes]:
    """Return the 256 bytes and then what was merged of them, in the order of merging
    (Sennrich et al., arXiv 1508.07909, on bytes, within GPT-2's words).

    Raises:
        UserError: texts that have fewer pairs.
    """
    from tokenizers import ByteLevelBPETokenizer

    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(texts, vocab_size=num_pieces, show_progress=False)
    byte = {letter: bytes([b]) for b, letter in letters().items()}
    merges = json.loads(learned.to_str())["model"]["merges"]
    merged = (b"".join(byte[letter] for letter in a + b) for a, b in merges)
    pieces = list(dict.fromkeys([bytes([b]) for b in range(256)] + [*merged]))
    if len(pieces) < num_pieces:
        raise UserError(
            f"got text for {len(pieces)} pieces, expected {num_pieces}: give more of it"
        )
    return pieces


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m train.data.vocabulary",
        description=f"Learn {BPE1024.name}, of which {BPE1024_RANKS.name} is the "
        "outcome: data made with another cannot be read with it.",
    )
    add = parser.add_argument
    add("folders", type=Path, nargs="+", help="of bytes, prepared")
    add("--out", type=Path, required=True, help="a piece a line, base64")
    args = parser.parse_args()
    texts = (text for folder in args.folders for text in documents(folder))
    pieces = learn(texts, BPE1024.end_of_text)
    write(args.out, b"".join(base64.b64encode(piece) + b"\n" for piece in pieces))


if __name__ == "__main__":
    command(main)
