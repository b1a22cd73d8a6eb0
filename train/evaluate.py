"""python -m train.evaluate: a trained model on named tasks, and its whole held-out
loss.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path

import torch

from train import harness
from train.errors import UserError, command
from train.export import export
from train.tokens import open_tokens
from train.trained import Trained, add_arguments, from_arguments
from train.validation import whole_loss


def _tasks(trained: Trained, tasks: harness.Tasks, args: argparse.Namespace) -> dict:
    """The harness's results; a run is exported first, into a folder for the moment."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = trained.folder
        if trained.step is not None:
            folder = Path(scratch) / "exported"
            export(trained, folder)
        return harness.evaluate(
            folder,
            tasks,
            limit=args.limit,
            num_fewshot=args.num_fewshot,
            batch=args.batch_size,
            device=args.device,
        )


def _loss(trained: Trained, args: argparse.Namespace) -> dict[str, float | int | str]:
    """The mean loss over all held-out tokens of --data."""
    block = trained.model.shape.block_size
    window = args.window or trained.window or block
    if window > block:
        raise UserError(
            f"got --window {window}, expected at most the model's block size {block}: "
            "change it"
        )
    tokens, meta = open_tokens(
        args.data, "val", vocab_size=trained.model.shape.vocab_size
    )
    if trained.tokens not in (None, meta.tokenizer):
        raise UserError(
            f"got {meta.tokenizer} tokens in {args.data}, expected {trained.tokens}, "
            "on which the model was trained: prepare the text with that tokenizer"
        )
    found = whole_loss(
        trained.model.to(args.device), tokens, window=window, batch=args.batch_size
    )
    loss: dict[str, float | int | str] = {
        "data": str(args.data),
        "sha256": meta.val.sha256,
        "tokens": found.tokens,
        "window": window,
        "nats_per_token": found.nats_per_token,
    }
    said = f"loss {found.nats_per_token:.5f} nats per token"
    scale = meta.nats_per_byte("val")
    if scale is not None:  # the bytes behind somebody else's tokens may not be known
        loss["nats_per_byte"] = per_byte = found.nats_per_token * scale
        loss["bits_per_byte"] = per_byte / math.log(2)
        said += f", {loss['bits_per_byte']:.5f} bits per byte"
    print(f"{said}, over {found.tokens:,} tokens in windows of {window}")
    return loss


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.evaluate",
        description="Evaluate a trained model: tasks of lm-evaluation-harness, and the "
        "loss over all held-out text.",
    )
    add_arguments(parser)
    parser.add_argument(
        "--tasks",
        type=_names,
        default=[],
        help="names with commas between, e.g. hellaswag,arc_easy",
    )
    parser.add_argument(
        "--include-path",
        type=Path,
        help="a folder of task YAMLs of one's own; files that they name count from it",
    )
    parser.add_argument("--limit", type=int, help="examples per task (default: all)")
    parser.add_argument("--num-fewshot", type=int, help="default: as the task says")
    parser.add_argument(
        "--loss", action="store_true", help="the loss over all held-out text of --data"
    )
    parser.add_argument("--data", type=Path, help="a folder of train.prepare")
    parser.add_argument(
        "--window",
        type=int,
        help="tokens seen together, for --loss (default: as trained)",
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--out", type=Path, help="default: evaluation.json in the model's folder"
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    least_of = {"limit": 1, "window": 1, "batch_size": 1, "num_fewshot": 0}
    for name, least in least_of.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(
                f"got --{name.replace('_', '-')} {value}, expected a number of at "
                f"least {least}: change it"
            )
    known = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if args.device not in known:
        raise UserError(
            f"got --device {args.device}, expected one of {known} on this machine: "
            "change it"
        )
    if not args.tasks and not args.loss:
        raise UserError(
            "got neither --tasks nor --loss, expected one or both: --tasks hellaswag, "
            "or --loss --data data/NAME"
        )
    if args.loss and args.data is None:
        raise UserError(
            "got --loss without --data, expected the folder of train.prepare whose "
            "held-out text is meant: --data data/NAME"
        )


def _check_writable(out: Path) -> None:
    """Before hours of evaluation."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UserError(
            f"got {out} to write to, expected a file that can be written: choose "
            "another --out"
        )


def main() -> None:
    """The command."""
    args = _parser().parse_args()
    _check(args)
    trained = from_arguments(args)
    out = trained.folder / "evaluation.json" if args.out is None else args.out
    _check_writable(out)
    found: dict = {"model": str(trained.folder), "step": trained.step}
    tasks = None
    if args.tasks:  # before anything that takes long
        tasks = harness.load_tasks(args.tasks, args.include_path)
    if args.loss:
        found["loss"] = _loss(trained, args)
    if tasks is not None:
        found["tasks"] = _tasks(trained, tasks, args)
    out.write_text(json.dumps(found, indent=1) + "\n")
    if tasks is not None:
        print(*harness.lines(found["tasks"]), sep="\n")
    print(f"written to {out}")


if __name__ == "__main__":
    command(main)
