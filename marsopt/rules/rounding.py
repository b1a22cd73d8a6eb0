"""Stochastic rounding to bfloat16: up or down to a neighbour, with probabilities that
make it right on average, so that steps which are smaller than half a unit of the last
place are not lost (Croci et al., Stochastic rounding: implementation, error analysis
and applications, Royal Society Open Science 9, 2022).

The noise is a function of the step, of the place of a shard in its whole tensor, and of
an element's number in the shard: there is no generator. Replicas round to equal values,
and so does a step that is taken again; another sharding has other noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

NARROW = torch.bfloat16  # the dtype of rounded values
HALF = 0xFFFF  # the bits that bfloat16 lacks of a float32
WORD = 0xFFFF_FFFF
LARGEST = torch.finfo(NARROW).max
# The first 15 bits of the fractional parts of the roots of the first six primes, the
# last bit set. A 16-bit number times one of these is no overflow of int32, which C++
# does not define.
MULTIPLIERS = (0x3505, 0x5DB3, 0x1E37, 0x52A7, 0x2887, 0x4D83)
GOLDEN = 0x9E37_79B9  # 2^32 over the golden ratio, which tells pairs of buffers apart


def step_key(t: Tensor) -> Tensor:
    """Return a key in [0, 2^32), int64, for each step t = 1, 2, ... (N,).

    Two rounds of multiply and xorshift with constants of C. Wellons's hash-prospector
    ("16 21f0aaad 15 735a2d97 15"), in int64: no product overflows.
    """
    x = t.to(torch.int64) & WORD
    x = ((x ^ x >> 16) * 0x21F0_AAAD) & WORD
    x = ((x ^ x >> 15) * 0x735A_2D97) & WORD
    return x ^ x >> 15


def noise(index: Tensor, key: Tensor, number: int) -> Tensor:
    """Return uniform integers in [0, 2^16), int32.

    A Feistel network of six rounds permutes the 32 bits of ``index`` under ``key``; its
    halves are the noise of two buffers, which compiled code computes once. Fewer than
    five rounds leave neighbours correlated.

    Args:
        index: elements by their number in a shard, int32 or int64; noise repeats after
            2^32.
        key: as ``step_key`` makes it, broadcast over ``index``.
        number: of the buffer among its parameter's buffers.
    """
    pair, half = divmod(number, 2)
    key = key ^ (pair * GOLDEN & WORD)
    low, high = (key & HALF).to(torch.int32), (key >> 16).to(torch.int32)
    left = (index & HALF).to(torch.int32) ^ low
    right = (index >> 16 & HALF).to(torch.int32) ^ high
    for i, multiplier in enumerate(MULTIPLIERS):
        if 2 * i == len(MULTIPLIERS):  # else steps would have one noise, in other order
            left, right = left ^ high, right ^ low
        left, right = right ^ (left * multiplier >> 8 & HALF), left
    return (left, right)[half]


def stochastic(value: Tensor, noise: Tensor) -> Tensor:
    """Return ``value`` as bfloat16, its magnitude rounded up with the probability of
    the part that bfloat16 cuts off, as ``noise`` decides.

    A value that bfloat16 can hold stays, NaN and infinity too. A finite value beyond
    bfloat16's largest number becomes that number, not infinity. The derivative is the
    derivative of ``value``.

    Args:
        value: floating point; wider than float32, it is first rounded to that.
        noise: as ``noise`` makes it.
    """
    value = value.to(torch.float32)
    noise = torch.where(value.abs() < LARGEST, noise, 0)
    bits = value.view(torch.int32) + noise & ~HALF
    rounded = bits.view(torch.float32)
    # an integer has no derivative; the difference is exact
    rounded = torch.where(
        torch.isfinite(value), value + (rounded - value).detach(), value
    )
    return rounded.to(NARROW)
