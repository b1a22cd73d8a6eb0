"""Which stacks one call of a compiled graph moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from marsopt.functional.stacks import group_by
from marsopt.optim.buckets import ParameterBucket

# elements; below it a copy costs less than a call
SMALL = 2**16
# eagerly, how many parameters of one shape are moved as one, and up to which size
MANY, TINY = 16, 2**12


class Call(NamedTuple):
    """One call of a compiled graph."""

    stacks: list[int]  # positions of the stacks that it moves
    graph: int  # which graph: calls of one graph differ in their tensors alone


def should_stack(p: Tensor, compile: bool, num_alike: int) -> bool:
    """Return whether parameters of one shape share a bucket.

    On a GPU every launch counts, so they do. On a CPU a launch is nothing and the copy
    of a gradient into its stack is a fifth of the step, so that large ones stay by
    themselves, and ``calls`` keeps the graphs as small. Eager steps make temporaries as
    large as what they work on: one parameter each, but for tiny ones that are many,
    where all time would go into calls.

    Args:
        p: one of them.
        compile: whether the step is compiled.
        num_alike: how many of the group may share the bucket.
    """
    if not compile:
        return num_alike >= MANY and p.numel() <= TINY
    return p.device.type != "cpu" or p.numel() <= SMALL


def calls(buckets: Sequence[ParameterBucket], compile: bool) -> list[Call]:
    """Assign stacks to calls of compiled graphs.

    Buckets of one kind share a graph, called once for each of them; kinds of which
    there are equally many share its calls. So a graph of one layer is compiled, and
    called for every layer; kinds that occur once share one call.
    """
    if not compile:
        return [Call(list(range(len(buckets))), 0)]
    kinds = group_by([bucket.kind() for bucket in buckets])
    return [
        Call(list(row), graph)
        for graph, together in enumerate(group_by([len(kind) for kind in kinds]))
        for row in zip(*(kinds[i] for i in together), strict=True)
    ]
