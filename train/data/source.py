"""What a source of text is to ``train.prepare``, and the options that several share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from train.data.tokenizers import Tokenizer
from train.data.tokens import Meta
from train.errors import UserError, check_least, counted


@dataclass(frozen=True)
class Option:
    """What a source takes from the command line, where it is ``--name``, or without a
    name whatever stands there by itself (``nargs`` "*").

    Args:
        name: of the argument in Python, such as "val_fraction".
        help: for --help; which sources take it is said there too.
        type: makes a value of a word.
        nargs: as argparse's.
        metavar: as argparse's.
        check: raises UserError for a value that no source takes.
    """

    name: str
    help: str
    type: Callable[[str], Any] = str
    nargs: str | None = None
    metavar: str | None = None
    check: Callable[[Any], None] = lambda value: None

    @property
    def flag(self) -> str:
        """Return how it is given: "--val-fraction", or "files"."""
        return self.name if self.nargs == "*" else f"--{self.name.replace('_', '-')}"

    def said(self, value: Any) -> str:
        """Return what was given, for a message."""
        if self.nargs == "*":
            return counted(len(value), self.name.removesuffix("s"))
        return self.flag if self.nargs else f"{self.flag} {value}"


class Source(ABC):
    """Text, and the token files that are made of it.

    A source is called with those of its ``options`` that were given, by their names;
    its signature has defaults for the others. It refuses what does not go together by a
    UserError. An option that several sources take is one object, below.

    Attributes:
        name: for --source.
        tokenizer: that it takes unless told otherwise.
        summary: for --help, what it makes.
        options: that it takes.
        request: what the result depends on, ``name`` among it; prepared data is
            recognised by it, and meta.json keeps it.
        plan: what unfinished work depends on: ``request``, and what else may not change
            before it is finished.
    """

    name: ClassVar[str]
    tokenizer: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[tuple[Option, ...]]
    request: dict[str, Any]
    plan: dict[str, Any]

    @abstractmethod
    def make(self, work: Path, coder: Tokenizer, processes: int) -> Meta:
        """Write token files into ``work / MADE``; return what they hold.

        Cut off at any moment and called again with the same ``work``, it makes the same
        files. Whatever else lies in ``work`` is its own, and deleted at the end.

        Args:
            work: a folder for the files, and for unfinished work.
            coder: turns text into tokens.
            processes: how many may tokenise.

        Raises:
            UserError: text that cannot be read, or too little of it.
        """


def all_options(sources: Mapping[str, type[Source]]) -> dict[Option, list[str]]:
    """Return every option of the sources, and the names of those that take it."""
    found: dict[Option, list[str]] = {}
    for source in sources.values():
        for option in source.options:
            found.setdefault(option, []).append(source.name)
    return found


def chosen(
    sources: Mapping[str, type[Source]], name: str, given: Mapping[str, Any]
) -> Source:
    """Return the source of this name, made of the options that are ``given``.

    Raises:
        UserError: a value that an option does not take, an option that is for other
            sources, or what the source itself refuses.
        TypeError: an option that no source has.
    """
    known = all_options(sources)
    options = {option.name: option for option in known}
    if strange := given.keys() - options.keys():
        raise TypeError(f"got {sorted(strange)}, expected some of {sorted(options)}")
    for key, value in given.items():
        options[key].check(value)
    for key, value in given.items():
        takers = known[options[key]]
        if name not in takers:
            raise UserError(
                f"got {options[key].said(value)} with --source {name}, expected none: "
                f"it is for {', '.join(takers)}; leave it out"
            )
    return sources[name](**given)


def _check_share(flag: str, value: float) -> None:
    if not 0 < value < 1:
        raise UserError(
            f"got {flag} {value}, expected a number between 0 and 1: 0.05 holds out a "
            "twentieth"
        )


def _check_shard_tokens(value: int) -> None:
    check_least(1, shard_tokens=value)  # to the most that a header holds


FILES = Option("files", "files and folders", Path, "*")
HELD_OUT = Option(
    "held_out",
    "files to hold out whole, in place of a share of each file",
    Path,
    nargs="+",
    metavar="FILE",
)
VAL_FRACTION = Option(
    "val_fraction",
    "share held out",
    float,
    check=partial(_check_share, "--val-fraction"),
)
VAL_FILES = Option(
    "val_files",
    "share of files to hold out whole, chosen by the hash of their content",
    float,
    check=partial(_check_share, "--val-files"),
)
DATASET = Option(
    "dataset",
    "data set in place of the source's own: a folder of parquet, arrow or JSON-lines "
    "files with a column text, or OWNER/NAME on the Hugging Face hub",
)
SUBSET = Option("subset", "subset of the data set on the hub")
SHARD_TOKENS = Option(
    "shard_tokens",
    "tokens per shard; work is saved after each",
    int,
    check=_check_shard_tokens,
)
