"""Launches printed kernels over parts of tensors: one launch for a formula, over tables
on the device that hold the parts' sizes, blocks and addresses.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.step.printer import BLOCK, CHUNK, NARROW, NUM_WARPS, Printed

RING = 4  # host buffers: a step fills one while the copies of earlier steps wait


def available(device: torch.device) -> bool:
    """Whether Triton runs on ``device``: a recent GPU; a CPU, if TRITON_INTERPRET=1."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


class Blocks:
    """The blocks of a formula's parts: their sizes, and their elements' numbers, in
    tables on the device that never change.

    Args:
        sizes: elements of each of P parts.
        device: device of the parts.
        positions: (P, 3), base, run and stride of each part, run at least 1: its
            element i has the number base + i // run * stride + i % run in the whole
            unsharded tensor.
            None: each part is a whole tensor.
        block: elements of a program, a power of two.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        *,
        positions: Sequence[tuple[int, int, int]] | Tensor | None = None,
        block: int = BLOCK,
    ) -> None:
        if positions is None:
            positions = [(0, max(size, 1), 0) for size in sizes]
        numbers = torch.tensor(sizes, dtype=torch.int64)
        counts = (numbers + block - 1) // block
        parts = torch.repeat_interleave(counts)
        firsts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        blocks = torch.arange(len(parts)) - firsts[parts]
        self.num_parts, self.num_blocks = len(numbers), len(parts)
        self.num_elements = sum(sizes)
        self.block, self.device = block, device
        self.sizes = numbers.to(device)  # (P,)
        by_part = torch.as_tensor(positions, dtype=torch.int64).view(-1, 3)
        self.positions = by_part.mT.contiguous().to(device)  # (3, P)
        self.parts = parts.to(device, torch.int32)  # (num_blocks,)
        self.blocks = blocks.to(device, torch.int32)  # (num_blocks,), inside its part
        self.firsts = firsts.to(device, torch.int32)  # (P + 1,) blocks before each part


class AddressTable:
    """The address of every operand in every part, on the device.

    Args:
        operands: dtypes of K operands.
        tensors: of each of P parts, the position of its tensor among N.
        offsets: elements from the start of an operand's tensor to each part, (P,) or,
            if operands differ, (K, P).
        device: device of the parts.
    """

    def __init__(
        self,
        operands: Sequence[torch.dtype],
        tensors: Sequence[int],
        offsets: Tensor,
        device: torch.device,
    ) -> None:
        itemsizes = torch.tensor([[dtype.itemsize] for dtype in operands])
        self._tensors = torch.tensor(tensors, dtype=torch.int64)
        self._offsets = itemsizes * offsets  # (K, P) bytes
        self._table = torch.empty_like(self._offsets, device=device)
        self._device, self._is_cuda = device, device.type == "cuda"
        self._sent: list[list[int]] | None = None
        self._ring: list[_HostBuffer] = []
        # made before a capture, which may not allocate pinned memory
        self._spare: _HostBuffer | None = self._host_buffer()
        self._captured: list[tuple[_HostBuffer, Tensor]] = []
        self.num_copies = 0  # to the device, but for captured ones

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
            self._spare = self._spare or self._host_buffer()
            if addresses != self._sent:
                self._send(addresses)
        return self._table

    def _capture(self, addresses: Sequence[Sequence[int]]) -> Tensor:
        buffer, self._spare = self._spare or self._host_buffer(), None
        table = torch.empty_like(self._table)
        self._captured.append((buffer, table))
        self._fill(buffer.tensor, addresses)
        return table.copy_(buffer.tensor, non_blocking=True)

    def _send(self, addresses: Sequence[Sequence[int]]) -> None:
        if len(self._ring) < RING:
            self._ring.append(self._host_buffer())
        buffer = self._ring[self.num_copies % RING]
        if buffer.copied is not None:
            buffer.copied.synchronize()
        self._fill(buffer.tensor, addresses)
        self._table.copy_(buffer.tensor, non_blocking=True)
        if buffer.copied is not None:
            buffer.copied.record()
        self._sent = [list(row) for row in addresses]
        self.num_copies += 1

    def _fill(self, table: Tensor, addresses: Sequence[Sequence[int]]) -> None:
        of_tensors = torch.tensor(addresses, dtype=torch.int64)
        starts = of_tensors.index_select(1, self._tensors)
        torch.where(starts == 0, starts, starts + self._offsets, out=table)

    def _host_buffer(self) -> _HostBuffer:
        table = torch.empty_like(self._offsets, pin_memory=self._is_cuda)
        return _HostBuffer(table, torch.cuda.Event() if self._is_cuda else None)


class _HostBuffer(NamedTuple):
    """Memory on the host that is copied to the device, pinned if that is a GPU."""

    tensor: Tensor  # (K, P) int64
    copied: torch.cuda.Event | None  # after the last copy from it


# ---- launches ------------------------------------------------------------------------


class Kernel:
    """A printed formula, compiled by Triton at its first launch.

    Args:
        printed: its source.
    """

    def __init__(self, printed: Printed) -> None:
        self.printed = printed
        self.num_launches = 0  # since it was made; a capture counts once
        self._module = load(printed.source)

    @property
    def source(self) -> str:
        """The Triton source."""
        return self.printed.source

    def bytes_read(self, parts: Blocks) -> int:
        """Bytes of operands that a launch over ``parts`` loads, if all parts move."""
        return self.printed.bytes_read * parts.num_elements

    def bytes_written(self, parts: Blocks) -> int:
        """Bytes of operands that a launch over ``parts`` stores, if all parts move."""
        return self.printed.bytes_written * parts.num_elements

    def _launch_blocks(self, parts: Blocks, addresses: Tensor, *args: Tensor) -> None:
        """Launch a program for each block of ``parts``."""
        printed, num_parts = self.printed, parts.num_parts
        assert addresses.shape == (len(printed.operands), num_parts)
        self._launch(
            getattr(self._module, printed.name),
            parts.num_blocks,
            addresses,
            parts.sizes,
            *args,
            num_parts,
            BLOCK=parts.block,
            WIDE=min(printed.wide, parts.block),
            NARROW=min(NARROW, parts.block),
            num_warps=NUM_WARPS,
        )

    def _launch(
        self, function: Any, num: int, *args: Tensor | int, **sizes: int
    ) -> None:
        if num:
            function[(num,)](*args, **sizes)
            self.num_launches += 1


class UpdateKernel(Kernel):
    """Stores the new values of a formula's operands: see ``printer.print_update``."""

    def __call__(
        self, parts: Blocks, addresses: Tensor, ok: Tensor, scalars: Tensor
    ) -> None:
        """Update the parts that move, in one launch on the current stream.

        Args:
            parts: P of them.
            addresses: (K, P) int64, as ``AddressTable.on_device`` returns them.
            ok: (P,) bool: which parts move. Operands of parts that stay are not read.
            scalars: (P, S), contiguous, in the printed dtype.
        """
        printed, num_parts = self.printed, parts.num_parts
        assert ok.shape == (num_parts,) and ok.dtype == torch.bool
        assert scalars.shape == (num_parts, printed.num_columns)
        assert scalars.dtype == printed.column_dtype
        assert ok.is_contiguous() and scalars.is_contiguous()
        with device_guard(parts.device):
            blocks = parts.parts, parts.blocks
            self._launch_blocks(parts, addresses, parts.positions, *blocks, ok, scalars)


class SumsKernel(Kernel):
    """Sums the terms of a formula over each part: see ``printer.print_sums``."""

    def __call__(self, parts: Blocks, addresses: Tensor) -> Tensor:
        """Return the sums, (P, num_terms) float64, by two launches on the current
        stream. Equal inputs give equal bits.

        Args:
            parts: P of them.
            addresses: (K, P) int64, as ``AddressTable.on_device`` returns them.
        """
        printed, num_parts = self.printed, parts.num_parts
        options: Any = dict(dtype=torch.float64, device=parts.device)
        partials = torch.empty(parts.num_blocks, printed.num_terms, **options)
        totals = torch.empty(num_parts, printed.num_terms, **options)
        with device_guard(parts.device):
            self._launch_blocks(parts, addresses, parts.parts, parts.blocks, partials)
            self._launch(
                getattr(self._module, f"{printed.name}_totals"),
                num_parts,
                *(partials, parts.firsts, totals),
                CHUNK=CHUNK,
            )
        return totals


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which ``device`` is the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def load(source: str) -> ModuleType:
    """Import Triton source from a file, where Triton looks for the text of a function:
    in inductor's cache, by the hash of the source.
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
