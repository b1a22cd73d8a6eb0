"""The table of hyperparameters: the fields of the dataclasses that rules are made of,
with their texts from the docstrings.

A field made by ``number`` may change from step to step: compiled code reads it from a
tensor. Any other field is structure, a Python value that formulas depend on.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass, replace
from difflib import SequenceMatcher
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

# names of other libraries, by ours
WORDS = {
    "lr": "learning_rate step_size muon_lr matrix_lr",
    "lr_1d": "adam_lr adamw_lr scalar_lr embed_lr embedding_lr head_lr",
    "betas": "momentum mu beta1 beta2 adam_betas muon_momentum",
    "betas_1d": "adamw_betas",
    "eps": "epsilon adam_eps adam_epsilon adamw_eps",
    "weight_decay": "decay wd",
    "weight_decay_1d": "adamw_wd adamw_weight_decay",
    "max_norm": (
        "grad_clip clip_grad clip_grad_norm max_grad_norm gradient_clip clip_norm"
        " gradient_clip_val gradient_clipping grad_norm_clip"
    ),
    "mars_type": "rule optimizer optimizer_name algorithm",
    "cautious_weight_decay": "cautious_wd",
    "ns_steps": "backend_steps",
    "gamma": "mars_gamma",
}
ELSEWHERE = {word: name for name, words in WORDS.items() for word in words.split()}
HOW = {"foreach", "fused", "capturable", "differentiable"}  # of torch.optim
# options of other libraries, and of MARS or Rule.step only: the advice in their place
INSTEAD = dict(
    **dict.fromkeys(
        HOW, "how a step is run is no option: it is compiled, and may be captured"
    ),
    maximize="negate the loss",
    decoupled_weight_decay="weight decay always is decoupled",
    lr="Rule.step is given the lr of each step",
    nonfinite="such steps change nothing, and state.matrix.skipped counts them",
    correction="marsopt.mars(mars_type=..., correction=...) gives any rule one",
    compile="what calls Rule.step is compiled, or is not",
)


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


def numbers_of(component: Any) -> list[Any]:
    """Return the numbers in all fields made by ``number``, and in the fields of its
    components, as ``dynamic`` finds them.
    """
    numbers: list[Any] = []
    for f in fields(component):
        value = getattr(component, f.name)
        if f.metadata.get("number"):
            numbers += dynamic(value)
        elif is_dataclass(value):
            numbers += numbers_of(value)
    return numbers


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


def with_numbers(component: Any, numbers: Iterator[Any]) -> Any:
    """Return a copy with the next of these in place of ``numbers_of``; nothing is
    checked. Graphs may call it.
    """
    copied = object.__new__(type(component))
    for f in fields(component):
        value = getattr(component, f.name)
        if f.metadata.get("number"):
            value = rejoined(value, numbers)
        elif is_dataclass(value):
            value = with_numbers(value, numbers)
        object.__setattr__(copied, f.name, value)
    return copied


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


def resembled(name: str, known: Collection[str]) -> str | None:
    """Return the ``known`` name that another is in other libraries, or is but for one
    typo.
    """
    if ELSEWHERE.get(name) in known:
        return ELSEWHERE[name]
    near = [meant for meant in known if _is_typo(name, meant)]
    return checks.closest(name, near) or next(iter(near), None)


def _is_typo(name: str, meant: str) -> bool:
    if len(meant) <= 3:  # lr, eps: l1 is a user's own
        return sorted(name.lower()) == sorted(meant)
    blocks = SequenceMatcher(None, name, meant).get_matching_blocks()
    longer = max(len(name), len(meant))
    return sum(block.size for block in blocks) >= longer - 1


def meant_by(name: str, known: Collection[str]) -> str | None:
    """Return the ``known`` name that is most like another, other libraries' words
    among them.
    """
    words = [*known, *(word for word, own in ELSEWHERE.items() if own in known)]
    close = resembled(name, known) or checks.closest(name, words)
    return close if close in known else ELSEWHERE.get(str(close))


def check_names(names: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Check that all ``names`` that are given to ``what`` are known.

    Raises:
        TypeError: one is not.
    """
    unknown = [name for name in names if name not in known]
    if not unknown:
        return
    close = {n: meant_by(n, known) for n in unknown if n not in INSTEAD}
    meant = [f"{near!r} for {name!r}" for name, near in close.items() if near]
    do = f"did you mean {', '.join(meant[:MOST_NAMES])}?" if meant else "leave it out"
    if len(unknown) > 1 and not meant:
        do = "leave them out"
    advice = dict.fromkeys(INSTEAD[name] for name in unknown if name in INSTEAD)
    do = "; ".join([do, *advice])
    shown = sorted(unknown)[:MOST_NAMES]
    more = f" and {len(unknown) - len(shown)} more" if len(unknown) > len(shown) else ""
    raise TypeError(
        f"got {shown}{more}, expected arguments of {what}: {do} (help({what}) lists "
        "all of them)"
    )


def _name(f: Field[Any]) -> str:
    return f.metadata.get("name") or f.name
