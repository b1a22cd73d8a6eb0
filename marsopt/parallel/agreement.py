"""Before the first step: do all ranks mean the same?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._composable_state import _module_state_mapping

NOTHING = "nothing"  # shown of a rank that lacks a name


def check_equal(
    values: Mapping[str, object], groups: Sequence[dist.ProcessGroup], device: str
) -> None:
    """Raise unless values have equal texts on all ranks that ``groups`` together span.
    A collective.

    Args:
        values: by their names in errors.
        groups: of ranks; of a mesh, a group for each axis.
        device: that carries tensors of the groups.

    Raises:
        RuntimeError: on every rank, if they differ.
    """
    texts = {name: str(value) for name, value in values.items()}
    sha256 = hashlib.sha256(repr(texts).encode()).digest()
    digest = int.from_bytes(sha256[:6], "big")
    ends = torch.tensor([digest, -digest], device=device)
    for group in groups:  # so that no rank waits for ever
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    if ends[0] == -ends[1]:
        return
    (a, first), (b, second) = _two(texts, groups)
    names = [
        name
        for name in {**first, **second}
        if first.get(name, NOTHING) != second.get(name, NOTHING)
    ]
    told = "their order"
    if names:
        values_of = (x.get(names[0], NOTHING) for x in (first, second))
        told = "{}={} on rank {a}, {} on rank {b}".format(
            names[0], *values_of, a=a, b=b
        )
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    raise RuntimeError(
        f"got models, param groups or options that differ between the ranks ({told}"
        f"{more}), expected the same everywhere: build them, and the collectives, from "
        "equal arguments on every rank"
    )


def _two(
    texts: dict[str, str], groups: Sequence[dist.ProcessGroup]
) -> list[tuple[int, dict[str, str]]]:
    """Return two ranks that differ, and their texts. A collective."""
    found = {repr(texts): (dist.get_rank(), texts)}
    for group in groups:
        every: list[dict[str, tuple[int, dict[str, str]]]] = [{}] * group.size()
        dist.all_gather_object(every, dict(found), group=group)
        for ranks in every:
            for key, told in ranks.items():
                found[key] = min(told, found.get(key, told), key=lambda pair: pair[0])
    return sorted(found.values(), key=lambda pair: pair[0])[:2]


def names_in_modules(params: Sequence[tuple[Tensor, str]]) -> dict[str, str]:
    """Return the name of each parameter in the largest module that FSDP2 shards, by the
    parameter's label: unnamed parameters of one shape may lie in another order on a
    rank.
    """
    names = dict[int, str]()
    for module in list(_module_state_mapping):
        for name, p in module.named_parameters():
            names[id(p)] = max(name, names.get(id(p), ""), key=len)
    return {f"module of {what}": names[id(p)] for p, what in params if id(p) in names}
