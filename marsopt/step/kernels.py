"""Launches printed kernels over parts of tensors: one launch for a formula, over tables
on the device that hold the parts' sizes, blocks and addresses.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from operator import call
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.step.decide import Decision, Inputs, Scalars
from marsopt.step.printer import BLOCK, CHUNK, OPTIONS, ROWS, Printed

PROBE = """\
# marsopt: whether Triton builds kernels
import triton


@triton.jit
def probe(number):
    pass
"""


def available(device: torch.device) -> bool:
    """Whether Triton runs on ``device``: a recent GPU; a CPU, if TRITON_INTERPRET=1."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cpu" or is_interpreted():
        return device.type == "cpu" and is_interpreted()
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def is_interpreted() -> bool:
    """Whether Triton interprets kernels, which then read the host's memory."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_built(device: torch.device) -> str | None:
    """Launch a kernel that does nothing, and return why that fails, or None. Triton
    needs a C compiler, a folder for its cache, and a GPU that its assembler knows.
    """
    try:
        with device_guard(device):
            load(PROBE).probe[(1,)](0, **OPTIONS)
    except Exception as error:  # of subprocesses, files, Triton, the driver
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


class Blocks:
    """The blocks of a group's parts, in tables on the device that never change.

    Args:
        sizes: elements of each of P parts.
        device: device of the parts.
        block: elements of a program, a power of two.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        *,
        block: int = BLOCK,
    ) -> None:
        numbers = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        self.block, self.device, self.num_parts = block, device, len(numbers)
        self._numbers = numbers
        self.sizes = numbers.to(device)  # (P,)
        self._choose(torch.arange(len(numbers), device="cpu"))

    def of(self, parts: Sequence[int]) -> Blocks:
        """Return the blocks of some of the parts."""
        chosen = copy.copy(self)
        chosen._choose(torch.tensor(parts, dtype=torch.int64, device="cpu"))
        return chosen

    def _choose(self, chosen: Tensor) -> None:
        numbers = self._numbers[chosen]
        counts = (numbers + self.block - 1) // self.block
        parts = torch.repeat_interleave(counts)
        firsts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        blocks = torch.arange(len(parts), device="cpu") - firsts[parts]
        self.num_blocks, self.num_elements = len(parts), int(numbers.sum())
        # (num_blocks,), and where in its part each block is
        self.parts = chosen[parts].to(self.device, torch.int32)
        self.blocks = blocks.to(self.device, torch.int32)
        # (len(chosen) + 1,) blocks before each part
        self.firsts = firsts.to(self.device, torch.int32)


class Tables(NamedTuple):
    """The addresses of operands on the device, which ``AddressTable`` sends."""

    fixed: Tensor  # (K, P) of the operands that stay where they are
    grads: Tensor  # (1, P)
    matrices: Tensor  # (1, P) of o


class AddressTable:
    """The address of every operand in every part, on the device.

    Args:
        operands: dtypes of K operands.
        tensors: of each of P parts, the position of its tensor among N.
        offsets: (P,) elements from the start of each part's tensor to the part.
        device: device of the parts.
        spans: of each operand, the elements that share a value of it; (): 1 of all.
    """

    def __init__(
        self,
        operands: Sequence[torch.dtype],
        tensors: Sequence[int],
        offsets: Tensor,
        device: torch.device,
        spans: Sequence[int] = (),
    ) -> None:
        itemsizes = torch.tensor([[dtype.itemsize] for dtype in operands], device="cpu")
        self._tensors = torch.tensor(tensors, dtype=torch.int64, device="cpu")
        shares = torch.tensor(spans or [1] * len(operands), device="cpu")[:, None]
        self._offsets = itemsizes * (offsets // shares)  # (K, P) bytes
        self._table = torch.empty_like(self._offsets, device=device)
        self._device, self._is_cuda = device, device.type == "cuda"
        self._sent: list[list[int]] | None = None
        # made before a capture, which may not allocate pinned memory
        self._spare: Tensor | None = self._host_table()
        self._captured: list[tuple[Tensor, Tensor]] = []

    def on_device(self, addresses: Sequence[Sequence[int]]) -> Tensor:
        """Return the table, (K, P) int64, for kernels that follow on this stream.

        Only changed addresses are sent, by one asynchronous copy from pinned memory. A
        call under a CUDA graph's capture returns a table of the graph's own, which no
        later call writes.

        Args:
            addresses: of each operand, the address of each of N tensors; 0 means that
                the tensor lacks this operand, which then reads as zeros.
        """
        with device_guard(self._device):
            if self._is_cuda and torch.cuda.is_current_stream_capturing():
                return self._capture(addresses)
            if self._spare is None:
                self._spare = self._host_table()
            if addresses != self._sent:
                # torch keeps pinned memory until copies from it have ended
                self._send(self._host_table(), addresses, self._table)
                self._sent = [list(row) for row in addresses]
        return self._table

    def _capture(self, addresses: Sequence[Sequence[int]]) -> Tensor:
        host = self._host_table() if self._spare is None else self._spare
        table, self._spare = torch.empty_like(self._table), None
        self._captured.append((host, table))
        return self._send(host, addresses, table)

    def _send(
        self, host: Tensor, addresses: Sequence[Sequence[int]], table: Tensor
    ) -> Tensor:
        """Copy addresses into a table on the device, by way of a table on the host."""
        of_tensors = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        starts = of_tensors.index_select(1, self._tensors)
        torch.where(starts == 0, starts, starts + self._offsets, out=host)
        return table.copy_(host, non_blocking=True)

    def _host_table(self) -> Tensor:
        return torch.empty_like(self._offsets, pin_memory=self._is_cuda)


# ---- launches ------------------------------------------------------------------------

# dtypes of the kernels' arguments, but for "scalars"; Triton takes num_parts as it is
ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("addresses", "grads", "matrices", "sizes"), torch.int64),
    **dict.fromkeys(("parts", "blocks", "firsts"), torch.int32),
    **dict.fromkeys(("partials", "totals"), torch.float64),
    "moves": torch.bool,
    "num_parts": 1,
}


class Kernel:
    """A printed formula, compiled by Triton at its first launch, or by ``build``.

    Args:
        printed: its source.
    """

    def __init__(self, printed: Printed) -> None:
        self.printed, module = printed, load(printed.source)
        names = [printed.name, *[f"{printed.name}_totals"][: printed.num_terms]]
        self.functions = [getattr(module, name) for name in names]

    def sizes(self, block: int) -> dict[str, int]:
        """Return the constants of a launch over blocks of this size."""
        wide, narrow = (
            min(size, block) for size in (self.printed.wide, self.printed.narrow)
        )
        return dict(BLOCK=block, WIDE=wide, NARROW=narrow)

    def compile(self, function: Any, device: torch.device) -> None:
        """Compile one of the functions for a device, without a launch."""
        sizes = self.sizes(BLOCK) | dict(CHUNK=CHUNK)
        sizes = {name: sizes[name] for name in function.arg_names if name in sizes}
        types = ARGUMENTS | {"scalars": self.printed.column_dtype}
        args = [types[name] for name in function.arg_names if name not in sizes]
        with device_guard(device):
            function.warmup(*args, grid=(1,), **sizes, **OPTIONS)

    def _launch_blocks(self, parts: Blocks, *args: Tensor) -> None:
        """Launch a program for each block of ``parts``."""
        sizes = self.sizes(parts.block)
        function, num_parts = self.functions[0], parts.num_parts
        self._launch(function, parts.num_blocks, *args, num_parts, **sizes)

    def _launch(
        self, function: Any, num: int, *args: Tensor | int, **sizes: int
    ) -> None:
        if num:
            function[(num,)](*args, **sizes, **OPTIONS)


class UpdateKernel(Kernel):
    """Stores the new values of a formula's operands: see ``printer.print_update``."""

    def __call__(
        self, parts: Blocks, tables: Tables, ok: Tensor, scalars: Tensor
    ) -> None:
        """Update the parts that move, in one launch on the current stream.

        Args:
            parts: all P parts, or some of them.
            tables: addresses of all P parts.
            ok: (P,) bool: which parts move. Operands of parts that stay are not read.
            scalars: (P, S), contiguous, in the printed dtype.
        """
        printed, num_parts = self.printed, parts.num_parts
        assert ok.shape == (num_parts,) and ok.dtype == torch.bool
        assert scalars.shape == (num_parts, printed.num_columns)
        assert scalars.dtype == printed.column_dtype
        assert ok.is_contiguous() and scalars.is_contiguous()
        places = parts.sizes, parts.parts, parts.blocks
        with device_guard(parts.device):
            self._launch_blocks(parts, *tables, *places, ok, scalars)


class SumsKernel(Kernel):
    """Sums the terms of a formula over each part: see ``printer.print_sums``."""

    def __call__(self, parts: Blocks, fixed: Tensor, grads: Tensor) -> Tensor:
        """Return the sums, (P, num_terms) float64, by two launches on the current
        stream. Equal inputs give equal bits.

        Args:
            parts: P of them.
            fixed, grads: as ``Tables`` has them.
        """
        printed, num_parts = self.printed, parts.num_parts
        options: Any = dict(dtype=torch.float64, device=parts.device)
        partials = torch.empty(parts.num_blocks, printed.num_terms, **options)
        totals = torch.empty(num_parts, printed.num_terms, **options)
        with device_guard(parts.device):
            places = parts.sizes, parts.parts, parts.blocks
            self._launch_blocks(parts, fixed, grads, *places, partials)
            args = partials, parts.firsts, totals
            self._launch(self.functions[1], num_parts, *args, CHUNK=CHUNK)
        return totals


class DecisionKernel(Kernel):
    """Makes the decision of a step: see ``printer.print_decision``.

    Args:
        printed: its source.
        num_columns: scalars of a part of each formula.
    """

    def __init__(self, printed: Printed, num_columns: Sequence[int]) -> None:
        super().__init__(printed)
        self._num_columns = num_columns

    def __call__(
        self,
        inputs: Sequence[Inputs],
        sums: Tensor,
        max_norm: Tensor | None,
        products: Sequence[Tensor] = (),
        has_grad: Tensor | None = None,
    ) -> Decision:
        """Return the decision, by one launch on the current stream.

        Args:
            inputs: of every formula.
            sums: complete; with ``products`` they are written.
            max_norm: as ``decide_alone`` has it.
            products, has_grad: as ``decide_alone`` has them, if one process has
                everything.
        """
        device, sizes = sums.device, [len(i.t) for i in inputs]
        norm = torch.empty((), dtype=sums.dtype, device=device)
        finite, skipped = torch.empty(2, dtype=torch.bool, device=device).unbind()
        args = [has_grad, sums, max_norm, norm, finite, skipped]
        decision = Decision(norm, finite, skipped, [], [], [])
        for number, (i, num) in enumerate(zip(inputs, self._num_columns, strict=True)):
            t, ok = torch.empty_like(i.t), torch.empty_like(i.t, dtype=torch.bool)
            scalars = Scalars(ok, sums.new_empty(len(ok), num, dtype=i.dtype))
            args += [*products[number : number + 1], i.numbers, i.group_of_norm, i.t]
            args += [i.rows.scales, i.rows.seeds, t, *scalars]
            decision.t.append(t)
            decision.ok.append(ok)
            decision.scalars.append(scalars)
        tables = [x for x in args if x is not None]
        with device_guard(device):
            self._launch(self.functions[0], 1, *tables, *sizes, ROWS=ROWS)
        return decision


def build(kernels: Sequence[Kernel], device: torch.device) -> None:
    """Compile kernels in threads: Triton's compiler releases Python's lock. The first
    kernel loads LLVM, which each thread would else do for itself.
    """
    calls = [partial(k.compile, f, device) for k in kernels for f in k.functions]
    for compile_first in calls[:1]:
        compile_first()
    with ThreadPoolExecutor() as pool:
        list(pool.map(call, calls[1:]))


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes ``device`` the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def load(source: str) -> ModuleType:
    """Import Triton source from a file, since Triton reads a function's text there. The
    file lies in inductor's cache, named by the hash of the source.
    """
    name = f"marsopt_{hashlib.sha256(source.encode()).hexdigest()[:32]}"
    path = _folder() / f"{name}.py"
    if not path.exists() or path.read_text() != source:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            file.write(source)
        os.replace(file.name, path)  # ranks write at the same time
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "marsopt"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
