"""The table of options: the fields of the dataclasses that rules are made of, with
their texts from the docstrings.

A field made by ``number`` is a default of param groups: formulas are given the numbers
of each step as arguments, ``Numbers``. Any other field is structure, a Python value
that formulas depend on.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

import torch

from marsopt.rules import checks

Check = Callable[[str, Any], None]  # (name, value); raises ValueError


def number(default: Any, check: Check, *, beta: int | None = None) -> Any:
    """Return a dataclass field that may change from step to step: a number or a pair.
    True, False and None in its place are structure.

    Args:
        default: its value, which may be None.
        check: raises if a value is out of its range.
        beta: its place in the authors' ``betas``: MARS and param groups set it by that;
            None = they have it under its own name.
    """
    return field(default=default, metadata=dict(number=True, check=check, beta=beta))


def structure(
    default: Any,
    check: Check | None = None,
    *,
    name: str | None = None,
    whole: bool = False,
) -> Any:
    """Return a dataclass field that chooses the formula. A plain default says the same
    if none of these arguments is needed.

    Args:
        default: its value.
        check: raises if a value is not allowed; None = the check in ``CHECKS`` of its
            type.
        name: its name for users; None = as the field.
        whole: whether it is one value for the whole optimizer; else every param group
            may have another.
    """
    return field(default=default, metadata=dict(check=check, name=name, whole=whole))


NO_OPTION = {"option": False}  # the metadata of a field that users set by other names


class Option(NamedTuple):
    """A line of the table."""

    name: str  # as users write it
    default: Any
    hint: Any  # its type
    check: Check | None
    text: str  # its description in the docstring of the dataclass
    is_number: bool = False
    is_whole: bool = False
    beta: int | None = None

    @property
    def is_optional(self) -> bool:
        """Whether None selects the rule's default. It does for structure, and for a
        number whose default is True or False, unless None is a valid value.
        """
        is_structure = not self.is_number or isinstance(self.default, bool)
        return is_structure and type(None) not in get_args(self.hint)

    @property
    def is_dtype(self) -> bool:
        """Whether it is a dtype, or may be a dtype."""
        return torch.dtype in (self.hint, *get_args(self.hint))


OptionTable = Mapping[str, Option]

MOST_NAMES = 4  # that an error about unknown arguments shows
# names in torch.optim, trainers and nanoGPT that ``get_close_matches`` does not match
SYNONYMS = {
    "momentum": "betas",
    "learning_rate": "lr",
    "wd": "weight_decay",
    **dict.fromkeys(("grad_clip", "gradient_clip_val"), "max_norm"),
}

# checks of fields without a check, by type
CHECKS: dict[Any, Check] = {
    bool: checks.true_or_false,
    bool | None: checks.none_or(checks.true_or_false),
}


def _fields(component: type) -> Iterator[tuple[Field[Any], Any]]:
    """Yield the fields of a dataclass that are options, or hold a dataclass of options,
    each with that dataclass or None.
    """
    for f in fields(component):
        if f.metadata.get("option", True):
            is_nested = is_dataclass(f.default) and not isinstance(f.default, type)
            yield f, f.default if is_nested else None


@cache
def options_of(component: type) -> OptionTable:
    """Return the options of a dataclass, and of the dataclasses that are its fields, by
    the name that users write.
    """
    hints, texts = get_type_hints(component), _texts(component)
    lines: dict[str, Option] = {}
    for f, nested in _fields(component):
        if nested is not None:
            kind: type = type(nested)
            lines |= options_of(kind)
            continue
        hint = hints[f.name]
        lines[_name(f)] = Option(
            _name(f),
            f.default,
            hint,
            f.metadata.get("check") or CHECKS.get(hint),
            texts.get(f.name, ""),
            f.metadata.get("number", False),
            f.metadata.get("whole", False),
            f.metadata.get("beta"),
        )
    return lines


def _texts(component: type) -> dict[str, str]:
    """Return the entries under Args in the docstrings of a dataclass and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(component.__mro__):
        _, _, args = inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")
        for entry in re.split(r"^ {4}(?=\w)", args.partition("\n\n")[0], flags=re.M):
            name, _, text = entry.partition(":")
            texts[name] = " ".join(text.split())
    return texts


def arguments(component: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a dataclass that are among ``values``, under the names of
    its fields. None selects the field's default, unless it is a value itself.
    """
    by_field: dict[str, Any] = {}
    known = options_of(component)
    for f, nested in _fields(component):
        if nested is not None:
            if nested_arguments := arguments(type(nested), values):
                by_field[f.name] = replace(nested, **nested_arguments)
            continue
        line = known[_name(f)]
        if line.name in values:
            value = values[line.name]
            if value is not None or not line.is_optional:
                by_field[f.name] = value
        elif line.beta is not None and "betas" in values:
            by_field[f.name] = values["betas"][line.beta]
    return by_field


def check_fields(component: Any) -> None:
    """Check the fields of a dataclass's instance, and write them as Python does.

    Raises:
        ValueError: a value is out of its range.
    """
    kind: type = type(component)
    known = options_of(kind)
    for f, nested in _fields(kind):
        if nested is not None:
            continue
        line, value = known[_name(f)], getattr(component, f.name)
        if line.check is not None:
            line.check(line.name, value)
        object.__setattr__(component, f.name, checks.plain(value))


def check_values(known: OptionTable, values: Mapping[str, Any]) -> None:
    """Check the ``values`` that a table names.

    Raises:
        ValueError: a value is out of its range.
    """
    for name, value in values.items():
        if (line := known.get(name)) is None:
            continue
        if line.check is not None and not (value is None and line.is_optional):
            line.check(name, value)


def check_names(
    names: Iterable[str], known: Collection[str], what: str, case: str = ""
) -> None:
    """Check that all ``names`` that are given to ``what``, in this case, are known.

    Raises:
        TypeError: a name is unknown.
    """
    unknown = sorted(name for name in names if name not in known)
    if not unknown:
        return
    likely = (SYNONYMS.get(name, name) for name in unknown)
    close = [m for name in likely for m in get_close_matches(name, known, 1)]
    do = f"did you mean {', '.join(map(repr, close[:MOST_NAMES]))}?"
    more = f" and {len(unknown) - MOST_NAMES} more" * (len(unknown) > MOST_NAMES)
    raise TypeError(
        f"got {unknown[:MOST_NAMES]}{more}, expected arguments of {what}{case}: "
        f"{do if close else 'leave it out'} (help({what}) lists all of them)"
    )


def _name(f: Field[Any]) -> str:
    return f.metadata.get("name") or f.name
