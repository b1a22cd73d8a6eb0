"""Kernels compiled for sm_90 by Triton and ptxas, which ask no device: registers,
spills, and the width of every load and store of global memory in the machine code.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.gpu.rehearsal.device import WARP
from benchmarks.gpu.rehearsal.traffic import Access

WIDEST = 128  # bits that a thread loads or stores at once
# SASS: opcode, modifiers; .LTC128B and its like are hints about the cache, no width
INSTRUCTION = re.compile(r"\b(LDG|STG)((?:\.[A-Z0-9_]+)*)\s")
HINT = re.compile(r"\.LTC\d+B")
WIDTHS = {".128": 128, ".64": 64, ".U16": 16, ".S16": 16, ".U8": 8, ".S8": 8}
# of a reduction that has its whole row at once, in a block that is a power of two; the
# loops of a combo kernel have numbers
WHOLE_ROW = re.compile(
    r"r0_numel = (\d+)\n\s*R0_BLOCK(?:_(\d+))?: tl.constexpr = (\d+)"
)
BLOCK = re.compile(r"[A-Z0-9_]*BLOCK(?:_(\d+))?")


def widths_of(sass: str) -> Counter[tuple[str, int]]:
    """Count loads and stores of global memory in machine code, by opcode and bits."""
    found: Counter[tuple[str, int]] = Counter()
    for opcode, modifiers in INSTRUCTION.findall(sass):
        named = HINT.sub("", modifiers)
        bits = next((b for name, b in WIDTHS.items() if name in named), 32)
        found[opcode, bits] += 1
    return found


def wanted(
    accesses: Sequence[Access], elements: int, used: int
) -> Counter[tuple[str, int]]:
    """Count the full-size loads and stores of a thread, each as wide as can be.

    Args:
        accesses: of a launch.
        elements: of a block that a thread has.
        used: how many of them are there in the mean; fewer where a row does not fill
            its block.
    """
    found: Counter[tuple[str, int]] = Counter()
    for access in accesses:
        if access.full:
            bits = min(WIDEST, 8 * access.size * elements)
            opcode = "STG" if access.kind == "stored" else "LDG"
            found[opcode, bits] += max(1, 8 * access.size * used // bits)
    return found


def _blocks(sizes: Mapping[str, int], loop: int) -> Iterator[int]:
    """Yield the sizes of a loop's block, along each of its axes."""
    for name, size in sizes.items():
        found = BLOCK.fullmatch(name)
        if found and int(found[1] or 0) == loop:
            yield size


def _printed(tool: str, *args: str) -> str:
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    command = [folder / tool, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def binaries(
    name: str, source: str, accesses: Sequence[Access]
) -> Iterator[dict[str, Any]]:
    """Compile a kernel in each configuration that inductor would try; yield its
    registers, the bytes that it spills, and how many loads and stores are narrow.
    """
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tuner = getattr(PyCodeCache.load(source), name)
    rows = {
        int(loop or 0): (int(columns), int(block))
        for columns, loop, block in WHOLE_ROW.findall(source)
    }
    for config in tuner.configs:
        meta = tuner._create_compile_meta(config)
        code = ASTSource(
            tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]
        )
        options = tuner._create_compile_options(config, meta)
        target = GPUTarget("cuda", 90, WARP)
        kernel = triton.compile(code, target=target, options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = _printed("cuobjdump", "-res-usage", file.name)
            sass = _printed("nvdisasm", "-c", file.name)
        counts = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
        threads, wide = WARP * config.num_warps, Counter()
        for loop in {access.loop for access in accesses}:
            num = prod(_blocks(config.kwargs, loop))
            columns, block = rows.get(loop, (1, 1))
            wide += wanted(
                [access for access in accesses if access.loop == loop],
                max(1, num * block // threads),
                max(1, num * columns // threads),
            )
        yield dict(
            config=f"{config.kwargs}, {config.num_warps} warps",
            registers=int(counts["REG"]),
            spills=int(counts["STACK"]) + int(counts["LOCAL"]),
            full_size=wide.total(),
            narrow=(wide - widths_of(sass)).total(),
        )
