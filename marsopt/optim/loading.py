"""Checks of a state dict, before anything of it is written."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from marsopt.rules.formats import CODED, LOW_BITS
from marsopt.step.owners import Collectives

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# The key of a text in a state dict that was converted: the source of its state.
SOURCE = "marsopt_source"


def as_tensor(value: Any) -> Tensor:
    """Return a value of a state dict as a tensor: a number on the CPU."""
    if isinstance(value, Tensor):
        return value
    return torch.as_tensor(value, device="cpu")


def check_is_of_optimizer(saved: Any) -> None:
    """Check that ``saved`` is an optimizer's state dict.

    Raises:
        ValueError: it has no "param_groups" or no "state".
    """
    keys = sorted(map(str, saved)) if isinstance(saved, Mapping) else []
    if not {"param_groups", "state"} <= {*keys}:
        got = f"a state dict of {keys[:3]}" if keys else f"a {type(saved).__name__}"
        raise ValueError(
            f"got {got}, expected one of an optimizer, which has 'param_groups' and "
            "'state': load the model's into the model"
        )


def check_kind(value: Any, key: str, label: str, has_codes: bool = False) -> None:
    """Check that a value of a state dict is of the kind of number that the state holds:
    codes, if it has scales.

    Raises:
        ValueError: it is none: not floating point, or as a step no integer either.
    """
    fits, got = isinstance(value, Real), f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        may_be_whole = key in ("step", *LOW_BITS)
        fits = value.is_floating_point() or (may_be_whole and value.dtype in INTEGERS)
        fits = fits or (has_codes and value.dtype == CODED)
        got = f"a tensor of {value.dtype}"
    if not fits:
        raise ValueError(
            f"got {got} as {key!r} of {label}, expected a floating point tensor: load "
            "the result of an optimizer's state_dict()"
        )


def check_shapes(
    saved: Mapping[str, Any],
    present: Mapping[str, Tensor],
    label: str,
    collectives: Collectives,
) -> None:
    """Check that values fit one parameter's tensors of the state.

    Raises:
        ValueError: another shape; a whole tensor for sharded state, or the other way
            round.
    """
    for key, tensor in present.items():
        value = as_tensor(saved[key])
        if value.shape != tensor.shape:
            raise ValueError(
                f"got {key} of shape {tuple(value.shape)} for {label}, expected "
                f"{tuple(tensor.shape)}: build MARS over the same parameters in "
                "the same order"
            )
        if key in LOW_BITS and value.dtype != tensor.dtype:
            raise ValueError(
                f"got {key} of {value.dtype} for {label}, expected {tensor.dtype}: "
                "load the result of an optimizer's state_dict()"
            )
        is_whole = collectives.local(value) is value
        if is_whole != (collectives.local(tensor) is tensor):
            raise ValueError(
                f"got {key} of {label} as a {type(value).__name__}, expected a "
                f"{type(tensor).__name__}, cut as the parameter is: load a whole one "
                "by torch.distributed.tensor.distribute_tensor"
            )
