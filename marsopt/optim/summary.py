"""Which rule moves how much of a model, in lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from marsopt.optim.groups import label
from marsopt.rules.registry import named


def summary(
    groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[str]:
    """Return a line for each rule, the constructor's matrix rule first: its matrices,
    parameters and learning rates; then lines for options of the whole optimizer. Beside
    a matrix rule the other rules name their matrices, with * for a number.

    Args:
        groups: param groups.
        options: the constructor's options.
    """
    own_rule = options["inherited"]["mars_type"]
    rules = [group["mars_type"] for group in groups]
    is_corrected = any(named(rule).is_mars for rule in rules)
    if named(own_rule).matrix_only:  # which may move nothing
        rules = [own_rule, *rules]
    rules = list(dict.fromkeys(rules))
    has_matrix_rule = any(named(rule).matrix_only for rule in rules)
    lines = []
    for rule in rules:
        own = [n for n, group in enumerate(groups) if group["mars_type"] == rule]
        trained = [each for n in own for each in _trained(groups, n)]
        names = [name for name, p in trained if p.numel() > max(p.shape, default=1)]
        shown = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", n) for n in names)
        is_listed = names and has_matrix_rule and not named(rule).matrix_only
        listed = f" ({', '.join(shown)})" if is_listed else ""
        rates = {float(groups[n]["lr"] * groups[n]["lr_ratio"]) for n in own}
        lines.append(
            f"{rule}: {len(names)} matrices{listed}, "
            f"{sum(p.numel() for _, p in trained)} parameters"
            + (f", lr {' and '.join(f'{r:.3g}' for r in sorted(rates))}" if own else "")
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


def _trained(
    groups: Sequence[Mapping[str, Any]], number: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a group that require a gradient."""
    for i, p in enumerate(groups[number]["params"]):
        if p.requires_grad:
            text = label(groups, number, i)
            yield text.removeprefix("parameter '").removesuffix("'"), p
