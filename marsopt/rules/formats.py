"""How values are stored in fewer bits: float32 weights as bfloat16 parameters and the
bits below these; averages as codes of 8 bits, with a scale for 64 neighbours in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from marsopt.rules.numerics import HALF, NARROW, working

Value = TypeVar("Value")

# the symbols, and the keys in the state, of 8 bits of a weight: below the 16 of a
# bfloat16, with a sign, and below these; no backend of torch.distributed sends 16 bits
LOW_BITS = ("low_bits", "lowest_bits")
LOW_DTYPE = torch.int8
NEAREST = 1 << 15  # half of the last of 16 bits, which rounds the rest to nearest
CUT = 0xFF  # the bits of a float32 that 24 bits lack
MAGNITUDE = 0x7FFF_FFFF
NAN = 0x7FC0_0000
# the largest number of 24 bits; a larger finite float32 is cut to it
LARGEST_24 = (2 - 2**-15) * 2.0**127


def low_symbols(master_weight_bits: int | None) -> tuple[str, ...]:
    """Return the symbols of the tensors that hold a weight's bits below bfloat16."""
    return LOW_BITS[: ((master_weight_bits or 16) - 16) // 8]


def low_bits(tensors: Mapping[str, Value]) -> list[Value]:
    """Return the tensors that hold a weight's bits below bfloat16, if there are any."""
    return [tensors[symbol] for symbol in LOW_BITS if symbol in tensors]


def joined(x: Tensor, low: Sequence[Tensor]) -> Tensor:
    """Return the weight of a parameter, in float32.

    Args:
        x: the parameter; bfloat16, if there are ``low`` bits.
        low: as ``split`` makes them; none: the parameter is the weight.

    Raises:
        ValueError: the parameter is no longer bfloat16.
    """
    if not low:
        return working(x)
    if x.dtype != NARROW:
        raise ValueError(
            f"got a parameter of {x.dtype} with the bits below bfloat16 in the state, "
            "expected bfloat16: take master_weights() before the model changes its "
            "dtype, and build another optimizer after that"
        )
    high, rest = x.view(torch.int16).to(torch.int32) << 16, low[0].to(torch.int32) << 8
    for last in low[1:]:
        rest = rest | last.to(torch.int32) & CUT
    # a caller may have set an element to 0, from which a negative number would borrow
    rest = torch.where(high & MAGNITUDE == 0, rest.clamp(min=0), rest)
    return (high + rest).view(torch.float32)


def split(weight: Tensor, bits: int, noise: Tensor | None) -> list[Tensor]:
    """Return a weight as a parameter and the bits below it, 8 in each tensor.

    The parameter is the nearest bfloat16; of two equally near, the larger in size, so
    that 16 bits hold the remainder.

    Args:
        weight: wider than float32, it is first rounded to that.
        bits: 32 keeps the weight as it is. 24 rounds its magnitude up with the
            probability of the part that 24 bits cut off, as ``noise`` decides.
        noise: uniform integers in [0, 2^16), of 24 bits.
    """
    weight = weight.to(torch.float32)
    # the carry of a NaN with other bits would make a number
    value = torch.where(weight == weight, weight.view(torch.int32), NAN)
    if noise is not None:
        value = value + torch.where(weight.abs() < LARGEST_24, noise >> 8, 0) & ~CUT
    high = value + NEAREST >> 16
    rest = value - (high << 16)
    low = [rest >> 8, rest << 24 >> 24][: len(low_symbols(bits))]
    x = high.to(torch.int16).view(torch.bfloat16)
    return [x, *(eight.to(LOW_DTYPE) for eight in low)]


# ---- averages ------------------------------------------------------------------------

CODED = torch.int8  # the dtype of codes
SPAN = 64  # neighbours in a row that share a scale
SMALLEST = 4096  # elements of a tensor with codes: of a smaller one they save nothing
SCALE = "_scale"  # ends the symbols and keys of scales
SCALE_DTYPE = torch.bfloat16  # the range of float32
TOP, ROOT_TOP = 127, 255  # the largest codes: of numbers with a sign, and of squares
MIDDLE = 128  # the code of a square that int8 holds as 0
HEADROOM = 1 + 2**-16  # of a scale: a quotient that rounding makes larger is below 1
LEAST = 2.0**-100  # of a scale: its reciprocal is finite


def span_of(name: str) -> int:
    """Return how many elements share a value of the tensor of this symbol."""
    return SPAN if name.endswith(SCALE) else 1


def takes_codes(x: Tensor, shape: torch.Size) -> bool:
    """Return whether averages of a tensor are stored as codes. A vector's are not: a
    mesh cuts it anywhere.

    Args:
        x: the tensor, or several of this shape in one.
        shape: of the whole tensor.
    """
    is_large = len(shape) > 1 and shape.numel() >= SMALLEST
    return is_large and shape[-1] % SPAN == 0 and x.is_contiguous()


def scales_shape(shape: torch.Size) -> torch.Size:
    """Return the shape of the scales of a tensor."""
    return torch.Size([*shape[:-1], shape[-1] // SPAN])


def check_piece(piece: Tensor, label: str) -> None:
    """Check that a mesh cuts no row of a tensor with codes between elements that share
    a scale.

    Raises:
        ValueError: it does.
    """
    cols = piece.shape[-1]
    if cols % SPAN or not (cols and piece.is_contiguous()):
        raise ValueError(
            f"got a piece of shape {tuple(piece.shape)} and strides {piece.stride()} "
            f"of {label} with state_dtype=torch.int8, expected contiguous rows of a "
            f"multiple of {SPAN} columns, which share a scale: cut it by rows, or by "
            "fewer ranks, or leave out state_dtype"
        )


def decode(codes: Tensor, scales: Tensor, are_squares: bool) -> Tensor:
    """Return the values (P, n), in float32.

    Args:
        codes: int8, (P, n).
        scales: of each ``SPAN`` elements, (P, n / SPAN).
        are_squares: whether the values are averages of squares.
    """
    code = codes.unflatten(1, (-1, SPAN)).to(torch.float32)
    scale = scales.to(torch.float32).unsqueeze(2)
    if are_squares:
        root = (code + MIDDLE) * (scale * (1 / ROOT_TOP))
        value: Tensor = root * root
    else:
        value = code / (2 * TOP - code.abs()) * scale
    return value.flatten(1)


def encode(value: Tensor, noise: Tensor, are_squares: bool) -> tuple[Tensor, Tensor]:
    """Return values as codes, and their scales.

    Numbers have codes k from -127 to 127, with x = scale k / (254 - |k|): steps near 0
    are half as wide as equal steps, for an update divides small averages by small roots
    (softsign, as flashoptim companders momentum, arXiv 2602.23349). Squares have k from
    0 to 255, with x = (scale k / 255)^2. Code k becomes k + 1 with the probability that
    makes x right on average, as ``noise`` decides. No square but 0 has k = 0, for a
    step divides by its root.

    Args:
        value: (P, n), finite.
        noise: uniform integers in [0, 2^16), (P, n).
        are_squares: whether the values are averages of squares.
    """
    value = value.to(torch.float32).unflatten(1, (-1, SPAN))
    size = value.sqrt() if are_squares else value.abs()
    bits = (size.amax(2) * HEADROOM).view(torch.int32) + HALF & ~HALF
    scale = bits.view(torch.float32)  # rounded up: no code is above the largest
    is_any = scale >= LEAST
    inverse = is_any / torch.where(is_any, scale, 1.0)
    part = size * inverse.unsqueeze(2)
    place = ROOT_TOP * part if are_squares else 2 * TOP * part / (1 + part)
    k = place.to(torch.int32).to(torch.float32)
    if are_squares:
        share = (place * place - k * k) / (2 * k + 1)
    else:
        left = 2 * TOP - k
        share = (part * left - k) * (left - 1) * (1 / (2 * TOP))
    is_up = noise.unflatten(1, (-1, SPAN)) + 0.5 < share * (HALF + 1)
    k = k + is_up
    if are_squares:
        k = torch.where(part > 0, k.clamp(min=1), k) - MIDDLE * is_any.unsqueeze(2)
    else:
        k = k * torch.sign(value)
    codes = k.to(torch.int32).to(CODED).flatten(1)
    return codes, (scale * is_any).to(SCALE_DTYPE)
