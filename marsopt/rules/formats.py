"""How values are stored in fewer bits: float32 weights as bfloat16 parameters and the
bits below these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from marsopt.rules.numerics import HALF, working

LOW_BITS = "low_bits"  # the symbol, and the key in the state
# by ``master_weight_bits``: the bits of a weight that bfloat16 lacks, and a sign
LOW_DTYPES = {32: torch.int16, 24: torch.int8}
CUT = 0xFF  # the bits of a float32 that 24 bits lack
MAGNITUDE = 0x7FFF_FFFF
NAN = 0x7FC0_0000
# the largest number of 24 bits; a larger finite float32 is cut to it
LARGEST = (2 - 2**-15) * 2.0**127


def joined(x: Tensor, low: Tensor | None) -> Tensor:
    """Return the weight of a parameter, in float32.

    Args:
        x: the parameter; bfloat16, if there are ``low`` bits.
        low: as ``split`` makes them; None: the parameter is the weight.
    """
    if low is None:
        return working(x)
    shift = 8 * (2 - low.dtype.itemsize)
    high, low = x.view(torch.int16).to(torch.int32) << 16, low.to(torch.int32) << shift
    # a caller may have set an element to 0, from which a negative number would borrow
    low = torch.where(high & MAGNITUDE == 0, low.clamp(min=0), low)
    return (high + low).view(torch.float32)


def split(weight: Tensor, bits: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a weight as a parameter and the bits below it.

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
        value = value + torch.where(weight.abs() < LARGEST, noise >> 8, 0) & ~CUT
    high = value + (HALF + 1 >> 1) >> 16
    low = value - (high << 16) >> 8 * (2 - LOW_DTYPES[bits].itemsize)
    return high.to(torch.int16).view(torch.bfloat16), low.to(LOW_DTYPES[bits])
