"""Text files of this machine as training and held-out tokens."""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from train.data.encoding import encoded
from train.data.source import FILES, HELD_OUT, VAL_FILES, VAL_FRACTION, Source
from train.data.token_files import read_content
from train.data.tokenizers import Tokenizer
from train.data.tokens import SPLITS, Meta
from train.errors import UserError
from train.files import MADE, opened, replacing

NOT_SOURCE = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
TEXT = {".py", ".pyi", ".md", ".rst", ".txt"}
JSON = {".jsonl", ".parquet", ".arrow"}
JSON_LINES = (
    "JSON lines, parquet and arrow are read by --source openwebtext --dataset FOLDER, "
    "from a column text"
)
MOST_ENDINGS = 4
SHARE = 0.05  # held out unless told otherwise


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
    for what is hidden; ".txt in test" are texts in a folder of that name.
    """
    root = root.resolve()
    if not root.is_dir():
        return Counter()
    kept = set(files_of(root))
    found: Counter[str] = Counter()
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        if path in kept or hidden or not path.is_file():
            continue
        aside = sorted(NOT_SOURCE & set(parts)) if path.suffix in TEXT else []
        ending = path.suffix or "without an ending"
        found[" in ".join([ending, *aside[:1]])] += 1
    return found


def _listed(endings: Counter[str]) -> str:
    """Return "3 .jsonl, 2 .png"."""
    common = [f"{num:,} {ending}" for ending, num in endings.most_common(MOST_ENDINGS)]
    rest = endings.total() - sum(num for _, num in endings.most_common(MOST_ENDINGS))
    return ", ".join(common + [f"{rest:,} others"] * bool(rest))


def _texts(folders: Sequence[Path]) -> tuple[list[Path], Counter[str]]:
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
        with opened(path, "a text: name another") as file:
            return file.read().decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"got {path}: {error}, expected UTF-8 text: convert it or leave it out"
        ) from error


def by_document(path: Path, text: str, fraction: float) -> list[tuple[str, str]]:
    """Return [(split, text)]: held out whole, or not, by the hash of its content."""
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return [("val" if digest < fraction * 2**64 else "train", text)]


def by_tail(path: Path, text: str, fraction: float) -> list[tuple[str, str]]:
    """Return [(split, text)]: its tail held out."""
    cut = round(len(text) * (1 - fraction))
    return [("train", text[:cut]), ("val", text[cut:])]


class LocalFiles(Source):
    """Files of this machine: small enough to begin again after a kill."""

    tokenizer = "bytes"

    def __init__(
        self,
        own: dict[str, Any],
        files: Iterable[Path],
        split: Callable[[Path, str], list[tuple[str, str]]],
        left_out: Counter[str],
    ) -> None:
        """``own`` is what the source says of itself in ``request``, ``split`` gives
        [(split, text)] of a file and its text, ``left_out`` are endings of files that
        lie beside.
        """
        self._files, self._split, self._left_out = [*files], split, left_out
        contents = hashlib.sha256()
        for path in self._files:
            contents.update(os.fsencode(path.name) + f":{read(path)}\n".encode())
        known = {"files": len(self._files), "contents": contents.hexdigest()}
        self.request = self.plan = {"source": self.name} | own | known

    def make(self, work: Path, coder: Tokenizer, processes: int) -> Meta:
        """Write train.bin and val.bin; return what they hold."""
        if self._left_out:
            json = f"; {JSON_LINES}" if JSON & set(self._left_out) else ""
            ours = f"text ends in {' '.join(sorted(TEXT))}, outside folders of tests"
            print(f"left out: {_listed(self._left_out)}: {ours}{json}")
        bar = tqdm(self._files, desc="tokenize", unit="file", disable=None)
        pieces = (piece for path in bar for piece in self._split(path, read(path)))
        batches = ((split, [text]) for split, text in pieces if text)
        ids = encoded(batches, coder.name, processes=processes)
        paths = {split: work / MADE / f"{split}.bin" for split in SPLITS}
        with ExitStack() as stack:
            files = {s: stack.enter_context(replacing(paths[s])) for s in SPLITS}
            for split, tokens in ids:
                files[split].write(tokens.astype("<u2").tobytes())
        byte_lengths = coder.byte_lengths()
        splits = {s: read_content(path, byte_lengths) for s, path in paths.items()}
        for name, split in splits.items():
            if split.tokens == 0:
                raise UserError(
                    f"got no text for the {name} split, expected some: give more "
                    "files, or another --val-fraction"
                )
        return Meta(coder.name, coder.vocab_size, self.request, **splits)


class Text(LocalFiles):
    """Files that the user names; folders stand for the text files in them. Held out is
    the tail of each file, a share of whole files, or whole files that are named.
    """

    name = "text"
    summary = f"FILES, of each a tail held out (default: {SHARE})"
    options = (FILES, HELD_OUT, VAL_FILES, VAL_FRACTION)

    def __init__(
        self,
        files: Sequence[Path] = (),
        held_out: Sequence[Path] = (),
        val_files: float | None = None,
        val_fraction: float | None = None,
    ) -> None:
        if not files:
            raise UserError(
                "got no files with --source text, expected UTF-8 files: name some"
            )
        ways = {"--held-out": held_out or None}
        ways |= {"--val-files": val_files, "--val-fraction": val_fraction}
        chosen = [flag for flag, value in ways.items() if value is not None]
        if len(chosen) > 1:
            raise UserError(
                f"got {' and '.join(chosen)} with --source text, expected one of them: "
                "leave the other out"
            )
        held, beside = _texts(held_out)
        texts, others = _texts(files)
        whole, left_out = set(held), beside + others
        every = [f for f in dict.fromkeys(texts) if f not in whole] + sorted(whole)
        if held_out:

            def by_name(path: Path, text: str) -> list[tuple[str, str]]:
                return [("val" if path in whole else "train", text)]

            super().__init__({"held_out": len(whole)}, every, by_name, left_out)
        elif val_files is not None:
            split = partial(by_document, fraction=val_files)
            super().__init__({"val_files": val_files}, every, split, left_out)
        else:
            share = val_fraction or SHARE
            split = partial(by_tail, fraction=share)
            super().__init__({"val_fraction": share}, every, split, left_out)


class StandardLibrary(LocalFiles):
    """Python's own modules, of which whole files are held out."""

    name = "python"
    summary = "the standard library's source, of which whole files are held out"
    options = (VAL_FRACTION,)

    def __init__(self, val_fraction: float = SHARE) -> None:
        split = partial(by_document, fraction=val_fraction)
        own = {"val_fraction": val_fraction}
        super().__init__(own, standard_library(), split, Counter())
