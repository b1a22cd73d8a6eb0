"""Triton's interpreter, mended where it is wrong: generated kernels run on CPU tensors,
program after program, in NumPy. Bytes are counted where they move: by the lanes that a
mask lets through.

Triton reads TRITON_INTERPRET as it is imported, and torch's inductor imports Triton, so
that this module has to be imported before them; it sets the variable itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "got Triton imported already, expected it not to be: import "
        f"{__name__} first, or start with TRITON_INTERPRET=1"
    )
os.environ["TRITON_INTERPRET"] = "1"


@dataclass
class Traffic:
    """Bytes that kernels have moved; an address that several lanes of one access share
    counts once.
    """

    loaded: int = 0
    stored: int = 0

    @property
    def num_bytes(self) -> int:
        """Return those of loads and stores."""
        return self.loaded + self.stored


# ---- what is wrong with Triton's own -------------------------------------------------


# what generated kernels call of libdevice; arguments and result have one dtype
LIBDEVICE: dict[str, Callable] = {
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),  # of torch 2.14
    "sqrt": np.sqrt,
}


class Libdevice:
    """CUDA's libdevice in NumPy: functions of Triton's own module are declarations,
    which return None in the interpreter.
    """

    def __getattr__(self, name: str) -> Callable:
        if name not in LIBDEVICE:
            raise AttributeError(
                f"got libdevice.{name}, expected one of {tuple(LIBDEVICE)}: add its "
                "NumPy function there"
            )

        def call(*args: Any) -> Any:
            from triton.language import core
            from triton.runtime import interpreter

            data = LIBDEVICE[name](*(a.handle.data for a in args))
            # arguments have been broadcast, but for numbers
            like = next(a for a in args if a.handle.data.shape == data.shape)
            made = data.astype(interpreter._get_np_dtype(like.dtype))
            return core.tensor(interpreter.TensorHandle(made, like.dtype), like.type)

        return call


def rounding(cast: Callable) -> Callable:
    """Return the interpreter's ``cast``, which rounds float32 to the nearest bfloat16
    as a GPU does (PTX cvt.rn.bf16.f32); Triton's own cuts the lower bits off.
    """
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        x = torch.from_numpy(np.ascontiguousarray(source.data, dtype=np.float32))
        bits = x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(bits.reshape(source.data.shape), tl.bfloat16)

    return cast_impl


# ---- the interpreter -----------------------------------------------------------------


def _num_bytes(pointers: Any, mask: Any) -> int:
    from triton.runtime.interpreter import _get_np_dtype

    through = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
    size = np.dtype(_get_np_dtype(pointers.get_element_ty())).itemsize
    return size * len(np.unique(through))


@contextlib.contextmanager
def interpreter() -> Iterator[Traffic]:
    """Let Triton's interpreter be right within; yield what kernels move."""
    from torch._inductor.runtime import triton_helpers
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    traffic = Traffic()
    load, store = Builder.create_masked_load, Builder.create_masked_store

    def counted_load(self, pointers, mask, *rest):
        traffic.loaded += _num_bytes(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self, pointers, value, mask, *rest):
        traffic.stored += _num_bytes(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(Builder, "create_masked_load", counted_load),
        mock.patch.object(Builder, "create_masked_store", counted_store),
        mock.patch.object(Builder, "cast_impl", rounding(Builder.cast_impl)),
        mock.patch.object(triton_helpers, "libdevice", Libdevice()),
    ):
        yield traffic


def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
    """Run a ``lowering.Kernel`` on CPU tensors, in the first of the configurations that
    inductor would try.
    """
    from torch._inductor.codecache import PyCodeCache

    tuner = getattr(PyCodeCache.load(kernel.source), kernel.name)
    with np.errstate(all="ignore"):  # as on a GPU, infinities and NaNs are numbers
        tuner.run(*args, stream=0, **kwargs)
