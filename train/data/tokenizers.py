"""Text to token ids and back: bytes, GPT-2's BPE, or a small one."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from train.errors import UserError

if TYPE_CHECKING:
    import tiktoken

BPE1024_RANKS = Path(__file__).with_name("bpe1024.tiktoken")


class Tokenizer(Protocol):
    """vocab_size counts end_of_text, the id between documents, which no text has."""

    name: str
    vocab_size: int
    end_of_text: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def byte_lengths(self) -> np.ndarray:
        """Return (vocab_size,) uint16: bytes of text of each id, 0 for end_of_text."""


class Bytes:
    """UTF-8 bytes 0..255, and 256 as end of text."""

    name, vocab_size, end_of_text = "bytes", 257, 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def byte_lengths(self) -> np.ndarray:
        return np.array([1] * 256 + [0], dtype=np.uint16)


NATS_PER_BYTE = "nats per byte"


def loss_unit(tokenizer: str) -> str:
    """Return the unit of a loss on text by the tokenizer of this name. A token of
    ``Bytes`` is a byte, but for the ends of texts.
    """
    return NATS_PER_BYTE if tokenizer == Bytes.name else "nats per token"


class BytePairs:
    """Byte pairs by tiktoken, and the last id as end of text."""

    end_of_text: int
    _encoding: "tiktoken.Encoding"

    @property
    def ranks(self) -> dict[bytes, int]:
        """Return the id of every piece but end_of_text, in the order of merging."""
        return self._encoding._mergeable_ranks  # tiktoken has no public name for it

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([i for i in ids if i < self.end_of_text])

    def byte_lengths(self) -> np.ndarray:
        token = self._encoding.decode_single_token_bytes
        lengths = [len(token(i)) for i in range(self.end_of_text)]
        return np.array([*lengths, 0], dtype=np.uint16)


class GPT2(BytePairs):
    """GPT-2's, downloaded once, or from TIKTOKEN_CACHE_DIR."""

    name, vocab_size, end_of_text = "gpt2", 50257, 50256

    def __init__(self) -> None:
        try:
            import tiktoken

            self._encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken passes on whatever its download ran into
            raise UserError(
                f"got {type(error).__name__} while loading GPT-2's vocabulary, expected"
                " tiktoken with a network or a cache: pip install tiktoken, set "
                "TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer bytes"
            ) from error


class BPE1024(BytePairs):
    """256 bytes and 767 merges, which train.data.vocabulary learned and wrote here."""

    name, vocab_size, end_of_text = "bpe1024", 1024, 1023

    def __init__(self) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str  # GPT-2's words

        pieces = BPE1024_RANKS.read_bytes().split()
        ranks = {base64.b64decode(piece): i for i, piece in enumerate(pieces)}
        self._encoding = tiktoken.Encoding(
            self.name, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
        )


TOKENIZERS: dict[str, type] = {t.name: t for t in (Bytes, GPT2, BPE1024)}


def tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called ``name``."""
    if name not in TOKENIZERS:
        raise UserError(
            f"got tokenizer {name!r}, expected one of {sorted(TOKENIZERS)}: choose one"
        )
    return TOKENIZERS[name]()
