"""Ranges of hyperparameters, checked at every door. The value of a tensor is read only
on a CPU: elsewhere reading would be a sync.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

Number = float | Tensor
Weight = bool | Number  # the gradient's weight in a Nesterov average

PLAIN = (float, int, bool, str, type(None))
LARGEST = 1e30  # float32 ends at 3.4e38
LARGEST_EPS = 1e15  # float32 holds its square, and the square of one over it
MOST_ITERATIONS = 100  # in one graph, each written out


@runtime_checkable
class ArrayLike(Protocol):
    """A scalar or an array of numpy, or of another library like it."""

    def tolist(self) -> Any: ...


def plain(value: Any) -> Any:
    """Return a hyperparameter as Python and torch write it, so that a checkpoint holds
    nothing foreign: scalars of numpy as numbers; arrays, tensors of one dim, and
    sequences that are no text, as tuples. A plain value stays the same object.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return tuple(value.unbind()) if value.ndim == 1 else value
    if isinstance(value, ArrayLike):
        contents = value.tolist()
        value = tuple(contents) if isinstance(contents, list) else contents
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return value
    elements = tuple(map(plain, value))
    same = type(value) is tuple and all(map(is_, elements, value))
    return value if same else elements


def can_read(value: Tensor) -> bool:
    """Return whether the value of a tensor is there, and may be read without waiting:
    not on another device than a CPU, nor under tracing or a functional transform.
    """
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def shown(value: object) -> str:
    """Return the text of a value in messages: not thousands of digits, which Python
    does not even write.
    """
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)


def none_or(check: Callable[[str, Any], None]) -> Callable[..., None]:
    """Return a check that takes None too."""
    return lambda name, value: None if value is None else check(name, value)


def _number(
    expected: str, holds: Callable[[float], bool], do: str
) -> Callable[[str, Any], None]:
    """Return a check for a number, or a 0-D tensor of one.

    Args:
        expected: the numbers that it takes, in the words of its error.
        holds: whether it takes a number.
        do: the advice of its error; "{name}" stands for the hyperparameter.
    """

    def check(name: str, value: Any) -> None:
        value, advice = plain(value), do.format(name=name)
        if isinstance(value, Tensor):
            is_real = not (value.is_complex() or value.dtype == torch.bool)
            if value.ndim or not is_real or value.device.type == "meta":
                raise ValueError(
                    f"got {name} of shape {tuple(value.shape)} and {value.dtype} on "
                    f"{value.device}, expected a real number or 0-D tensor: {advice}"
                )
            if not can_read(value):
                return
            value = value.item()
        limit = ""
        if isinstance(value, int | float) and not isinstance(value, bool):
            if LARGEST < abs(value) < math.inf:
                limit = f", at most {LARGEST:g} in size"
            elif holds(float(value)):
                return
        raise ValueError(
            f"got {name}={shown(value)}, expected {expected}{limit}: {advice}"
        )

    return check


at_least_zero = _number(
    "a finite number >= 0", lambda v: 0 <= v < math.inf, "pass {name}=0 or more"
)
epsilon = _number(
    f"a number from 0 to {LARGEST_EPS:g}",
    lambda v: 0 <= v <= LARGEST_EPS,
    "common values are 1e-8 and 1e-10",
)
positive = _number(
    "a finite number > 0", lambda v: 0 < v < math.inf, "pass {name} above 0"
)
positive_or_none = none_or(
    _number(
        "None or a finite number > 0",
        lambda v: 0 < v < math.inf,
        "None switches it off",
    )
)
finite = _number("a finite number", math.isfinite, "pass a finite {name}")
decay_rate = _number(
    "a number in [0, 1)",
    lambda v: 0 <= v < 1,
    "common values are 0.9 to 0.99; decays that grow are log_time=10.0",
)
log_time_or_none = none_or(  # products of decays keep their digits
    _number(
        "None or a number from 0.001 to 1e6",
        lambda v: 1e-3 <= v <= 1e6,
        "common values are 8 and 10; None switches it off",
    )
)
_weight = _number(
    "True, False or a number in [0, 1]",
    lambda v: 0 <= v <= 1,
    "a number is the weight of the gradient beside its average, such as 0.2",
)


def gradient_weight(name: str, value: Weight) -> None:
    """True, False or a number in [0, 1]."""
    if not isinstance(plain(value), bool):
        _weight(name, value)


def betas(name: str, value: tuple[Number, Number]) -> None:
    """A pair of decays, as ``decay_rate`` has them: any sequence, or an array or tensor
    of one dim.
    """
    pair = plain(value)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(
            f"got {name}={value!r}, expected a pair: pass e.g. {name}=(0.95, 0.99)"
        )
    for i, beta in enumerate(pair):
        decay_rate(f"{name}[{i}]", beta)


def floating_or_none(name: str, value: torch.dtype | None) -> None:
    """None or a floating point dtype."""
    if value is not None and not (
        isinstance(value, torch.dtype) and value.is_floating_point
    ):
        raise ValueError(
            f"got {name}={value}, expected a floating point type or None: pass e.g. "
            "torch.float32"
        )


def coded_or_state_dtype(name: str, value: torch.dtype | None) -> None:
    """None, torch.int8, or a floating point dtype that holds squares of gradients."""
    if value != torch.int8:
        state_dtype_or_none(name, value)


def state_dtype_or_none(name: str, value: torch.dtype | None) -> None:
    """None or a floating point dtype that holds squares of gradients."""
    floating_or_none(name, value)
    if value == torch.float16:
        raise ValueError(
            f"got {name}=torch.float16, expected a dtype with the range of float32, "
            "since squares of gradients leave float16's: pass torch.float32, or leave "
            "it out"
        )


def master_bits_or_none(name: str, value: int | None) -> None:
    """None, 24 or 32."""
    value = plain(value)
    if value is not None and (type(value) is not int or value not in (24, 32)):
        raise ValueError(
            f"got {name}={shown(value)}, expected None, 24 or 32: pass 32 for weights "
            "of float32, or None for weights of bfloat16"
        )


def true_or_false(name: str, value: bool) -> None:
    """True or False."""
    if not isinstance(plain(value), bool):
        raise ValueError(
            f"got {name}={value!r}, expected True or False: pass one of the two"
        )


def splits_or_none(name: str, value: int | Sequence[int] | None) -> None:
    """None, a whole number >= 1, or a sequence of such."""
    value = plain(value)
    parts = value if isinstance(value, tuple | list) else [value]
    are_counts = all(type(part) is int and part >= 1 for part in parts)
    if value is not None and not (parts and are_counts):
        raise ValueError(
            f"got {name}={shown(value)}, expected None, a whole number >= 1 or a tuple "
            f"of such: {name}=2 are two equal parts, {name}=(4096, 1024, 1024) three "
            "of so many rows"
        )


def count(name: str, value: int) -> None:
    """A whole number >= 1."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"got {name}={shown(value)}, expected a whole number >= 1: pass one"
        )


def iterations(name: str, value: int) -> None:
    """A whole number from 1 to ``MOST_ITERATIONS``."""
    count(name, value)
    if plain(value) > MOST_ITERATIONS:
        raise ValueError(
            f"got {name}={shown(value)}, expected a whole number from 1 to "
            f"{MOST_ITERATIONS}: pass one"
        )


def one_of(values: tuple[str, ...]) -> Callable[[str, object], None]:
    """Return a check for one of these words."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, str) or value not in values:
            raise ValueError(
                f"got {name}={value!r}, expected one of {values}: choose one"
            )

    return check


def regular_expression(name: str, value: str) -> None:
    """A text that ``re.search`` takes as a pattern."""
    try:
        re.search(value, "")
    except (re.error, TypeError) as error:
        raise ValueError(
            f"got the pattern {value!r} of {name} ({error}), expected a regular "
            "expression: correct it"
        ) from error
