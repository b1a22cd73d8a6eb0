"""What the class takes as a param group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marsopt import checks
from marsopt.homes import check_apart
from marsopt.layout import label, labels
from marsopt.newton_schulz import NewtonSchulz
from marsopt.numbers import check_group
from marsopt.trees import check_parameter

# parts of ``NewtonSchulz``, one for the whole optimizer
NEWTON_SCHULZ = ("ns_steps", "ns_coefficients", "ns_dtype", "ns_gram")


def admit(groups: Sequence[dict[str, Any]], options: dict[str, Any]) -> None:
    """Checks the last of ``groups`` and notes its ``base_lr``.

    Args:
        groups: the optimizer's, the new one among them.
        options: what the optimizer was built with.

    Raises:
        TypeError, ValueError: hyperparameters out of their range, options of the whole
            optimizer in a group, tensors that no rule can move, or that share memory.
    """
    group = groups[-1]
    own = {**options, **dict(zip(NEWTON_SCHULZ, _parts(options["ns"]), strict=True))}
    # an equal one changes nothing: SAM and ZeRO pass options here as well; max_norm is
    # refused, since ZeRO's parts would each be clipped by a norm of their own
    foreign = sorted(
        key
        for key in set(group) & set(own)
        if key == "max_norm" or group[key] != own[key]
    )
    if foreign:
        raise ValueError(
            f"got {foreign} in a param group, expected them for the whole optimizer: "
            "pass them to MARS itself"
        )
    checks.at_least_zero("lr", group["lr"])
    group.setdefault("base_lr", float(group["lr"]))
    check_group(group, options)
    device = next((p.device for g in groups for p in g["params"]), None)
    for i, p in enumerate(group["params"]):
        _check(p, label(groups, len(groups) - 1, i), device, options)
    takes = options["take_grads"] and device is not None
    if takes and not (options["is_approx"] and device.type == "cpu"):
        raise ValueError(
            f"got take_grads=True with is_approx={options['is_approx']} on {device}, "
            "expected approximate MARS on a CPU, which alone gains by it: leave it out"
        )
    local = options["collectives"].local
    check_apart([(local(p), what) for p, what in labels(groups)])


def _parts(ns: NewtonSchulz) -> tuple[Any, ...]:
    """The values of ``NEWTON_SCHULZ``."""
    return ns.steps, ns.coefficients, ns.dtype, ns.gram


def check_once(groups: Sequence[dict[str, Any]], new: dict[str, Any]) -> None:
    """Check that no tensor of the ``new`` group is there already, or twice in it.

    Raises:
        ValueError: one is, and by which name.
    """
    if not isinstance(new, dict) or isinstance(params := new["params"], set):
        return  # torch.optim refuses what it does not take
    new["params"] = params = [params] if isinstance(params, Tensor) else list(params)
    first = {id(p): what for p, what in labels(groups)}
    for i, given in enumerate(params):
        name, p = given if isinstance(given, tuple) else (None, given)
        what = f"parameter {i} of group {len(groups)}" if name is None else repr(name)
        if id(p) in first:
            before = first[id(p)]
            both = before if before == what else f"{before} and {what}"
            raise ValueError(
                f"got parameter {both.removeprefix('parameter ')} twice, expected "
                "once: list every tensor once, as model.parameters() does for tied "
                "weights too"
            )
        first[id(p)] = what


def _check(
    p: Tensor, what: str, device: torch.device | None, options: dict[str, Any]
) -> None:
    check_parameter(p, what, options["state_dtype"])
    if p.device.type == "meta":
        raise ValueError(
            f"got {what} on the meta device, expected real storage: build MARS after "
            "model.to_empty(...)"
        )
    if p.device != device:
        raise ValueError(
            f"got {what} on {p.device}, expected {device}, where the first parameter "
            "is: use one MARS per device"
        )
    # raises for a sharded parameter without collectives
    options["collectives"].local(p)
