"""Kernels compiled for sm_90 by Triton and ptxas, which ask no device: registers,
spills, and the width of every load and store of global memory in the machine code.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from benchmarks.gpu.rehearsal.traffic import Access

LOAD, STORE = "LDG", "STG"
WIDEST = 128  # bits that a thread loads or stores at once
WARP = 32
# SASS: opcode, modifiers; .LTC128B and its like are hints about the cache, no width
INSTRUCTION = re.compile(rf"\b({LOAD}|{STORE})((?:\.[A-Z0-9_]+)*)\s")
HINT = re.compile(r"\.LTC\d+B")
WIDTHS = {".128": 128, ".64": 64, ".U16": 16, ".S16": 16, ".U8": 8, ".S8": 8}

Widths = dict[tuple[str, int], int]  # {(LDG or STG, bits): how many in the code}


@dataclass(frozen=True)
class Binary:
    """One kernel in one of the configurations that inductor tries.

    Args:
        config: block sizes and warps.
        elements: of a block that one thread has.
        used: of these, in the mean; fewer where a row does not fill its block.
        registers: of a thread.
        spills: bytes of local memory of a thread.
        widths: loads and stores of global memory.
    """

    config: str
    elements: int
    used: int
    registers: int
    spills: int
    widths: Widths

    def missing(self, accesses: Sequence[Access]) -> Counter:
        """Return the full-size loads and stores that are narrower than this block
        allows: how many of the wide ones are not there.
        """
        return self.wanted(accesses) - Counter(self.widths)

    def wanted(self, accesses: Sequence[Access]) -> Counter:
        """Return the full-size loads and stores of a thread, each as wide as can be."""
        found: Counter = Counter()
        for access in accesses:
            if access.full:
                bits = min(WIDEST, 8 * access.size * self.elements)
                num = max(1, 8 * access.size * self.used // bits)
                found[STORE if access.is_store else LOAD, bits] += num
        return found


@cache
def tools() -> Path:
    """Return the folder of the CUDA tools that come with Triton."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _printed(tool: str, *args: str) -> str:
    command = [tools() / tool, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def widths_of(sass: str) -> Widths:
    """Return the loads and stores of global memory in machine code, by width."""
    found: Counter = Counter()
    for opcode, modifiers in INSTRUCTION.findall(sass):
        named = HINT.sub("", modifiers)
        bits = next((b for name, b in WIDTHS.items() if name in named), 32)
        found[opcode, bits] += 1
    return dict(found)


# of a reduction that has its whole row at once, in a block that is a power of two
WHOLE_ROW = re.compile(r"r0_numel = (\d+)\n\s*R0_BLOCK: tl.constexpr = (\d+)")


def compiled(name: str, source: str) -> Iterator[Binary]:
    """Yield the binary of a kernel in each configuration that inductor would try."""
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tuner = getattr(PyCodeCache.load(source), name)
    row = WHOLE_ROW.search(source)
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
        columns, block = (int(row[1]), int(row[2])) if row else (1, 1)
        sizes, threads = [*config.kwargs.values()], WARP * config.num_warps
        shape = " x ".join(map(str, [*sizes, block] if row else sizes))
        yield Binary(
            config=f"{shape}, {config.num_warps} warps",
            elements=max(1, prod(sizes) * block // threads),
            used=max(1, prod(sizes) * columns // threads),
            registers=int(counts["REG"]),
            spills=int(counts["STACK"]) + int(counts["LOCAL"]),
            widths=widths_of(sass),
        )
