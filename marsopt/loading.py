"""State dicts into existing state: complete or refused, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from marsopt.lanes import OWN_KEYS


def of_ours(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``entry`` without what others keep in it."""
    return {key: value for key, value in entry.items() if key in OWN_KEYS}


def check_ids(labelled: Sequence[tuple[Tensor, str]], saved: Mapping[str, Any]) -> list:
    """The ids under which ``saved`` knows the parameters, in their order.

    Raises:
        ValueError: another number of parameters.
    """
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    if len(ids) != len(labelled):
        raise ValueError(
            f"got a state dict of {len(ids)} parameters, expected {len(labelled)}: "
            "build MARS over the same parameters"
        )
    return ids


def check_complete(
    wanted: Mapping[Tensor, Mapping[str, Tensor]],
    labelled: Sequence[tuple[Tensor, str]],
    ids: Sequence[Any],
    saved: Mapping[str, Any],
) -> None:
    """Whether ``saved`` has every tensor of ``wanted``, the state that it leads to.

    Raises:
        ValueError: something is missing, or has another shape.
    """
    for i, (p, label) in zip(ids, labelled, strict=True):
        found, mine = saved["state"].get(i, {}), of_ours(wanted.get(p, {}))
        missing = sorted(set(mine) - set(found))
        if missing:
            raise ValueError(
                f"got a state dict without {missing} of {label}, expected "
                f"{sorted(mine)}: it was saved by another optimizer or mars_type; load "
                "it into one like that"
            )
        for key, tensor in mine.items():
            shape = torch.as_tensor(found[key]).shape
            if shape != tensor.shape:
                raise ValueError(
                    f"got {key} of shape {tuple(shape)} for {label}, expected "
                    f"{tuple(tensor.shape)}: build MARS over the same parameters in "
                    "the same order"
                )


def restore(
    mine: Mapping[Tensor, Mapping[str, Tensor]],
    params: Sequence[Tensor],
    ids: Sequence[Any],
    saved: Mapping[str, Any],
) -> None:
    """Copy the saved state into the tensors of ``mine``, in their own dtype.

    torch.optim's own loading casts state to the parameter's dtype, which would round
    float32 state of bf16 parameters.
    """
    for i, p in zip(ids, params, strict=True):
        for key, tensor in of_ours(mine.get(p, {})).items():
            value = saved["state"][i][key]  # the authors' step is an int
            tensor.copy_(value) if isinstance(value, Tensor) else tensor.fill_(value)
