"""What of a measured step is not as it was meant to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# by which bytes may differ from the floor: sums of rows, written and read, are the most
EXACT = 2e-3
# of the 65536 of an H100's processor: 12 warps of 32 threads then run at once
MOST_REGISTERS = 168


def faults(row: dict[str, Any]) -> Iterator[str]:
    """Yield each fault of a case, as ``measure.to_dict`` makes it."""
    moved, floor = row["loaded"] + row["stored"], row["floor"]
    if abs(moved / floor - 1) > EXACT:
        yield f"{moved:.2f} bytes a parameter, floor {floor:.2f}"
    if row["num_recompiled"]:
        yield f"{row['num_recompiled']} recompiles while numbers moved"
    for kernel in row["kernels"]:
        what = f"{kernel['graph']}: {kernel['name']}"
        if kernel["divides"]:
            yield f"{what} divides for every element"
        for binary in kernel.get("binaries", ()):
            compiled = f"{what} with {binary['config']}"
            if binary["spills"]:
                yield f"{compiled} spills {binary['spills']} bytes"
            if binary["registers"] > MOST_REGISTERS:
                yield f"{compiled} has {binary['registers']} registers"
            if binary["narrow"]:
                yield f"{compiled} lacks {binary['narrow']} wide loads or stores"
