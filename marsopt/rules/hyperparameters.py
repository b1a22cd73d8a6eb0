"""The table of hyperparameters: the fields of the dataclasses that rules are made of,
with their texts from the docstrings.

A field made by ``number`` is a default of param groups: formulas are given the numbers
of each step as arguments, ``Numbers``. Any other field is structure, a Python value
that formulas depend on.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import torch

from marsopt.rules import checks

Check = Callable[[str, Any], None]  # of a name and a value; raises ValueError


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
            may have its own.
    """
    return field(default=default, metadata=dict(check=check, name=name, whole=whole))


class Hyperparameter(NamedTuple):
    """A line of the table."""

    name: str  # as users write it
    default: Any
    hint: Any  # its type
    check: Check | None
    is_number: bool
    is_whole: bool
    beta: int | None
    is_pair: bool
    text: str  # its description in the docstring of the dataclass

    def plain(self, value: Any) -> Any:
        """Return a value of it as Python and torch write it (``checks.plain``)."""
        return checks.plain(value, is_pair=self.is_pair)

    @property
    def may_be_none(self) -> bool:
        """Whether None is a value; else it is the rule's own."""
        return type(None) in get_args(self.hint)

    @property
    def is_optional(self) -> bool:
        """Whether None stands for the rule's own: of structure, and of a number that
        is on or off by default.
        """
        is_structure = not self.is_number or isinstance(self.default, bool)
        return is_structure and not self.may_be_none

    @property
    def is_dtype(self) -> bool:
        """Whether it is a dtype, or may be a dtype."""
        return torch.dtype in (self.hint, *get_args(self.hint))


Table = Mapping[str, Hyperparameter]

MOST_NAMES = 4  # that an error about unknown arguments shows

# of fields that bring no check of their own, by type
CHECKS: dict[Any, Check] = {
    bool: checks.true_or_false,
    bool | None: checks.none_or(checks.true_or_false),
}


@cache
def table(component: type) -> Table:
    """Return the hyperparameters of a dataclass, and of those that are its fields, by
    the name that users write.
    """
    hints, texts = get_type_hints(component), _texts(component)
    lines: dict[str, Hyperparameter] = {}
    for f in fields(component):
        if is_dataclass(f.default) and not isinstance(f.default, type):
            lines |= table(type(f.default))
            continue
        hint = hints[f.name]
        lines[_name(f)] = Hyperparameter(
            _name(f),
            f.default,
            hint,
            f.metadata.get("check") or CHECKS.get(hint),
            f.metadata.get("number", False),
            f.metadata.get("whole", False),
            f.metadata.get("beta"),
            tuple in [get_origin(h) for h in (hint, *get_args(hint))],
            texts.get(f.name, ""),
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
    its fields. None stands for the dataclass's own value, unless it is a value itself.
    """
    by_field: dict[str, Any] = {}
    known = table(component)
    for f in fields(component):
        if is_dataclass(f.default) and not isinstance(f.default, type):
            nested = arguments(type(f.default), values)
            if nested:
                by_field[f.name] = replace(f.default, **nested)
            continue
        line = known[_name(f)]
        if line.beta is not None and "betas" in values:
            by_field[f.name] = values["betas"][line.beta]
        elif line.name in values:
            value = values[line.name]
            if value is not None or not line.is_optional:
                by_field[f.name] = value
    return by_field


def check_fields(component: Any) -> None:
    """Check the fields of a dataclass's instance, and write them as Python does.

    Raises:
        ValueError: one is out of its range.
    """
    kind: type = type(component)
    known = table(kind)
    for f in fields(component):
        if (line := known.get(_name(f))) is None:  # a component of it
            continue
        value = getattr(component, f.name)
        if line.check is not None:
            line.check(line.name, value)
        object.__setattr__(component, f.name, line.plain(value))


# ---- a hyperparameter's numbers, and the rest of it ----------------------------------


def dynamic(value: Any) -> list[Any]:
    """Return the numbers that a hyperparameter holds: of a pair two, of True, False and
    None none.
    """
    if value is None or isinstance(value, bool):
        return []
    if isinstance(value, tuple | list):
        return [number for part in value for number in dynamic(part)]
    return [value]


def static(value: Any) -> Any:
    """Return all of a hyperparameter but its numbers, hashable: the formula depends on
    it.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is float:
        return kind
    if kind is not tuple and kind is not list:
        value = checks.plain(value, is_pair=True)
    return tuple(map(static, value)) if isinstance(value, tuple | list) else float


def rejoined(value: Any, numbers: Iterator[Any]) -> Any:
    """Return a hyperparameter with the next of these in place of its numbers."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, tuple | list):
        return tuple([rejoined(part, numbers) for part in value])
    return next(numbers)


class Numbers:
    """The numbers of a step as attributes: ``lr``, and the fields of an algorithm's
    components that are made by ``number``. Each is a number, or a tensor with an entry
    for each of N norms; a pair of numbers is a tuple.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no component has the number {name!r}")


def number_fields(component: Any) -> dict[str, Any]:
    """Return the fields made by ``number``, with their values."""
    return {
        f.name: getattr(component, f.name)
        for f in fields(component)
        if f.metadata.get("number")
    }


def beta_of(component: Any, name: str) -> int | None:
    """Return the place in ``betas`` of a component's field, if it has one."""
    kind: type = type(component)
    line = table(kind).get(name)
    return None if line is None else line.beta


def is_built_in(component: Any) -> bool:
    """Return whether a component, or its absence, is of this package."""
    return component is None or type(component).__module__.startswith("marsopt.")


def form_of(component: Any) -> Hashable:
    """Return all of a component that its formulas depend on: its class and structure,
    and which of its numbers there are. A class of a user may read its fields in a
    formula: each of its instances is a form of its own.
    """
    if component is None:
        return None
    if not is_built_in(component):
        return id(component)
    values = {f.name: getattr(component, f.name) for f in fields(component)}
    values |= {n: static(value) for n, value in number_fields(component).items()}
    return type(component), *values.items()


def without_numbers(component: Any) -> Any:
    """Return a component that holds no number: ``...`` in its place fails where a
    formula reads it. A component of a user's class stays as it is.
    """
    if component is None or not is_built_in(component):
        return component
    bare = object.__new__(type(component))
    values = {f.name: getattr(component, f.name) for f in fields(component)}
    for name, value in number_fields(component).items():
        values[name] = rejoined(value, itertools.repeat(...))
    bare.__dict__.update(values)
    return bare


def check_values(known: Table, values: Mapping[str, Any]) -> None:
    """Check the ``values`` that a table names.

    Raises:
        ValueError: one is out of its range.
    """
    for name, value in values.items():
        if (line := known.get(name)) is None:
            continue
        if line.check is not None and not (value is None and line.is_optional):
            line.check(name, value)


def check_names(names: Iterable[str], known: Collection[str], what: str) -> None:
    """Check that all ``names`` that are given to ``what`` are known.

    Raises:
        TypeError: one is not.
    """
    unknown = sorted(name for name in names if name not in known)
    if not unknown:
        return
    close = [m for name in unknown for m in get_close_matches(name, known, 1)]
    do = f"did you mean {', '.join(map(repr, close[:MOST_NAMES]))}?"
    more = f" and {len(unknown) - MOST_NAMES} more" * (len(unknown) > MOST_NAMES)
    raise TypeError(
        f"got {unknown[:MOST_NAMES]}{more}, expected arguments of {what}: "
        f"{do if close else 'leave it out'} (help({what}) lists all of them)"
    )


def _name(f: Field[Any]) -> str:
    return f.metadata.get("name") or f.name
