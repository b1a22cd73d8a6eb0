"""python -m train.evaluate: a trained model on tasks, and its held-out loss."""

import argparse
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from train.data.tokenizers import NATS_PER_BYTE, loss_unit
from train.data.tokens import open_tokens
from train.errors import UserError, check_least, command, shown
from train.evaluate import harness
from train.export import export
from train.files import check_writable, read_json, write_json
from train.gpt2.inference import whole_loss
from train.runs.trained import Trained, add_arguments, from_arguments


def _tasks(trained: Trained, tasks: dict, args: argparse.Namespace) -> dict:
    """Return the harness's results; a run is exported for it, for the moment."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = trained.folder
        if trained.step is not None:
            folder = Path(scratch) / "exported"
            export(trained, folder)
        options = dict(limit=args.limit, num_fewshot=args.num_fewshot)
        options |= dict(batch=args.batch_size, device=args.device)
        return harness.evaluate(folder, tasks, **options)


def _loss(trained: Trained, args: argparse.Namespace) -> dict:
    """Return the mean loss over all held-out tokens of --data, or of the run's."""
    block = trained.model.shape.block_size
    window = args.window or trained.window or block
    if window > block:
        raise UserError(
            f"got --window {window}, expected at most the model's {block}: lower it"
        )
    vocab_size = trained.model.shape.vocab_size
    data = args.data or trained.held_out
    if data is None:
        raise UserError(
            f"got --loss without --data, and {trained.folder} does not say where its "
            "data lies, expected the folder that train.prepare wrote: --data data/NAME"
        )
    tokens, meta = open_tokens(data, "val", vocab_size=vocab_size)
    if args.data is None and meta.val.sha256 != trained.data:
        raise UserError(
            f"got {data}, whose held-out text has changed since {trained.folder} was "
            "trained, expected the same text: name its folder by --data"
        )
    if trained.tokens not in (None, meta.tokenizer):
        raise UserError(
            f"got tokens by {meta.tokenizer} in {data}, expected {trained.tokens}, "
            "on which the model was trained: prepare the text with that tokenizer"
        )
    model = trained.model.to(args.device)
    found = whole_loss(model, tokens, window=window, batch=args.batch_size)
    loss: dict = dict(data=str(data), sha256=meta.val.sha256, tokens=found.tokens)
    loss |= dict(window=window, nats_per_token=found.nats_per_token)
    unit = loss_unit(meta.tokenizer)
    said = f"loss {found.nats_per_token:.5f} {unit}"
    scale = meta.nats_per_byte("val")
    if scale is not None:  # the bytes behind somebody else's tokens may not be known
        loss["nats_per_byte"] = per_byte = found.nats_per_token * scale
        loss["bits_per_byte"] = per_byte / math.log(2)
        if unit != NATS_PER_BYTE:  # else all but the same number
            said += f", {per_byte:.5f} {NATS_PER_BYTE}"
    print(f"{said}, over {found.tokens:,} tokens in windows of {window}")
    return loss


@dataclass(frozen=True)
class _Earlier:
    """What an earlier call wrote; of ``tasks`` each part is {task: value}."""

    model: str
    step: int | None
    loss: dict[str, Any] | None = None
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)


def _with_earlier(results: dict, path: Path) -> dict:
    """Return results with others that ``path`` holds of the same model and step."""
    try:
        earlier = read_json(path, _Earlier, "what train.evaluate wrote")
    except UserError:  # nothing, or something else
        return results
    if (earlier.model, earlier.step) != (results["model"], results["step"]):
        return results
    merged = {} if earlier.loss is None else {"loss": earlier.loss}
    merged |= results
    if tasks := results.get("tasks", earlier.tasks):
        merged["tasks"] = earlier.tasks | {
            part: earlier.tasks.get(part, {}) | values for part, values in tasks.items()
        }
    return merged


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def _arguments() -> argparse.Namespace:
    """Return the command line, checked."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser = argparse.ArgumentParser(
        "python -m train.evaluate",
        description="Evaluate a trained model: tasks of lm-evaluation-harness, and the "
        "loss over all held-out text.",
    )
    add_arguments(parser)
    add = parser.add_argument
    # fmt: off
    add("--tasks", type=_names, default=[],
        help="names separated by commas, e.g. hellaswag,arc_easy")
    add("--include-path", type=Path,
        help="a folder of your own task YAMLs; paths in them are relative to it")
    add("--limit", type=int, help="examples per task (default: all)")
    add("--num-fewshot", type=int, help="examples in the prompt (default: the task's)")
    add("--loss", action="store_true",
        help="the loss over all held-out text")
    add("--data", type=Path,
        help="the folder that train.prepare wrote (default: the run's)")
    add("--window", type=int,
        help="context length for --loss (default: the model's)")
    add("--batch-size", type=int, default=8)
    add("--device", default=devices[-1])
    add("--out", type=Path,
        help="file of results (default: evaluation.json in the model's folder); other "
        "results there stay, where they are of the same step")
    # fmt: on
    args = parser.parse_args()
    check_least(1, limit=args.limit, window=args.window, batch_size=args.batch_size)
    check_least(0, num_fewshot=args.num_fewshot)
    if args.device not in devices:
        raise UserError(
            f"got --device {args.device}, expected one of {devices} here: change it"
        )
    if not args.tasks and not args.loss:
        raise UserError(
            "got neither --tasks nor --loss, expected one or both: --tasks hellaswag, "
            "or --loss"
        )
    if args.loss and args.data is None and args.run is None:
        raise UserError(
            "got --loss without --data, expected the folder of train.prepare whose "
            "held-out text is meant: --data data/NAME"
        )
    return args


def main() -> None:
    """Run the command."""
    args = _arguments()
    trained = from_arguments(args)
    out = trained.folder / "evaluation.json" if args.out is None else args.out
    # what can be refused, before what takes hours
    out.parent.mkdir(parents=True, exist_ok=True)
    check_writable(out)
    found: dict = {"model": str(trained.folder), "step": trained.step}
    tasks = args.tasks and harness.load_tasks(args.tasks, args.include_path)
    if args.loss:
        found["loss"] = _loss(trained, args)
    if tasks:
        found["tasks"] = _tasks(trained, tasks, args)
        print(*map(shown, harness.lines(found["tasks"])), sep="\n", flush=True)
    write_json(out, _with_earlier(found, out))
    print(f"written to {out}")


if __name__ == "__main__":
    command(main)
