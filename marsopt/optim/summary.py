"""Which rule updates how much of a model, in lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.optim.groups import kinds_of, label, values_of
from marsopt.rules.registry import named


@torch.no_grad()  # a learning rate may be a tensor that requires a gradient
def summary(
    groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[str]:
    """Return a line for each rule, the constructor's matrix rule first: its matrices,
    parameters and learning rates; then lines for options of the whole optimizer. Beside
    a matrix rule the other rules name their matrices: with * for a number, if no other
    rule has a matrix of this name.

    Args:
        groups: param groups.
        options: the constructor's options.
    """
    parts = list(_parts(groups))
    rules = [part.rule for part in parts]
    is_corrected = any(named(rule).is_mars for rule in rules)
    main_rule = options["inherited"]["mars_type"]
    if named(main_rule).matrix_only:  # which may update nothing
        rules = [main_rule, *rules]
    rules = list(dict.fromkeys(rules))
    has_matrix_rule = any(named(rule).matrix_only for rule in rules)
    rules_of: dict[str, set[str]] = {}  # by the starred name
    for part in parts:
        for name in _matrices(part.trained):
            rules_of.setdefault(_starred(name), set()).add(part.rule)
    lines = []
    for rule in rules:
        updated = [part for part in parts if part.rule == rule]
        names = [name for part in updated for name in _matrices(part.trained)]
        stars = ((name, _starred(name)) for name in names)
        shown = dict.fromkeys(s if len(rules_of[s]) == 1 else n for n, s in stars)
        is_listed = names and has_matrix_rule and not named(rule).matrix_only
        listed = f" ({', '.join(shown)})" if is_listed else ""
        rates = sorted({part.rate for part in updated})
        lines.append(
            f"{rule}: {len(names)} matrices{listed}, "
            f"{sum(sum(map(Tensor.numel, part.trained.values())) for part in updated)} "
            "parameters"
            + (f", lr {' and '.join(f'{r:.3g}' for r in rates)}" if updated else "")
        )
    frozen = [p for g in groups for p in g["params"] if not p.requires_grad]
    num_frozen = sum(p.numel() for p in frozen)
    lines += [f"frozen: {num_frozen} parameters"] if frozen else []
    return [
        *lines,
        f"correction: {options['correction'] if is_corrected else None}",
        f"max_norm: {options['max_norm']}",
        f"collectives: {options['collectives']!r}",
    ]


def _starred(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _matrices(params: Mapping[str, Tensor]) -> list[str]:
    return [n for n, p in params.items() if p.numel() > max(p.shape, default=1)]


class Part(NamedTuple):
    """The tensors of a group that one rule updates."""

    rule: str
    rate: float
    trained: dict[str, Tensor]  # that require a gradient, by name


def _parts(groups: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    """Yield the matrices and the other tensors of each group, if there are any."""
    for number, group in enumerate(groups):
        kinds = kinds_of(group)
        for is_matrix in (True, False):
            if is_matrix not in kinds:
                continue
            values, trained = values_of(group, is_matrix), {}
            for i, (p, kind) in enumerate(zip(group["params"], kinds, strict=True)):
                if kind == is_matrix and p.requires_grad:
                    text = label(groups, number, i)
                    trained[text.removeprefix("parameter '").removesuffix("'")] = p
            rate = float(values["lr"] * values["lr_ratio"])
            yield Part(values["mars_type"], rate, trained)
