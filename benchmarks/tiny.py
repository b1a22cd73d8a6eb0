"""What studies of tiny GPT-2s share: sizes on their command lines, how runs go, and a
file of what was run, by which a call that was ended is continued.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import checks
from benchmarks.pretrain.loop import Plan
from train.errors import UserError, check_least
from train.gpt2 import Shape

NUM_HEADS, VOCAB_SIZE = 4, 257
FLOOR = 0.1  # of the learning rate, as configs.tiny has it
SIZES = {
    "layers": "of the model",
    "width": "the same",
    "seq_len": "tokens of a sequence",
    "steps": "of a run",
    "batch": "sequences a step",
    "held_out": "sequences",
}


def add_sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add --data, an option for each of ``SIZES``, and --seeds, to a command line."""
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/python"), metavar="FOLDER")
    for name, told in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        default = defaults[name]
        add(option, type=int, default=default, help=f"{told} (%(default)s)")
    add("--seeds", type=int, default=3, help="(%(default)s)")


def sizes(args: argparse.Namespace, files: Sequence[Path]) -> dict[str, int]:
    """Return the sizes, checked with all that ``add_sizes`` has added.

    Raises:
        UserError: one is too small, or files that cannot be written.
    """
    found = {name: getattr(args, name) for name in SIZES}
    check_least(1, **found)
    check_least(2, seeds=args.seeds)
    if args.width % NUM_HEADS:
        raise UserError(
            f"got --width {args.width}, expected a multiple of {NUM_HEADS}, the number "
            "of heads: change it"
        )
    checks.outputs(*files)
    return found


def plan(
    args: argparse.Namespace, seed: int, *, steps: int, warmup: int, compile: bool
) -> Plan:
    """Return how runs of a seed go."""
    return Plan(
        shape=Shape(
            args.layers, NUM_HEADS, args.width, args.seq_len, VOCAB_SIZE, False
        ),
        seq_len=args.seq_len,
        batch=args.batch,
        micro_batch=args.batch,
        steps=steps,
        warmup=warmup,
        floor=FLOOR,
        held_out=args.held_out,
        interval=steps,
        seed=seed,
        device="cpu",
        dtype="float32",
        compile=compile,
    )


def known(path: Path, about: Mapping[str, Any], **empty: Any) -> dict[str, Any]:
    """Return what a file has of runs that these options are about; of none that is
    there, what is ``empty``.

    Raises:
        UserError: it is of runs with other options.
    """
    if not path.exists():
        return dict(about=about, **empty)
    found = json.loads(path.read_bytes())
    if found["about"] != about:
        raise UserError(
            f"got {path} of {found['about']}, expected {about}: give the same "
            "options, or another --json"
        )
    return found


def spread(values: Sequence[float], sign: str = "") -> str:
    """Return mean and standard deviation."""
    return f"{statistics.mean(values):{sign}.4f} ± {statistics.stdev(values):.4f}"
