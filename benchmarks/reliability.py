"""What it costs a run that its checkpoints have checksums, and that all ranks hear of a
SIGTERM.

    torchrun --nproc-per-node 2 -m benchmarks.reliability [--megabytes 512]

A step is a product of matrices of the size given and the all-reduce of a gradient over
gloo. Blocks of steps with and without the vote of every rank take turns; then steps run
beside a thread that hashes, and alone. Medians, ratios of the same run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.timing import spread, take_turns
from marsopt.profiling.machine import describe, one_line
from train.engine.ends import Vote
from train.runs import checksums

BLOCK = 20  # steps timed together


def write_file(path: Path, megabytes: int) -> float:
    """Write random bytes to the disk; return the seconds that it took."""
    raw = torch.randint(256, (megabytes << 20,), dtype=torch.uint8).numpy()
    began = perf_counter()
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.reliability", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=768)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    leads = dist.get_rank() == 0
    a = torch.randn(args.width, args.width)
    grad, vote = torch.randn(1 << 18), Vote()

    def block(votes: bool) -> float:
        """Return the seconds of a step; the vote goes on beside the next."""
        began = perf_counter()
        for _ in range(BLOCK):
            for _ in range(8):
                a @ a
            dist.all_reduce(grad)
            if votes:
                vote.take(False)
        return (perf_counter() - began) / BLOCK

    both = {"alone": partial(block, False), "vote": partial(block, True)}
    times = take_turns(both, args.steps // BLOCK)
    found = {name: spread(taken).median for name, taken in times.items()}
    if leads:
        print(one_line(describe("cpu")))
        print(
            f"a step {1e3 * found['alone']:.2f} ms, with the vote "
            f"{1e3 * found['vote']:.2f} ms: {found['vote'] / found['alone']:.4f}"
        )
        hash_one(args)
    dist.barrier()
    dist.destroy_process_group()


def hash_one(args: argparse.Namespace) -> None:
    """Hash a file as a run does after a checkpoint, alone and beside steps."""
    a = torch.randn(args.width, args.width)

    def steps() -> float:
        began = perf_counter()
        for _ in range(5):
            a @ a
        return perf_counter() - began

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        written = write_file(folder / "__0_0.distcp", args.megabytes)
        began = perf_counter()
        checksums.write(folder)
        hashed = perf_counter() - began
        alone = [steps() for _ in range(40)]
        beside: list[float] = []
        busy = threading.Thread(target=checksums.write, args=[folder])
        busy.start()
        while busy.is_alive():
            beside.append(steps())
    size = args.megabytes / 1024
    print(
        f"{size:.2f} GiB written in {written:.2f} s, hashed in {hashed:.2f} s: "
        f"{size / hashed:.2f} GiB/s; steps beside the hashing thread take "
        f"{spread(beside).median / spread(alone).median:.3f} of steps alone, for as "
        "long as it lasts"
    )


if __name__ == "__main__":
    main()
