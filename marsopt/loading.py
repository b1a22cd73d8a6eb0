"""State dicts into existing state: complete or refused, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def check_complete(
    mine: Mapping[Tensor, Mapping[str, Tensor]],
    labelled: Sequence[tuple[Tensor, str]],
    saved: Mapping[str, Any],
) -> list[int]:
    """The ids under which ``saved`` knows the parameters, in their order.

    Raises:
        ValueError: another number of parameters, or state that ``mine`` has and
            ``saved`` lacks.
    """
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    if len(ids) != len(labelled):
        raise ValueError(
            f"got a state dict of {len(ids)} parameters, expected {len(labelled)}: "
            "build MARS over the same parameters"
        )
    for i, (p, label) in zip(ids, labelled, strict=True):
        found = saved["state"].get(i, {})
        missing = sorted(set(mine.get(p, {})) - set(found))
        if missing:
            raise ValueError(
                f"got a state dict without {missing} of {label}, expected "
                f"{sorted(mine[p])}: it was saved by another optimizer or mars_type; "
                "load it into one like that"
            )
        for key, tensor in mine.get(p, {}).items():
            if found[key].shape != tensor.shape:
                raise ValueError(
                    f"got {key} of shape {tuple(found[key].shape)} for {label}, "
                    f"expected {tuple(tensor.shape)}: build MARS over the same "
                    "parameters in the same order"
                )
    return ids


def restore(
    mine: Mapping[Tensor, Mapping[str, Tensor]],
    params: Sequence[Tensor],
    ids: Sequence[int],
    saved: Mapping[str, Any],
) -> None:
    """Copy the saved state into the tensors of ``mine``, in their own dtype.

    torch.optim's own loading casts state to the parameter's dtype, which would round
    float32 state of bf16 parameters.
    """
    for i, p in zip(ids, params, strict=True):
        for key, tensor in mine.get(p, {}).items():
            tensor.copy_(saved["state"][i][key])
