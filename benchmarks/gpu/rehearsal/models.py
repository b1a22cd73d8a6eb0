"""Model code on a GPU that is not there, in three parts.

    python -m benchmarks.gpu.rehearsal.models [loop] [fsdp2] [memory] [--json FILE]

loop: the plain bf16 loop of research.compare, lowered to Triton source, with its
launches and what crosses between host and device. fsdp2: examples/fsdp2.py on one of
eight ranks, with its collectives. memory: the loop's memory on one GPU, counted as the
caching allocator counts, beside what train.plan forecasts. Needs Triton. Ends with code
1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import checks
from benchmarks.gpu.rehearsal import peak, pretraining, sharded_model
from marsopt.profiling.gpt2 import MODELS
from train.errors import UserError, check_least, command
from train.files import write_json

PARTS = ("loop", "fsdp2", "memory")
METHODS = ("mars-adamw-transport", "mars-adamw", "mars-m")


def arguments() -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.rehearsal.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("parts", nargs="*", metavar="PART", help=f"of {PARTS}; default: all of them")
    add("--methods", nargs="+", default=METHODS, metavar="NAME",
        help="as research.studies.published takes them (three of MARS)")
    add("--model", default="gpt2-small", choices=MODELS, help="of loop (%(default)s)")
    add("--memory-model", default="gpt2-xl", choices=MODELS, help="(%(default)s)")
    add("--micro-batches", type=int, nargs="+", default=[4, 16], metavar="NUM",
        help="sequences of one pass, of memory (4 16)")
    add("--eager", action="store_true", help="memory: do not compile the model")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    # fmt: on
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        raise UserError(f"got part {unknown[0]!r}, expected some of {PARTS}: name one")
    check_least(1, micro_batches=min(args.micro_batches))
    checks.outputs(args.json)
    return args


def rehearse(args: argparse.Namespace) -> dict[str, Any]:
    """Return what every part found, and print it."""
    found: dict[str, Any] = {}
    parts = args.parts or PARTS
    if "loop" in parts:
        shape = pretraining.shape_of(args.model)
        setting = pretraining.setting_of(shape, args.micro_batches[0], compile=True)
        found["loop"] = []
        print(f"plain loop of research.compare, {args.model}", flush=True)
        for each in args.methods:
            found["loop"].append(pretraining.rehearse(setting, each))
            print(pretraining.table(found["loop"][-1]), flush=True)
    if "fsdp2" in parts:
        found["fsdp2"] = [sharded_model.rehearse()]
        print("examples/fsdp2.py", sharded_model.table(found["fsdp2"][0]), sep=", ")
    if "memory" in parts:
        found["memory"] = memory(args)
        title = f"memory of {args.memory_model}, GiB"
        print(title, peak.table(found["memory"]), sep="\n")
    return found


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the memory of each method at each size of micro-batch."""
    shape, rows = pretraining.shape_of(args.memory_model), []
    for each in args.methods:
        for num in args.micro_batches:
            own = pretraining.setting_of(shape, num, compile=not args.eager)
            rows.append(peak.beside(peak.measure(own, each), args.memory_model))
    return rows


def main() -> None:
    """Run the command."""
    args = arguments()
    found = rehearse(args)
    if args.json is not None:
        write_json(args.json, found)
    problems = [p for part in found.values() for row in part for p in row["problems"]]
    if problems:
        print(f"{len(problems)} problems")
        sys.exit(1)


if __name__ == "__main__":
    command(main)
