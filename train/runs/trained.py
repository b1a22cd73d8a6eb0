"""A trained model from either place: a run's checkpoint, or a Hugging Face folder."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from train.data import tokenizer_files
from train.data.tokenizers import Tokenizer, tokenizer
from train.errors import UserError
from train.files import read_json
from train.gpt2 import GPT2, huggingface
from train.runs import checkpoints, settings

STEP_HELP = "step of the checkpoint to load (default: the newest)"


@dataclass(frozen=True)
class Trained:
    """Model and tokenizer, made when asked for: what is asked of a Hugging Face folder
    may need neither.

    ``step`` is of a run's checkpoint, None for a Hugging Face folder; ``window`` the
    length of the sequences it was trained on, None where that is the block size;
    ``tokens`` the name of the tokenizer they came from, None where that has none;
    ``held_out`` where the run's data lay, None where that is not known, and ``data``
    the checksum of what it held out.
    """

    load: Callable[[], GPT2]
    tokenizer: Callable[[], Tokenizer]
    folder: Path
    step: int | None = None
    window: int | None = None
    tokens: str | None = None
    held_out: Path | None = None
    data: str = ""

    @cached_property
    def model(self) -> GPT2:
        """Return the model in evaluation mode, on the CPU at first."""
        return self.load()


def of_run(folder: Path, step: int | None) -> Trained:
    """Return the model of the newest checkpoint of a run, or of that of ``step``."""
    run = settings.describe(folder)
    path = checkpoints.checkpoint(folder, step)
    checkpoints.check(path, run.shape)
    step = int(path.name.removeprefix("step-"))
    load = partial(checkpoints.load_model, folder, run.shape, step)
    coder = partial(tokenizer, run.tokenizer)
    found = dict(step=step, window=run.window, tokens=run.tokenizer, data=run.data)
    held_out = None if run.held_out is None else Path(run.held_out)
    return Trained(load, coder, folder, held_out=held_out, **found)


def of_folder(folder: Path) -> Trained:
    """Return the model in a Hugging Face folder, which has to be there."""
    # of any model: the harness evaluates what we cannot hold
    read_json(folder / huggingface.CONFIG, dict[str, Any], huggingface.AGAIN)
    coder = partial(tokenizer_files.FromFolder, folder)
    return Trained(partial(huggingface.load, folder), coder, folder)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --run RUN [--step N], or --model FOLDER."""
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--run", type=Path, help="a run's folder, e.g. runs/tiny_mars_adamw")
    add("--model", type=Path, help="a Hugging Face folder, e.g. of train.export")
    parser.add_argument("--step", type=int, help=STEP_HELP)


def from_arguments(args: argparse.Namespace) -> Trained:
    """Return what ``add_arguments`` asked for."""
    if args.run is not None:
        return of_run(args.run, args.step)
    if args.step is not None:
        raise UserError(
            f"got --step {args.step} with --model, expected it with --run: a Hugging "
            "Face folder holds one model; leave it out"
        )
    return of_folder(args.model)
