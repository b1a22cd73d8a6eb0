"""Buffers of parameters as they start, for both doors, and checks of parameters that no
rule can update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marsopt.rules.component import Algorithm, Buffer, owned_parts, owned_shapes
from marsopt.rules.formats import CODED
from marsopt.rules.numerics import NARROW, default_state_dtype
from marsopt.step.owners import Collectives, MatrixParam


def start_beside(algorithm: Algorithm, buffer: Buffer, x: Tensor) -> Tensor:
    """Return a buffer at home in shards as it starts beside a piece ``x``: with its
    strides, if it has its shape.
    """
    dtype, shape = algorithm.dtype_of(buffer, x), buffer_shape(algorithm, buffer, x)
    if shape != x.shape:
        return x.new_zeros(shape, dtype=dtype)
    return torch.zeros_like(x, dtype=dtype)


def buffer_shape(algorithm: Algorithm, buffer: Buffer, x: Tensor) -> torch.Size:
    """Return the shape of a buffer at home in shards, beside ``x`` or a piece."""
    return buffer.shape(x.shape, algorithm.matrices)


def owned_leaves(algorithm: Algorithm, params: Sequence[Tensor]) -> list[MatrixParam]:
    """Return parameters as the owners of their matrices ask for them."""
    asks = algorithm.matrices, algorithm.matrix_preconditioner
    return [MatrixParam(p, *asks) for p in params]


def owned_starts(
    algorithm: Algorithm,
    buffer: Buffer,
    params: Sequence[Tensor],
    collectives: Collectives,
) -> list[Tensor]:
    """Return a buffer at home with owners as it starts, (number here, *shape) for each
    of the parameters, which have to be all that share the exchange.
    """
    owns = collectives.owns(owned_leaves(algorithm, params))
    return [
        start_at_owner(algorithm, buffer, p, o)
        for p, o in zip(params, owns, strict=True)
    ]


def start_at_owner(
    algorithm: Algorithm, buffer: Buffer, p: Tensor, owns: tuple[int, ...]
) -> Tensor:
    """Return the start of an owner's buffer, of a parameter's matrices that have their
    owner here.
    """
    kwargs: dict[str, Any] = dict(dtype=algorithm.dtype_of(buffer, p), device=p.device)
    shapes = owned_shapes(algorithm.matrices, p.shape, buffer)
    if algorithm.matrices.is_even(p.shape):
        num, shape = len(owns), shapes[0]
        if buffer.start == "identity":
            identity = torch.eye(shape[-1], **kwargs)
            return identity.expand(num, *shape).clone()
        return torch.zeros(num, *shape, **kwargs)
    sizes = [shapes[number % len(shapes)] for number in owns]
    start = torch.zeros(sum(size.numel() for size in sizes), **kwargs)
    if buffer.start == "identity":
        for part in owned_parts(start, sizes):
            part.fill_diagonal_(1)
    return start


def entries_at_owner(
    algorithm: Algorithm, buffer: Buffer, shape: torch.Size
) -> tuple[int, ...]:
    """Return how many entries along its first dim an owner's buffer has of each matrix
    of a tensor of this shape.
    """
    matrices = algorithm.matrices
    num = matrices.num_in(shape)
    if matrices.is_even(shape):
        return (1,) * num
    sizes = [size.numel() for size in owned_shapes(matrices, shape, buffer)]
    return (*sizes,) * (num // len(sizes))


# ---- parameters that no rule can update ----------------------------------------------


def check_like(x: Tensor, g: Tensor, label: str) -> None:
    """Raise ValueError if ``g`` cannot be the gradient of ``x``."""
    if g.shape != x.shape or g.dtype != x.dtype:
        raise ValueError(
            f"got {label} of shape {tuple(g.shape)} and dtype {g.dtype}, expected "
            f"{tuple(x.shape)} and {x.dtype}: "
            "compute it from the parameter itself, and cast it if it was reduced in "
            "another precision"
        )
    if g.layout != torch.strided:
        raise ValueError(
            f"got {label} of layout {g.layout}, expected torch.strided: make it dense "
            "(nn.Embedding(sparse=False))"
        )


def check_unflattened(x: Tensor, label: str) -> None:
    """Raise ValueError if ``x`` is FSDP1's: a rank's shard of flattened parameters. No
    rule finds a matrix in it, and its norm is the shard's.
    """
    if hasattr(x, "_fsdp_flattened"):  # on all that FSDP1 has flattened
        raise ValueError(
            f"got {label}, which FSDP1 (FullyShardedDataParallel) has flattened, "
            "expected a whole parameter or a DTensor: shard the model by FSDP2 "
            "(fully_shard) and pass collectives=MeshCollectives(mesh), or use "
            "DistributedDataParallel"
        )


def check_overlap(labelled: Sequence[tuple[Tensor, str]]) -> None:
    """Raise ValueError if two parameters share memory: each would update it.

    Parameters that are not contiguous (columns of one matrix) are not checked.
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for p, label in labelled:
        if p.numel() and p.is_contiguous() and p.device.type != "meta":
            start = int(p.storage_offset()) * p.itemsize
            storage = p.untyped_storage()._cdata
            spans.setdefault(storage, []).append((start, start + p.nbytes, label))
    for intervals in spans.values():
        intervals.sort()
        for (_, end, label), (start, _, other) in zip(
            intervals, intervals[1:], strict=False
        ):
            if start < end:
                raise ValueError(
                    f"got {label} and {other} in the same memory, expected parameters "
                    "of their own: tie weights by using one Parameter twice, as "
                    "GPT-2's head and embedding do"
                )


def check_parameter(
    x: Tensor,
    label: str,
    state_dtype: torch.dtype | None = None,
    stochastic_rounding: bool = False,
    master_weight_bits: int | None = None,
) -> None:
    """Raise ValueError if no rule can update ``x``."""
    check_unflattened(x, label)
    if not x.is_floating_point():
        raise ValueError(
            f"got {label} of dtype {x.dtype}, expected a real floating point type: "
            "leave it out, or optimize torch.view_as_real of a complex tensor"
        )
    if x.dtype.itemsize < 2:  # float8, float4: torch has no arithmetic of theirs
        raise ValueError(
            f"got {label} of dtype {x.dtype}, expected a floating point type of 16 "
            "bits or more: optimize the wider tensor, and quantize it in the forward "
            "pass"
        )
    if x.layout != torch.strided:
        raise ValueError(
            f"got {label} of layout {x.layout}, expected torch.strided: make it dense"
        )
    if master_weight_bits is not None and x.dtype != NARROW:
        raise ValueError(
            f"got master_weight_bits={master_weight_bits} for {label} of {x.dtype}, "
            "expected bfloat16: convert the model (model.bfloat16()), or leave the "
            "option out"
        )
    buffer_dtype = state_dtype or default_state_dtype(x.dtype, master_weight_bits)
    may_be_narrow = stochastic_rounding and buffer_dtype == NARROW
    may_be_narrow = may_be_narrow or buffer_dtype == CODED
    if torch.promote_types(buffer_dtype, x.dtype) != buffer_dtype and not may_be_narrow:
        raise ValueError(
            f"got state_dtype={state_dtype} for {label} of {x.dtype}, expected nothing "
            "narrower than the parameter, where small steps would be rounded away: "
            "leave it out, narrow only h (h_dtype), or pass torch.int8, or "
            "torch.bfloat16 with stochastic_rounding=True"
        )
