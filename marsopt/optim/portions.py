"""Which parameters share a stack, which stacks a call of a graph moves, and which calls
go together through Newton-Schulz.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from marsopt.functional.stacks import group_by
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.dtypes import working_dtype

# elements; below it copies cost less than a call
SMALL = 2**16
TOGETHER = 4  # stacks, at most, of one graph that is called for many layers


def should_stack(shape: torch.Size) -> bool:
    """Return whether a parameter of this shape shares a stack with further ones, if no
    kernel moves it where it lies: it is small, so that copies into the stack and out of
    it are nothing.
    """
    return shape.numel() < SMALL


def calls(kinds: Sequence[Hashable], compile: bool) -> list[list[int]]:
    """Assign stacks, by position, to calls of compiled graphs.

    Stacks that occur equally often are compiled into one graph: the graph of one layer,
    which is called for every layer, or of several layers where these have few stacks;
    stacks that occur once share one call.

    Args:
        kinds: of every stack, the form on which a compiled graph relies; the same on
            all ranks.
        compile: whether the step is compiled.
    """
    if not compile:
        return [list(range(len(kinds)))]
    alike, assigned = group_by(kinds), []
    for together in group_by([len(kind) for kind in alike]):
        layers = list(zip(*(alike[i] for i in together), strict=True))
        most = max(1, TOGETHER // len(together))
        num = max(n for n in range(1, most + 1) if len(layers) % n == 0)
        for start in range(0, len(layers), num):
            part = layers[start : start + num]
            assigned.append([i for layer in part for i in layer])
    return assigned


def takes_batches(device_type: str) -> bool:
    """Return whether such a device is fastest on all matrices of one shape at once. A
    CPU takes large matrices one by one.
    """
    return device_type != "cpu"


def batch_of(algorithm: Algorithm, shape: torch.Size, x: Tensor) -> Hashable:
    """Return what tensors share whose matrices are rows of one batch; None where they
    are not made of matrices.

    Args:
        algorithm: of a tensor.
        shape: of it, whole.
        x: of its dtype.
    """
    if not algorithm.matrix_only:
        return None
    shapes = algorithm.matrices.shapes_in(shape)
    sizes = tuple(dict.fromkeys(size for _, size in shapes))
    return algorithm.matrix_preconditioner, sizes, working_dtype(x)


def batch_dtype(algorithm: Algorithm, x: Tensor, device_type: str) -> torch.dtype:
    """Return the dtype in which ``update`` writes a matrix into a batch."""
    cost = algorithm.matrix_preconditioner.cost.on(device_type)
    return cost.payload(working_dtype(x))


def portions(
    kinds: Sequence[Hashable],
    batches: Sequence[Hashable],
    compile: bool,
    is_local: bool,
) -> list[list[list[int]]]:
    """Return how a step over stacks is cut: portions, each a list of ``calls``. The
    temporaries of a portion are freed before the next.

    Where ranks exchange matrices, all stacks are one portion: ranks send all matrices
    at once, in buckets. In one process all matrices of a batch are a portion; without
    batches each call is a portion.

    Args:
        kinds: as in ``calls``.
        batches: a key that stacks share whose matrices are rows of one batch; None:
            of none.
        compile: whether the step is compiled.
        is_local: whether one process has everything.
    """
    cut = []
    for members in group_by(batches):
        own = calls([kinds[i] for i in members], compile)
        assigned = [[members[i] for i in call] for call in own]
        is_batch = batches[members[0]] is not None
        cut += [assigned] if is_batch else [[call] for call in assigned]
    return cut if is_local else [[call for portion in cut for call in portion]]
