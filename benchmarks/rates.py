"""What this machine does at best: a large copy, and large matrix products.

python -m benchmarks.rates [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks import checks
from marsopt.profiling.machine import copy_bandwidth, describe, matmul_rate, one_line
from train.errors import command


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
        copy_bandwidth=copy_bandwidth(args.device),
        matmul_rate={
            str(dtype).removeprefix("torch."): matmul_rate(args.device, dtype)
            for dtype in (torch.bfloat16, torch.float32)
        },
    )
    print(one_line(found["machine"]))
    print(f"copy {found['copy_bandwidth'] / 1e9:,.1f} GB/s, read and written")
    for dtype, rate in found["matmul_rate"].items():
        print(f"product in {dtype} {rate / 1e12:,.4g} TFLOP/s")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    command(main)
