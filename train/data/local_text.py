"""Text files of this machine as training and held-out tokens."""

import hashlib
import sysconfig
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tqdm import tqdm

from train.data.encoding import encoded
from train.data.token_files import read_content
from train.data.tokenizers import Tokenizer
from train.data.tokens import SPLITS, Meta
from train.errors import UserError
from train.files import MADE, sync

NOT_SOURCE = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
TEXT = {".py", ".pyi", ".md", ".rst", ".txt"}
JSON = {".jsonl", ".parquet", ".arrow"}
JSON_LINES = (
    "JSON lines, parquet and arrow are read by --source openwebtext --dataset FOLDER, "
    "from a column text"
)
MOST_ENDINGS = 4


def files_of(root: Path, suffixes: set[str] = TEXT) -> list[Path]:
    """Return a file as it is; of a folder the files that end so, and a package's
    METADATA, its README, but no tests.
    """
    root = root.resolve()  # so that the same file is the same path
    if not root.is_dir():
        return [root]
    every = (p.relative_to(root) for p in root.rglob("*"))
    named = (p for p in every if p.suffix in suffixes or p.name == "METADATA")
    kept = (root / p for p in named if not NOT_SOURCE & set(p.parts))
    return sorted(p for p in kept if p.is_file())


def endings_beside(root: Path) -> Counter[str]:
    """Return how many files of a folder, by their ending, ``files_of`` leaves out, but
    for tests and what is hidden.
    """
    root = root.resolve()
    if not root.is_dir():
        return Counter()
    kept = set(files_of(root))
    found: Counter[str] = Counter()
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        aside = NOT_SOURCE & set(parts) or any(part.startswith(".") for part in parts)
        if path not in kept and path.is_file() and not aside:
            found[path.suffix or "without an ending"] += 1
    return found


def _listed(endings: Counter[str]) -> str:
    """Return "3 .jsonl, 2 .png"."""
    common = [f"{num:,} {ending}" for ending, num in endings.most_common(MOST_ENDINGS)]
    rest = endings.total() - sum(num for _, num in endings.most_common(MOST_ENDINGS))
    return ", ".join(common + [f"{rest:,} others"] * bool(rest))


def _texts(folders: list[Path]) -> tuple[list[Path], Counter[str]]:
    """Return the files that stand for ``folders``, which may be files, and the endings
    of those left out.

    Raises:
        UserError: a folder without any text.
    """
    files, beside = [], Counter()
    for root in folders:
        found, others = files_of(root), endings_beside(root)
        if not found:
            raise UserError(
                f"got {root} with no file of text ({_listed(others) or 'it is empty'}),"
                f" expected some that end in {' '.join(sorted(TEXT))}: "
                + (JSON_LINES if JSON & set(others) else "name a file to have it read")
            )
        files += found
        beside += others
    return files, beside


def standard_library() -> list[Path]:
    """Return Python's own modules without tests: 10 to 13 MB that every machine has."""
    return files_of(Path(sysconfig.get_paths()["stdlib"]), {".py"})


def read(path: Path) -> str:
    """Return what a text file says."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"got {path}: {error}, expected UTF-8 text: convert it or leave it out"
        ) from error


def by_document(text: str, fraction: float) -> list[tuple[str, str]]:
    """Return [(split, text)]: held out whole, or not, by the hash of its content."""
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return [("val" if digest < fraction * 2**64 else "train", text)]


def by_tail(text: str, fraction: float) -> list[tuple[str, str]]:
    """Return [(split, text)]: its tail held out."""
    cut = round(len(text) * (1 - fraction))
    return [("train", text[:cut]), ("val", text[cut:])]


class LocalText:
    """Files of this machine: small enough to begin again after a kill.

    Of the source "python" whole files are held out, of "text" those that are named, or
    else the tail of each file. Folders stand for the text files in them.
    """

    def __init__(
        self, source: str, files: list[Path], fraction: float, held_out: list[Path]
    ) -> None:
        held, beside = _texts(held_out)
        texts, others = _texts(files)
        whole, self._left_out = set(held), beside + others
        every = standard_library() if source == "python" else dict.fromkeys(texts)
        self._files = [f for f in every if f not in whole] + sorted(whole)
        self._held_out = whole if held_out else None
        split = by_document if source == "python" else by_tail
        self._split = partial(split, fraction=fraction)
        contents = hashlib.sha256()
        for path in self._files:
            contents.update(f"{path.name}:{read(path)}\n".encode())
        known = {"files": len(self._files), "contents": contents.hexdigest()}
        own: dict = {"source": source, "val_fraction": fraction}
        if held_out:
            own = {"source": source, "held_out": len(whole)}
        self.request = self.plan = own | known

    def _pieces(self, path: Path) -> list[tuple[str, str]]:
        """Return [(split, text)] of a file."""
        if self._held_out is not None:
            return [("val" if path in self._held_out else "train", read(path))]
        return self._split(read(path))

    def make(self, work: Path, coder: Tokenizer, processes: int) -> Meta:
        """Write train.bin and val.bin; return what they hold."""
        if self._left_out:
            json = f"; {JSON_LINES}" if JSON & set(self._left_out) else ""
            ours = f"which end in none of {' '.join(sorted(TEXT))}"
            print(f"left out: {_listed(self._left_out)}, {ours}{json}")
        bar = tqdm(self._files, desc="tokenize", unit="file", disable=None)
        pieces = (piece for path in bar for piece in self._pieces(path))
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
