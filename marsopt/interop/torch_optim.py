"""MARS as torch.optim's Muon and AdamW, over the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, optim
from torch.utils._pytree import tree_map_only

from marsopt.optim.mars import MARS
from marsopt.optim.state_dict import in_form_of
from marsopt.optim.torch_state import ADAMW, MUON, Format, Leaf, leaves_of
from marsopt.rules.adamw import AdamW
from marsopt.rules.component import Preconditioner
from marsopt.rules.newton_schulz import COEFFICIENTS
from marsopt.rules.orthogonal import Orthogonal

# The preconditioner of each format, and its fields that torch has by the same names.
KINDS: dict[Format, tuple[type[Preconditioner], Sequence[str]]] = {
    MUON: (Orthogonal, ("momentum", "nesterov", "weight_decay", "adjust_lr_fn")),
    ADAMW: (AdamW, ("betas", "eps", "weight_decay", "amsgrad")),
}


def to_torch(optimizer: MARS) -> tuple[optim.Muon | None, optim.AdamW | None]:
    """Return torch.optim.Muon and torch.optim.AdamW over the parameters of
    ``optimizer``, with its numbers and copies of its state: the next step of either
    equals its own to 1e-6, with Newton-Schulz in bfloat16 to 2e-2.

    A group's learning rate is ``lr * lr_ratio``. State gets the parameter's dtype. With
    ``epsilon_hat`` torch adds eps after debiasing, which differs in the first steps.
    torch has no ``max_norm``, and skips no step: call ``clip_grad_norm_`` before it.

    Args:
        optimizer: with "muon" or "moonlight" for matrices, "adamw" for the rest.

    Returns:
        (muon, adamw); None in place of an optimizer without parameters.

    Raises:
        ValueError: a group has a rule or an option that torch lacks.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> optimizer = marsopt.for_model(model, lr=0.02)
        >>> muon, adamw = marsopt.to_torch(optimizer)
        >>> muon.param_groups[0]["adjust_lr_fn"], adamw.param_groups[0]["lr"]
        ('match_rms_adamw', 0.02)
    """
    groups: dict[Format, dict[int, dict[str, Any]]] = {MUON: {}, ADAMW: {}}
    leaves = leaves_of(optimizer.param_groups, optimizer._options)
    if lacking := {leaf.group: text for leaf in leaves if (text := _lacking(leaf))}:
        found = ", ".join(f"{text} in group {i}" for i, text in lacking.items())
        raise ValueError(
            f"got {found}, expected 'muon', 'moonlight' and 'adamw' without options "
            "that torch.optim lacks: it cannot go on from here, give it only the "
            "weights"
        )
    for leaf in leaves:
        assert leaf.format is not None
        of_format, key = groups[leaf.format], id(leaf.values)
        group = of_format.get(key) or {**_numbers(leaf), "params": []}
        group["params"].append(leaf.p if leaf.name is None else (leaf.name, leaf.p))
        of_format[key] = group
    muon = optim.Muon([*groups[MUON].values()]) if groups[MUON] else None
    adamw = optim.AdamW([*groups[ADAMW].values()]) if groups[ADAMW] else None
    for leaf in leaves:
        made = muon if leaf.format is MUON else adamw
        assert made is not None and leaf.format is not None
        wide = replace(leaf.algorithm, state_dtype=torch.float32)
        held = optimizer.state.get(leaf.p, {})  # a frozen parameter has none
        entry = in_form_of(wide, held, optimizer.describe().binding.collectives)
        made.state[leaf.p] = {
            key: entry[key].to("cpu" if key == "step" else leaf.p.dtype, copy=True)
            for key in leaf.format.state.keys() & entry.keys()
        }
    return muon, adamw


def _lacking(leaf: Leaf) -> str:
    """Return the rule, or the options, of a parameter that torch lacks; "" for none."""
    algorithm, rule = leaf.algorithm, leaf.algorithm.preconditioner
    if leaf.format is None or type(rule) is not KINDS[leaf.format][0]:
        return repr(str(algorithm))
    taken = {*KINDS[leaf.format][1], "epsilon_hat", "ns"}
    present = {f.name: getattr(rule, f.name) for f in fields(rule)}
    usual = {f.name: f.default for f in fields(rule)}
    options = {n: v for n, v in present.items() if n not in taken and v != usual[n]}
    if algorithm.correction is not None:
        options["correction"] = algorithm.correction.name
    if algorithm.master_weight_bits is not None:
        options["master_weight_bits"] = algorithm.master_weight_bits
    if isinstance(rule, Orthogonal):
        if not isinstance(rule.nesterov, bool):
            options["nesterov"] = rule.nesterov
        if len(COEFFICIENTS[rule.ns.coefficients]) > 1:
            options["ns_coefficients"] = rule.ns.coefficients
        if algorithm.matrices.splits is not None:
            options["splits"] = algorithm.matrices.splits
        if leaf.p.ndim != 2:
            options["matrices"] = algorithm.matrices.kind
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _numbers(leaf: Leaf) -> dict[str, Any]:
    """Return the numbers of a parameter's group as torch's optimizer has them."""
    assert leaf.format is not None
    rule, values = leaf.algorithm.preconditioner, leaf.values
    numbers = {name: getattr(rule, name) for name in KINDS[leaf.format][1]}
    rates = [name for name in ("lr", "initial_lr") if name in values]
    numbers |= {name: values[name] * values["lr_ratio"] for name in rates}
    if isinstance(rule, Orthogonal):
        coefficients = COEFFICIENTS[rule.ns.coefficients][0]
        numbers |= dict(ns_coefficients=coefficients, ns_steps=rule.ns.steps)
        numbers["eps"] = rule.ns.eps
    plain: dict[str, Any] = tree_map_only(Tensor, float, numbers)
    return plain
