"""Beside the agreement: which fields differ between two texts of a configuration."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import torch.distributed as dist

MOST = 300  # characters of a message
VALUE = 32  # of a value in it
NAMED = re.compile(r"""['"]?([\w ]+)['"]?(?:: |=)(.*)""", re.DOTALL)


def by_rank(text: str, groups: Iterable[dist.ProcessGroup]) -> dict[str, str]:
    """Return the different texts among the ranks of all groups, each with the lowest
    rank that has it. A collective, for ranks that all know that they differ.
    """
    found = {text: dist.get_rank()}
    for group in groups:
        every: list[dict[str, int]] = [{}] * group.size()
        dist.all_gather_object(every, dict(found), group=group)
        for ranks in every:
            for other, rank in ranks.items():
                found[other] = min(rank, found.get(other, rank))
    pairs = sorted((rank, other) for other, rank in found.items())
    return {f"rank {rank}": other for rank, other in pairs}


def message(template: str, texts: Mapping[str, str]) -> str:
    """Return ``template`` with the fields that differ between the first two ``texts``
    in the place of its braces: at most ``MOST`` characters.
    """
    return template.format(_differing(texts, MOST - len(template)))


def _differing(texts: Mapping[str, str], room: int) -> str:
    if len(texts) < 2:
        return "on another rank"
    (a, first), (b, second) = list(texts.items())[:2]
    before, after = _fields(first), _fields(second)
    differing: dict[str, None] = {}  # one line for groups with equal differences
    for key in {**before, **after}:
        values = before.get(key, "nothing"), after.get(key, "nothing")
        if values[0] != values[1]:
            short = _excerpts(*values)
            differing[f"{key[0]}={short[0]} on {a}, {short[1]} on {b}"] = None
    told: list[str] = []
    for number, field in enumerate(differing):
        left = len(differing) - number - 1
        more = [f"{left} more"] if left else []
        if told and len("; ".join([*told, field, *more])) > room:
            return "; ".join([*told, f"{left + 1} more"])
        told.append(field)
    return "; ".join(told) or "in their order"


def _fields(text: str) -> dict[tuple[str, int], str]:
    """Return the values of a text by name, and by how many of this name came before:
    of param groups, the number of the group.
    """
    found: dict[tuple[str, int], str] = {}
    seen: Counter[str] = Counter()
    for field in _split(text):
        match = NAMED.fullmatch(field.strip())
        name, value = match.groups() if match else ("field", field.strip())
        found[name, seen[name]] = value
        seen[name] += 1
    return found


def _split(text: str) -> list[str]:
    """Return the items of all dicts in a text, and what lies between these."""
    parts, depths, quote = [""], [0], ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([":
            depths[-1] += 1
        elif char in ")]":
            depths[-1] -= 1
        elif char == "{":
            depths.append(0)
        elif char == "}" and len(depths) > 1:
            depths.pop()
        is_end = char in "{}" or char == "," and depths[-1] <= 0
        if is_end and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip(" []")]


def _excerpts(a: str, b: str) -> tuple[str, str]:
    """Return two values, cut to where they differ if they are long."""
    pairs = enumerate(zip(a, b, strict=False))
    same = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
    start = max(0, same - VALUE // 2) if max(len(a), len(b)) > VALUE else 0
    cuts = [("..." if start else "") + x[start : start + VALUE] for x in (a, b)]
    ends = ["..." if len(x) > start + VALUE else "" for x in (a, b)]
    return cuts[0] + ends[0], cuts[1] + ends[1]
