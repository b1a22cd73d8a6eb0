"""python -m train.prepare: text to token files."""

import argparse
import os
from inspect import signature
from os.path import lexists
from pathlib import Path
from typing import Any

from train.data.local_text import StandardLibrary, Text
from train.data.source import Option, Source, all_options, chosen
from train.data.tokenizers import TOKENIZERS, Bytes, tokenizer
from train.data.tokens import SPLITS, Meta, open_tokens
from train.data.web_text import FineWebEdu, OpenWebText
from train.errors import UserError, check_least, command, counted
from train.files import (
    MADE,
    check_folder,
    check_new,
    discard,
    is_complete,
    workspace,
)

SOURCES: dict[str, type[Source]] = {
    source.name: source for source in (OpenWebText, FineWebEdu, Text, StandardLibrary)
}
DEFAULT = StandardLibrary.name


def prepare(
    source: str, tokenizer_name: str, out: Path, *, processes: int = 1, **options: Any
) -> Meta:
    """Make the token files in ``out``, or recognise that they are there already.

    Cut off at any moment and called again, it makes the same files; work of many shards
    goes on where it stopped.

    Args:
        source: a name in SOURCES.
        tokenizer_name: a name in TOKENIZERS.
        out: the folder, which is empty or not there yet.
        processes: that tokenise.
        options: of the source, by their names.

    Raises:
        UserError: options that do not fit, text that cannot be read, or a folder that
            holds something else.
    """
    ready = chosen(SOURCES, source, options)
    check_least(1, 1024, processes=processes)
    if check_folder("--out", out) and lexists(out / "meta.json"):
        return _recognise(out, ready.request, tokenizer_name)
    check_new("--out", out)
    with workspace(out, {**ready.plan, "tokenizer": tokenizer_name}) as work:
        if not is_complete(work):
            meta = ready.make(work, tokenizer(tokenizer_name), processes)
            meta.save(work / MADE)
    return Meta.load(out)


def _recognise(out: Path, request: dict, tokenizer_name: str) -> Meta:
    """Return what ``out`` holds, if that was made from ``request``."""
    meta = Meta.load(out)
    same = request == {key: meta.source.get(key) for key in request}
    if not same or meta.tokenizer != tokenizer_name:
        raise UserError(
            f"got --out {out}, which holds data made from something else, expected an "
            "empty or new folder: choose another, or delete it"
        )
    for split in SPLITS:
        open_tokens(out, split, vocab_size=meta.vocab_size)
    discard(out)
    print(f"{out} is prepared already: ", end="")
    return meta


def _help(option: Option) -> str:
    """Return the help of an option, with the sources that take it, their defaults."""
    takers = []
    for name, source in SOURCES.items():
        if option in source.options:
            default = signature(source).parameters[option.name].default
            takers.append(f"{name} {default}" if default not in (None, ()) else name)
    return f"{option.help} ({', '.join(takers)})"


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        "python -m train.prepare",
        description="Turn text into token files. If it is cut off, the same command "
        "resumes where it stopped.",
    )
    add = parser.add_argument
    each = "; ".join(f"{name}: {s.summary}" for name, s in SOURCES.items())
    of = "; ".join(f"{name}: {s.tokenizer}" for name, s in SOURCES.items())
    # fmt: off
    add("--source", choices=SOURCES, default=DEFAULT,
        help=f"{each} (default: {DEFAULT})")
    add("--tokenizer", choices=sorted(TOKENIZERS), help=f"default: of {of}")
    add("--out", type=Path, required=True, help="folder for token files and meta.json")
    add("--processes", type=int,
        help="to tokenize with (default: one per core; 1 with --tokenizer bytes)")
    # fmt: on
    for option in all_options(SOURCES):
        more = {"nargs": option.nargs, "action": "extend"} if option.nargs else {}
        more |= {"metavar": option.metavar} if option.metavar else {}
        add(option.flag, type=option.type, help=_help(option), **more)
    return parser.parse_args()


def main() -> None:
    """Run the command."""
    args = arguments()
    names = [option.name for option in all_options(SOURCES)]
    values = {name: getattr(args, name) for name in names}
    given = {name: value for name, value in values.items() if value not in (None, [])}
    name = args.tokenizer or SOURCES[args.source].tokenizer
    processes = args.processes
    if processes is None:
        processes = 1 if name == Bytes.name else len(os.sched_getaffinity(0))
    meta = prepare(args.source, name, args.out, processes=processes, **given)
    counts = {what: meta.source.get(f"{what}s") for what in ("document", "file")}
    of = [f"of {counted(n, what)}" for what, n in counts.items() if isinstance(n, int)]
    tokens = "bytes" if name == Bytes.name else f"{name} tokens"
    print(
        f"{meta.train.tokens:,} training and {meta.val.tokens:,} held-out "
        f"{' '.join([tokens, *of])} in {args.out}"
    )


if __name__ == "__main__":
    command(main)
