"""A trained model from either place: a run's checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from train import huggingface, run, settings, tokenizer_files
from train.errors import UserError
from train.gpt2 import GPT2
from train.tokenizers import Tokenizer, tokenizer


@dataclass(frozen=True)
class Trained:
    """``window`` is the length of the sequences it was trained on, ``step`` None for a
    Hugging Face folder; the tokenizer is made when called.
    """

    model: GPT2
    tokenizer: Callable[[], Tokenizer]
    folder: Path
    window: int
    step: int | None = None


def of_run(folder: Path, step: int | None) -> Trained:
    """The model of the newest checkpoint of a run, or of that of ``step``.

    Raises:
        UserError: no run, no such checkpoint, a partial one, or one of another model.
    """
    shape, name = settings.describe(folder)
    step = int(run.checkpoint(folder, step).name.removeprefix("step-"))
    model = run.load_model(folder, shape, step)
    window = settings.read(folder / settings.SETTINGS)["training.seq_len"]
    return Trained(model, partial(tokenizer, name), folder, window, step)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--run RUN [--step N], or --model FOLDER."""
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument(
        "--run", type=Path, help="a run's folder, e.g. runs/tiny_mars_adamw"
    )
    either.add_argument(
        "--model", type=Path, help="a Hugging Face folder, e.g. of train.export"
    )
    parser.add_argument(
        "--step", type=int, help="of the run's checkpoint (default: the newest)"
    )


def from_arguments(args: argparse.Namespace) -> Trained:
    """What ``add_arguments`` asked for.

    Raises:
        UserError: as ``of_run``; a folder that is not a GPT-2 of ours.
    """
    if args.run is not None:
        return of_run(args.run, args.step)
    if args.step is not None:
        raise UserError(
            f"got --step {args.step} with --model, expected it with --run: a Hugging "
            "Face folder holds one model; leave it out"
        )
    model = huggingface.load(args.model)
    coder = partial(tokenizer_files.FromFolder, args.model)
    return Trained(model, coder, args.model, model.shape.block_size)
