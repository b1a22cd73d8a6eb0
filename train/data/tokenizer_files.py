"""Our tokenizers as the files that Hugging Face's AutoTokenizer loads, and back."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from train.data.tokenizers import BytePairs, Tokenizer
from train.errors import UserError
from train.files import write_json

END_OF_TEXT = "<|endoftext|>"


def letters() -> dict[int, str]:
    """Return GPT-2's printable stand-in for each byte (openai/gpt-2, bytes_to_unicode):
    itself where it can be seen, else the next letter from 256.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {b: chr(b) for b in seen} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the merge list behind ranks: tiktoken keeps what was merged, not of which
    two.

    The pair that made a token is what its bytes come to by the merges before it.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            at = min(range(len(joined)), key=joined.__getitem__)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def vocabulary(coder: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a tokenizer's pieces and merges in GPT-2's letters; bytes merge none."""
    letter = letters()

    def spell(piece: bytes) -> str:
        return "".join(letter[byte] for byte in piece)

    bytes_only = {bytes([b]): b for b in letter}
    ranks = coder.ranks if isinstance(coder, BytePairs) else bytes_only
    pieces = {spell(piece): rank for piece, rank in ranks.items()}
    merges = [(spell(a), spell(b)) for a, b in merges_of(ranks)]
    return pieces | {END_OF_TEXT: coder.end_of_text}, merges


def save(coder: Tokenizer, folder: Path, block_size: int) -> None:
    """Write tokenizer.json, tokenizer_config.json, vocab.json and merges.txt.

    The ids are ours, save that the text "<|endoftext|>" becomes the token of that name.
    """
    from tokenizers import ByteLevelBPETokenizer

    pieces, merges = vocabulary(coder)
    made = ByteLevelBPETokenizer(pieces, merges)
    made.add_special_tokens([END_OF_TEXT])
    made.save(str(folder / "tokenizer.json"))
    made.save_model(str(folder))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": block_size,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    }
    write_json(folder / "tokenizer_config.json", config)


class FromFolder:
    """The tokenizer.json of a Hugging Face folder."""

    name = "tokenizer.json"

    def __init__(self, folder: Path) -> None:
        import tokenizers

        path = self._path = folder / self.name
        if not path.exists():
            raise UserError(
                f"got no {path}, expected the folder's tokenizer: export it again "
                "without --no-tokenizer, or copy the file there"
            )
        try:
            self._coder = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing else
            raise UserError(
                f"got a {path} that does not read ({error}), expected a tokenizer: "
                "export or download the folder again"
            ) from error
        # A text is encoded as it is, not to a length that a file names.
        self._coder.no_padding()
        self._coder.no_truncation()
        self.vocab_size = self._coder.get_vocab_size()
        self.end_of_text = self._coder.token_to_id(END_OF_TEXT)

    def encode(self, text: str) -> list[int]:
        try:
            return self._coder.encode(text, add_special_tokens=False).ids
        except Exception as error:
            raise UserError(
                f"got a text that {self._path} cannot encode ({error}), expected other "
                "text: change it"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        return self._coder.decode([i for i in ids if i < self.vocab_size])
