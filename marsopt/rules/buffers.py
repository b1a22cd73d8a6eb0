"""The buffers that a component keeps for each parameter: shape, start value, home."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from marsopt.rules.matrices import Matrices

Shape = Callable[[torch.Size, Matrices], torch.Size]


def like_x(shape: torch.Size, matrices: Matrices) -> torch.Size:
    """Return the shape of the parameter, or of the matrix, itself."""
    return shape


class Buffer(NamedTuple):
    """A tensor that the state keeps for each parameter.

    Args:
        key: its name in ``optimizer.state[p]``, as in torch.optim if that has the
            buffer. No two components share a key, but for tensors that mean the same.
        shape: with home "owner", its shape from (rows, cols) of one whole matrix.
        start: its value before the first step: zeros, or an identity matrix.
        home: "shard": beside each piece of the parameter, in its shape. "owner": on the
            rank that holds whole matrices, (number of matrices owned here, *shape);
            flat, matrix after matrix, if the matrices of a parameter have several
            shapes.
        dtype: "state": the ``state_dtype`` of the algorithm, or the parameter's own,
            float32 for float16 (with home "owner" the wider of both);
            "gradient": the same, unless the correction's ``h_dtype`` says otherwise;
            "working": the parameter's own or float32, whichever is wider; or a dtype.
        is_debiased: whether the rule divides it by 1 - beta^t: it starts with t.
    """

    key: str
    shape: Shape = like_x
    start: Literal["zeros", "identity"] = "zeros"
    home: Literal["shard", "owner"] = "shard"
    dtype: torch.dtype | Literal["state", "gradient", "working"] = "state"
    is_debiased: bool = False


def owned_shapes(
    matrices: Matrices, shape: torch.Size, buffer: Buffer
) -> list[torch.Size]:
    """Return the shapes of an owner's ``buffer`` of the matrices in a tensor of this
    shape: of those in one batch (rows, cols).
    """
    return [buffer.shape(size, matrices) for size in matrices.part_shapes(shape)]


def owned_parts(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of these shapes of an owner's buffer of matrices that have several
    shapes: it is flat, matrix after matrix.
    """
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
