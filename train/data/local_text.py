"""Text files of this machine as training and held-out tokens."""

import hashlib
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from train.data.encoding import encoded
from train.data.token_files import read_content
from train.data.tokenizers import Tokenizer
from train.data.tokens import SPLITS, Meta
from train.errors import UserError
from train.files import MADE, sync

NOT_SOURCE = {
    "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages",
    "__pycache__",
}  # fmt: skip


def standard_library() -> list[Path]:
    """Return Python's own modules without tests: 10 to 13 MB that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        p for p in root.rglob("*.py") if not NOT_SOURCE & set(p.relative_to(root).parts)
    )


def read(path: Path) -> str:
    """Return what a text file says."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"got {path}: {error}, expected UTF-8 text: convert it or leave it out"
        ) from error


def by_document(texts: Iterator[str], fraction: float) -> Iterator[tuple[str, str]]:
    """Yield (split, text): whole documents held out by the hash of their content."""
    for text in texts:
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        yield ("val" if digest < fraction * 2**64 else "train"), text


def by_tail(texts: Iterator[str], fraction: float) -> Iterator[tuple[str, str]]:
    """Yield (split, text): the tail of every document held out."""
    for text in texts:
        cut = round(len(text) * (1 - fraction))
        yield "train", text[:cut]
        yield "val", text[cut:]


class LocalText:
    """Files of this machine: small enough to begin again after a kill.

    Of the source "python" whole files are held out, of "text" the tail of each file.
    """

    def __init__(self, source: str, files: list[Path], val_fraction: float) -> None:
        self._files = standard_library() if source == "python" else files
        self._split = by_document if source == "python" else by_tail
        self._fraction = val_fraction
        contents = hashlib.sha256()
        for path in self._files:
            contents.update(f"{path.name}:{read(path)}\n".encode())
        known = {"files": len(self._files), "contents": contents.hexdigest()}
        own = {"source": source, "val_fraction": val_fraction}
        self.request = self.plan = own | known

    def make(self, work: Path, coder: Tokenizer, processes: int) -> Meta:
        """Write train.bin and val.bin; return what they hold."""
        bar = tqdm(self._files, desc="tokenize", unit="file", disable=None)
        pieces = self._split((read(path) for path in bar), self._fraction)
        batches = ((split, [text]) for split, text in pieces if text)
        ids = encoded(batches, coder.name, processes=processes)
        paths = {split: work / MADE / f"{split}.bin" for split in SPLITS}
        with ExitStack() as stack:
            files = {s: stack.enter_context(paths[s].open("wb")) for s in SPLITS}
            for split, tokens in ids:
                files[split].write(tokens.astype("<u2").tobytes())
            for file in files.values():
                sync(file)
        byte_lengths = coder.byte_lengths()
        splits = {s: read_content(path, byte_lengths) for s, path in paths.items()}
        for name, split in splits.items():
            if split.tokens == 0:
                raise UserError(
                    f"got no text for the {name} split, expected some: give more "
                    "files, or another --val-fraction"
                )
        return Meta(coder.name, coder.vocab_size, self.request, **splits)
