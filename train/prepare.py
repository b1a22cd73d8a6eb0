"""python -m train.prepare: text to token files."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from train.errors import UserError, command
from train.tokenizers import TOKENIZERS, Tokenizer, tokenizer
from train.tokens import SPLITS, Meta, Writer, open_tokens

NOT_SOURCE = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


def standard_library() -> list[Path]:
    """The installed Python's own modules, without tests: 10 to 13 MB of text that every
    machine has.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        p for p in root.rglob("*.py") if not NOT_SOURCE & set(p.relative_to(root).parts)
    )


def read(path: Path) -> str:
    """A text file.

    Raises:
        UserError: missing, a folder, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"got {path}: {error}, expected a readable UTF-8 text file: leave it out "
            "or convert it"
        ) from error


def by_document(texts: Iterator[str], fraction: float) -> Iterator[tuple[str, str]]:
    """(split, text): whole documents held out by the hash of their content."""
    for text in texts:
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        yield ("val" if digest < fraction * 2**64 else "train"), text


def by_tail(texts: Iterator[str], fraction: float) -> Iterator[tuple[str, str]]:
    """(split, text): the tail of every document held out."""
    for text in texts:
        cut = round(len(text) * (1 - fraction))
        yield "train", text[:cut]
        yield "val", text[cut:]


def write(
    pieces: Iterator[tuple[str, str]], coder: Tokenizer, source: dict, folder: Path
) -> Meta:
    """Token files and meta.json of (split, text) pieces, each closed by an end-of-text
    token.
    """
    with ExitStack() as files:
        writers = {
            split: files.enter_context(Writer(folder / f"{split}.bin"))
            for split in SPLITS
        }
        for split, text in pieces:
            if text:
                ids = [*coder.encode(text), coder.end_of_text]
                writers[split].add(ids, len(text.encode()))
    made = {split: writer.split for split, writer in writers.items()}
    meta = Meta(coder.name, coder.vocab_size, source, **made)
    for split in SPLITS:
        if getattr(meta, split).tokens == 0:
            raise UserError(
                f"got no text for the {split} split, expected some: give more files, "
                "or another --val-fraction"
            )
    meta.save(folder)
    return meta


def prepare(
    source: str, tokenizer_name: str, out: Path, files: list[Path], val_fraction: float
) -> Meta:
    """Make the token files in ``out``, or recognise that they are there already.

    Raises:
        UserError: unreadable input, or an ``out`` that holds something else.
    """
    if not 0 < val_fraction < 1:
        raise UserError(
            f"got --val-fraction {val_fraction}, expected a number between 0 and 1: "
            "0.05 holds out a twentieth"
        )
    if source == "python" and files:
        raise UserError(
            f"got {len(files)} files with --source python, expected none: use --source "
            "text for files"
        )
    if source == "text" and not files:
        raise UserError(
            "got no files with --source text, expected at least one: name UTF-8 text "
            "files at the end"
        )
    paths = standard_library() if source == "python" else files
    contents = hashlib.sha256()
    for path in paths:
        contents.update(f"{path.name}:{read(path)}\n".encode())
    made_from = {
        "source": source,
        "files": len(paths),
        "contents": contents.hexdigest(),
        "val_fraction": val_fraction,
    }

    if out.exists() and not out.is_dir():
        raise UserError(
            f"got --out {out}, which is a file, expected a folder: choose one"
        )
    if out.exists() and any(out.iterdir()):
        meta = Meta.load(out)
        if (meta.source, meta.tokenizer) != (made_from, tokenizer_name):
            raise UserError(
                f"got --out {out}, which holds data made from something else, expected "
                "an empty or new folder: choose "
                "another, or delete it"
            )
        for split in SPLITS:
            open_tokens(out, split, vocab_size=meta.vocab_size)
        print(f"{out} is prepared already: ", end="")
        return meta

    coder = tokenizer(tokenizer_name)
    texts = (
        read(path) for path in tqdm(paths, desc="tokenize", unit="file", disable=None)
    )
    pieces = (
        by_document(texts, val_fraction)
        if source == "python"
        else by_tail(texts, val_fraction)
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    # made beside, then moved: a run that is cut off leaves nothing that looks complete
    draft = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        meta = write(pieces, coder, made_from, draft)
        draft.chmod(0o777 & ~_umask())
        if out.exists():
            out.rmdir()
        draft.rename(out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return meta


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m train.prepare", description="Turn text into token files."
    )
    parser.add_argument(
        "--source",
        choices=("python", "text"),
        default="python",
        help="python: the standard library's source",
    )
    parser.add_argument("--tokenizer", choices=sorted(TOKENIZERS), default="bytes")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for train.bin, val.bin and meta.json",
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.05,
        help="share of the text held out (default 0.05)",
    )
    parser.add_argument(
        "files", nargs="*", type=Path, help="text files, for --source text"
    )
    args = parser.parse_args()
    meta = prepare(args.source, args.tokenizer, args.out, args.files, args.val_fraction)
    print(
        f"{meta.train.tokens:,} training and {meta.val.tokens:,} held-out "
        f"{meta.tokenizer} tokens of "
        f"{meta.source['files']} files in {args.out}"
    )


if __name__ == "__main__":
    command(main)
