"""The options of a configuration: a line of help for each that this application takes,
and the options of a similar name for a word that is no option.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from train.engine.resolve import FOLLOW, UNUSED
from train.errors import UserError

# options of torchtitan that a data-parallel GPT-2 has no use for
IDLE = (
    "hf_assets_path", "metrics.disable_color_printing", "debug.batch_invariant",
    "parallelism.context_parallel_", "parallelism.enable_sequence_parallel",
    "parallelism.module_fqns_per_model_part", "parallelism.pipeline_parallel_",
)  # fmt: skip
# what a command line cannot give
IN_CODE = ("model_spec", "optimizer.param_groups", "profiler.trace_post_processor")
CHOICE = "activation_checkpoint"
# in the order in which they are listed; others follow
SECTIONS = ("", "dataloader", "tokenizer", "optimizer", "lr_scheduler", "training",
            "loss", "validator", "checkpoint", "metrics", "compile")  # fmt: skip
COLUMN, WIDTH = 44, 88


@dataclass(frozen=True)
class Option:
    """A field of a configuration: ``section.option``, its value and its type."""

    path: str
    value: Any
    kind: Any
    about: str

    @property
    def section(self) -> str:
        """Return the first word of its path, empty where that is the whole."""
        return self.path.partition(".")[0] if "." in self.path else ""

    @property
    def flag(self) -> str:
        """Return it as it is typed."""
        return "--" + self.path.replace("_", "-")

    @property
    def flags(self) -> set[str]:
        """Return all that it may be typed as."""
        section, _, name = self.flag.removeprefix("--").rpartition(".")
        off = f"--{section}.no-{name}" if section else f"--no-{name}"
        return {self.flag, off} if self.kind is bool else {self.flag}


def options(config) -> list[Option]:
    """Return every option that a command line may give, used here or not."""
    rank = {section: i for i, section in enumerate(SECTIONS)}
    found = _within(config, "")
    return sorted(found, key=lambda option: rank.get(option.section, len(rank)))


def _within(config, section: str) -> Iterator[Option]:
    kind = config if isinstance(config, type) else type(config)
    hints, about = get_type_hints(kind, include_extras=True), _about(kind)
    for field in fields(kind):
        path = section + field.name
        if path in IN_CODE:
            continue
        if path == CHOICE:
            for part in (get_args(one)[0] for one in get_args(hints[field.name])):
                if is_dataclass(part):
                    yield from _within(part, f"{path}.")
            continue
        value = getattr(config, field.name, None)
        if is_dataclass(value):
            yield from _within(value, f"{path}.")
        else:
            yield Option(path, value, hints[field.name], about.get(field.name, ""))


@cache
def _about(kind: type) -> dict[str, str]:
    """Return the first sentence of the text below each field of a dataclass."""
    found = {}
    for base in filter(is_dataclass, reversed(kind.__mro__)):
        source = textwrap.dedent(inspect.getsource(base))
        for field, text in pairwise(ast.parse(source).body[0].body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                told = ast.literal_eval(text.value).strip()
                first = re.split(r"(?<=\.)\s|\n\s*\n", told)[0]
                found[field.target.id] = " ".join(first.split()).rstrip(".")
    return found


def _hidden(path: str) -> bool:
    return path in UNUSED or path in FOLLOW or path.startswith((*IDLE, CHOICE))


def listing(name: str, config) -> str:
    """Return the help of a recipe: its options with their values."""
    lines = [
        f"usage: python -m train --config {name} [--section.option VALUE ...]",
        "",
        "The values are this recipe's. --section.option and --section.no-option switch",
        "what is (on) or (off). The last word, followed by its own options alone, is",
        "activation-checkpoint:none, :selective, :full or :memory-budget.",
    ]
    section = None
    for option in options(config):
        if _hidden(option.path):
            continue
        if option.section != section:
            section = option.section
            lines += ["", f"{section}:"] if section else [""]
        lines += _row(option)
    return "\n".join(lines)


def _row(option: Option) -> list[str]:
    about, value = option.about, _typed(option)
    choices = _choices(option.kind)
    if len(choices) > 1 and not all(f"{choice}" in about for choice in choices):
        about = f"{about} ({', '.join(map(str, choices))})".strip()
    head, indent = f"  {option.flag} {value}", " " * COLUMN
    text = textwrap.wrap(about, WIDTH - COLUMN)
    if not text:
        return [head]
    if len(head) < COLUMN:
        return [head.ljust(COLUMN) + text[0], *(indent + line for line in text[1:])]
    return [head, *(indent + line for line in text)]


def _typed(option: Option) -> str:
    """Return a value as it is typed."""
    value = option.value
    if option.kind is bool:
        return f"({'on' if value else 'off'})"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return ",".join(value) if isinstance(value, list) else f"{value}" or "''"


def _choices(kind: Any) -> Sequence:
    if get_origin(kind) is Annotated:
        return _choices(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return get_args(kind)
    return [choice for part in get_args(kind) for choice in _choices(part)]


def check_known(config, given: Sequence[str]) -> None:
    """Check that the options among the words of a command line exist, and that the
    choice of activation checkpointing is the last word but for its own options.

    Raises:
        UserError: for each that does not, the nearest that do.
    """
    every = options(config)
    known = {flag for option in every for flag in option.flags} | {"--help"}
    words = [word.partition("=")[0] for word in given if word.startswith("--")]
    unknown = [w for w in words if w != "--" and w.replace("_", "-") not in known]
    usable = [option for option in every if not _hidden(option.path)]
    if unknown:
        raise UserError(
            *(
                f"got {word}, which is no option, expected {_nearest(word, usable)}"
                for word in dict.fromkeys(unknown)
            )
        )
    choice = CHOICE.replace("_", "-")
    chosen = next((w for w in given if w.startswith(f"{choice}:")), None)
    for word in given[given.index(chosen) :] if chosen else ():
        if word.startswith("--") and not word.startswith(f"--{choice}."):
            raise UserError(f"got {word} after {chosen}, expected {chosen} at the end")


def _nearest(word: str, every: Sequence[Option]) -> str:
    """Say what may have been meant: options of the same or a similar name."""
    flags, name = [option.flag for option in every], word.lstrip("-")
    likely = [flag for flag in flags if flag.endswith(f".{name}")]
    likely += get_close_matches(word, flags, 3)
    if not likely:
        return "one of those that --help lists"
    return f"another: did you mean {' or '.join(likely)}? --help lists them all"
