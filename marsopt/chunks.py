"""How the lanes of a step are dealt out to calls of its graphs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from marsopt.lanes import Lane
from marsopt.stacks import group_by

# elements; below it a copy costs less than a call
SMALL = 2**16


class Chunk(NamedTuple):
    """Lanes that one call moves, and which compiled functions do it."""

    lanes: list[Lane]
    family: int


def should_stack(p: Tensor, compile: bool) -> bool:
    """Whether leaves of one shape become one stack.

    On a GPU every launch counts, so they do. On a CPU a launch is nothing and the copy
    of a gradient into its stack is a fifth of the step, so that large leaves stay by
    themselves, and ``chunks`` keeps the graphs as small. Eager steps make temporaries
    as large as what they work on: leaves.
    """
    return compile and (p.device.type != "cpu" or p.numel() <= SMALL)


def chunks(lanes: Sequence[Lane], compile: bool) -> list[Chunk]:
    """``lanes`` in the order in which they move.

    Of L lanes that look alike to a graph, L calls take one each, together with those of
    all other kinds that are L: a graph of one layer is compiled, and called for each.
    Kinds of which there is one share a call.
    """
    if not compile:
        return [Chunk(list(lanes), 0)]
    kinds = group_by([_kind(lane) for lane in lanes])
    found = []
    for family, together in enumerate(group_by([len(kind) for kind in kinds])):
        for row in zip(*(kinds[i] for i in together), strict=True):
            found.append(Chunk([lanes[i] for i in row], family))
    return found


def _kind(lane: Lane) -> Hashable:
    """What a compiled graph knows of a lane; the same on every rank."""
    first = lane.params[0]
    return (
        id(lane.rule),
        len(lane.params),
        first.shape,
        first.stride(),
        first.dtype,
        lane.collectives.placement(first),
        id(lane.lr),
    )
