"""Numerics of a step: working dtypes, decays of averages (numbers, or with ``log_time``
decays that grow with the run, arXiv 2602.05298), and stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")  # each has an autocast of its own

Function = TypeVar("Function", bound=Callable[..., Any])


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32 for half precision, else its own."""
    return torch.promote_types(tensor.dtype, torch.float32)


def working(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in its working dtype."""
    return tensor.to(working_dtype(tensor))


def nonzero(eps: float | Tensor) -> float | Tensor:
    """Return ``eps``, and for 0 a number so small that it changes no sum with a root of
    float32 but 0: then 0 / (sqrt(0) + eps) is 0, and not NaN.
    """
    smallest = 1e-30
    return eps.clamp(min=smallest) if isinstance(eps, Tensor) else max(eps, smallest)


def root(squares: Tensor) -> Tensor:
    """Return the square root of the squares, each at least the least normal number. So
    the derivative is finite at 0, and a step may divide by the root.
    """
    return squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()


def default_state_dtype(
    dtype: torch.dtype, master_weight_bits: int | None
) -> torch.dtype:
    """Return the default dtype of state for parameters of ``dtype``: float32 for
    float16, since there squares of small gradients are zero and squares of large
    gradients infinite, and for master weights; else ``dtype``.
    """
    is_wide = dtype == torch.float16 or master_weight_bits is not None
    return torch.float32 if is_wide else dtype


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Scalars are float64, since 1 - beta^t cancels; some GPUs have none."""
    return torch.float64 if _has_float64(device) else torch.float32


def _has_float64(device: torch.device) -> bool:
    """Whether a device has float64: Apple's have none, nor have Intel's Arc cards."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_capability(device)["has_fp64"])
    return device.type != "mps"


# torch.compiler.assume_constant_result does only this, but imports Dynamo
_has_float64._dynamo_marked_constant = True  # type: ignore[attr-defined]


def without_autocast(function: Function) -> Function:
    """Return ``function`` with autocast off on every device: it computes in the dtypes
    of its tensors. If autocast is off already, nothing is entered.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for device_type in DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                # the cache is a guard of compiled graphs, even where autocast is off
                off = torch.autocast(device_type, enabled=False, cache_enabled=True)
                with off:
                    return call(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, call)


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute products of float32 in float32: TF32 or bf16 would lose digits that
    eigenvectors need.
    """
    if torch.compiler.is_compiling():  # which has no such region
        yield
        return
    # torch documents mkldnn.matmul, but gives it no type
    kinds = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    for kind in kinds:
        kind.fp32_precision = "ieee"
    try:
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


# The values of ``log_time`` if its user gives neither betas nor ``nesterov``: caps that
# a run of some thousand steps does not reach, and the weight of the gradient.
LOG_TIME_BETA, LOG_TIME_NESTEROV = 0.999, 0.2


def at(beta: Any, t: Tensor, log_time: Any) -> Any:
    """Return the decay in steps t = 1, 2, ... (N,): min(beta, t / (t + log_time)), and
    ``beta`` itself if ``log_time`` is None.

    Example:
        >>> t = torch.tensor([1.0, 10.0, 990.0, 1e6])
        >>> at(0.999, t, log_time=10.0)
        tensor([0.0909, 0.5000, 0.9900, 0.9990])
    """
    if log_time is None:
        return beta
    t, beta, log_time = _alike(t, beta, log_time)
    return torch.minimum(t / (t + log_time), beta)


def complement(beta: Any, t: Tensor, log_time: Any) -> Any:
    """Return 1 minus the decay in steps t, with the digits that a difference loses."""
    if log_time is None:
        return 1 - beta
    t, beta, log_time = _alike(t, beta, log_time)
    return torch.maximum(log_time / (t + log_time), 1 - beta)


def product(beta: Any, t: Tensor, log_time: Any) -> Any:
    """Return the product of the first t decays: beta^t if ``log_time`` is None.

    The first s decays grow, s = floor(beta log_time / (1 - beta)), and later decays are
    beta. With L = log_time the product is

        Gamma(s+1) Gamma(1+L) / Gamma(s+1+L) * beta^(t-s)
    """
    if log_time is None:
        return beta**t
    t, beta, log_time = _alike(t, beta, log_time)
    growing = torch.minimum(t, torch.floor(beta * log_time / (1 - beta)))
    log = torch.lgamma(growing + 1) - torch.lgamma(growing + 1 + log_time)
    log = log + torch.lgamma(1 + log_time)
    return (log + torch.special.xlogy(t - growing, beta)).exp()


def _alike(t: Tensor, beta: Any, log_time: Any) -> tuple[Tensor, Tensor, Tensor]:
    zero = torch.zeros_like(t)
    return t, zero + beta, zero + log_time


NARROW = torch.bfloat16  # the dtype of rounded values
HALF = 0xFFFF  # the bits that bfloat16 lacks of a float32
WORD = 0xFFFF_FFFF
LARGEST_NARROW = torch.finfo(NARROW).max
# The first 15 bits of the fractional parts of the roots of the first six primes, the
# last bit set. A 16-bit number times one of these is no overflow of int32, which C++
# does not define.
MULTIPLIERS = (0x3505, 0x5DB3, 0x1E37, 0x52A7, 0x2887, 0x4D83)
GOLDEN = 0x9E37_79B9  # 2^32 over the golden ratio, which tells pairs of buffers apart


Whole = TypeVar("Whole", int, Tensor)


def hashed(x: Whole) -> Whole:
    """Return a number in [0, 2^32) for each whole number; tensors are int64.

    Two rounds of multiply and xorshift with constants of C. Wellons's hash-prospector
    ("16 21f0aaad 15 735a2d97 15"): no product overflows int64.
    """
    x = x & WORD
    x = ((x ^ x >> 16) * 0x21F0_AAAD) & WORD
    x = ((x ^ x >> 15) * 0x735A_2D97) & WORD
    return x ^ x >> 15


def step_key(t: Tensor, seeds: Tensor) -> Tensor:
    """Return the key of the noise of each part, int64, (P,).

    Args:
        t: steps 1, 2, ... (P,).
        seeds: of the parts, int64, in [0, 2^32). They are hashed already: seed a in
            step b shares no noise with seed b in step a.
    """
    return hashed(t.to(torch.int64) ^ seeds)


def noise(index: Tensor, key: Tensor, number: int) -> Tensor:
    """Return uniform integers in [0, 2^16), int32.

    A Feistel network of six rounds permutes the 32 bits of ``index`` under ``key``; its
    halves are the noise of two buffers, which compiled code computes once. Fewer than
    five rounds leave neighbours correlated.

    Args:
        index: elements by their number in a part, int32 or int64; noise repeats after
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
    noise = torch.where(value.abs() < LARGEST_NARROW, noise, 0)
    bits = value.view(torch.int32) + noise & ~HALF
    rounded = bits.view(torch.float32)
    # an integer has no derivative; the difference is exact
    rounded = torch.where(
        torch.isfinite(value), value + (rounded - value).detach(), value
    )
    return rounded.to(NARROW)
