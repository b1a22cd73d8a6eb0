"""What this machine does at best: large tensors read, copied, and updated as an
optimizer's step does it; large matrix products.

python -m benchmarks.rates [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import checks
from marsopt.profiling.machine import (
    COPY_BYTES,
    copy_bandwidth,
    describe,
    matmul_rate,
    one_line,
    typical,
)
from train.errors import command


def read_bandwidth(device: str) -> float:
    """Return the bytes a second of reading alone: the norm of a large tensor."""
    x = torch.ones(COPY_BYTES[device] // 4, device=device)
    return x.nbytes / typical(lambda: torch.linalg.vector_norm(x))


def update(g: Tensor, m: Tensor, v: Tensor, x: Tensor) -> None:
    """Read one tensor, and read and write three: the least that AdamW's step moves,
    with hardly any arithmetic.
    """
    m.lerp_(g, 0.1)
    v.lerp_(g.square(), 0.1)
    x.sub_(m)


def update_bandwidth(device: str) -> float:
    """Return the bytes a second of ``update``, compiled to one pass."""
    size = COPY_BYTES[device] // 4
    tensors = [torch.randn(size, device=device) for _ in range(4)]
    compiled = torch.compile(update, fullgraph=True, dynamic=False)
    compiled(*tensors)
    return 7 * tensors[0].nbytes / typical(lambda: compiled(*tensors))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    checks.outputs(args.json)
    checks.device(args.device)
    found = dict(
        machine=describe(args.device),
        read_bandwidth=read_bandwidth(args.device),
        copy_bandwidth=copy_bandwidth(args.device),
        update_bandwidth=update_bandwidth(args.device),
        matmul_rate={
            str(dtype).removeprefix("torch."): matmul_rate(args.device, dtype)
            for dtype in (torch.bfloat16, torch.float32)
        },
    )
    print(one_line(found["machine"]))
    print(f"read {found['read_bandwidth'] / 1e9:,.1f} GB/s")
    print(f"copy {found['copy_bandwidth'] / 1e9:,.1f} GB/s, read and written")
    print(
        f"update {found['update_bandwidth'] / 1e9:,.1f} GB/s: one tensor read, three "
        "read and written"
    )
    for dtype, rate in found["matmul_rate"].items():
        print(f"product in {dtype} {rate / 1e12:,.4g} TFLOP/s")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    command(main)
