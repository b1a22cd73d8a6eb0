"""python -m train.prepare: text to token files."""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from train.data.local_text import LocalText
from train.data.tokenizers import TOKENIZERS, Bytes, tokenizer
from train.data.tokens import SPLITS, Meta, open_tokens
from train.data.web_text import SUBSETS, VAL_FRACTION, FineWebEdu, OpenWebText
from train.errors import UserError, check_least, command, counted
from train.files import MADE, check_folder, is_complete, unfinished, workspace

# each with the tokenizer that it takes unless told otherwise
SOURCES = {
    "openwebtext": "gpt2", "fineweb-edu": "gpt2", "text": "bytes", "python": "bytes",
}  # fmt: skip
SHARD_TOKENS = 10**8  # as llm.c and modded-nanogpt

# each has a request: what the result depends on, by which prepared data is recognised;
# a plan: what unfinished work depends on; and a method make
Source = LocalText | OpenWebText | FineWebEdu


def choose(
    source: str,
    files: Sequence[Path] = (),
    val_fraction: float | None = None,
    *,
    held_out: Sequence[Path] = (),
    dataset: str | None = None,
    subset: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> Source:
    """Return the source with its options, those of the command line.

    ``val_fraction`` None is the source's own, ``held_out`` are files or folders to hold
    out whole in its place, ``dataset`` and ``subset`` stand in place
    of the source's own on the Hugging Face hub, and work is saved after each shard of
    ``shard_tokens``.
    """
    if val_fraction is not None and not 0 < val_fraction < 1:
        raise UserError(
            f"got --val-fraction {val_fraction}, expected a number between 0 and 1: "
            "0.05 holds out a twentieth"
        )
    check_least(1, shard_tokens=shard_tokens)  # to the most that a header holds
    local, shards = source in ("text", "python"), source == "fineweb-edu"
    for given, wrong, expected in (
        (
            counted(len(files), "file"),
            files and source != "text",
            "none: use --source text",
        ),
        ("no files", not files and source == "text", "UTF-8 files: name some"),
        (
            "--dataset or --subset",
            local and (dataset is not None or subset is not None),
            "neither: they are for openwebtext and fineweb-edu; leave them out",
        ),
        (
            f"--val-fraction {val_fraction}",
            shards and val_fraction is not None,
            "none: its first shard is held out; leave it out",
        ),
        (
            "--held-out",
            held_out and (source != "text" or val_fraction is not None),
            "--source text and no --val-fraction with it: leave one out",
        ),
    ):
        if wrong:
            raise UserError(f"got {given} with --source {source}, expected {expected}")
    if local:
        return LocalText(source, [*files], val_fraction or 0.05, [*held_out])
    if shards:
        return FineWebEdu(dataset, subset, shard_tokens)
    return OpenWebText(dataset, subset, val_fraction or VAL_FRACTION, shard_tokens)


def prepare(
    source: str, tokenizer_name: str, out: Path, *given, processes: int = 1, **options
) -> Meta:
    """Make the token files in ``out``, or recognise that they are there already.

    Cut off at any moment and called again, it makes the same files; work on
    "openwebtext" and "fineweb-edu" goes on where it stopped. What else is ``given``,
    and ``options``, are arguments of ``choose``.
    """
    chosen = choose(source, *given, **options)
    check_least(1, 1024, processes=processes)
    if check_folder("--out", out):
        return _recognise(out, chosen.request, tokenizer_name)
    try:
        with workspace(out, {**chosen.plan, "tokenizer": tokenizer_name}) as work:
            if not is_complete(work):
                meta = chosen.make(work, tokenizer(tokenizer_name), processes)
                meta.save(work / MADE)
    except OSError as error:
        raise UserError(
            f"got {error} while making {out}, expected a writable folder with enough "
            "space: see to that, and run the same command again"
        ) from error
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
    shutil.rmtree(unfinished(out), ignore_errors=True)  # of a kill after the last step
    print(f"{out} is prepared already: ", end="")
    return meta


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        "python -m train.prepare",
        description="Turn text into token files. Cut off at any moment, the same "
        "command goes on where it stopped.",
    )
    add = parser.add_argument
    # fmt: off
    add("--source", choices=SOURCES, default="python",
        help="openwebtext: nanoGPT's files (needs 36 GB of disk, 18 stay); "
        "fineweb-edu: shards with a header (2 GB per 1B tokens); text: FILES; "
        "python: the standard library's source (default)")
    add("--tokenizer", choices=sorted(TOKENIZERS),
        help="default: gpt2 for openwebtext and fineweb-edu, else bytes")
    add("--out", type=Path, required=True, help="folder for token files and meta.json")
    add("--val-fraction", type=float,
        help=f"share held out (default 0.05; openwebtext {VAL_FRACTION}; fineweb-edu "
        "holds out its first shard)")
    add("--held-out", nargs="+", type=Path, default=[], metavar="FILE",
        help="held out whole, in place of a share of each file (text)")
    add("--dataset",
        help="in place of the source's own: a folder of parquet, arrow or JSON-lines "
        "files with a column text, or OWNER/NAME on the Hugging Face hub")
    add("--subset",
        help="of the data set on the hub; fineweb-edu: "
        f"{' or '.join(SUBSETS)} (default {list(SUBSETS)[-1]})")
    add("--shard-tokens", type=int, default=SHARD_TOKENS,
        help="tokens per shard; work is saved after each (default %(default)s)")
    add("--processes", type=int,
        help="that tokenise (default: one per core; 1 with --tokenizer bytes)")
    add("files", nargs="*", type=Path, help="for --source text: files, folders")
    # fmt: on
    return parser.parse_args()


def main() -> None:
    """Run the command."""
    args = arguments()
    options = vars(args)
    name = options.pop("tokenizer") or SOURCES[args.source]
    if args.processes is None:
        args.processes = 1 if name == "bytes" else len(os.sched_getaffinity(0))
    meta = prepare(tokenizer_name=name, **options)
    counts = {what: meta.source.get(f"{what}s") for what in ("document", "file")}
    of = [counted(n, what) for what, n in counts.items() if isinstance(n, int)]
    tokens = "bytes" if name == Bytes.name else f"{name} tokens"
    print(
        f"{meta.train.tokens:,} training and {meta.val.tokens:,} held-out "
        f"{tokens} of {' in '.join(of)} in {args.out}"
    )


if __name__ == "__main__":
    command(main)
