"""The precision of a step."""

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


def default_state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the default dtype of state for parameters of ``dtype``: float32 for
    float16, since there squares of small gradients are zero and squares of large
    gradients infinite; else ``dtype``.
    """
    return torch.float32 if dtype == torch.float16 else dtype


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
