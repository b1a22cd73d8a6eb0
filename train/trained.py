"""A trained model from either place: a run's checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from train import huggingface, run, settings, tokenizer_files
from train.errors import UserError
from train.gpt2 import GPT2
from train.tokenizers import Tokenizer, tokenizer


@dataclass(frozen=True)
class Trained:
    """Model and tokenizer, made when asked for: what is asked of a Hugging Face folder
    may need neither.

    ``step`` is of a run's checkpoint, None for a Hugging Face folder; ``window`` the
    length of the sequences it was trained on, None where that is the block size;
    ``tokens`` the name of the tokenizer they came from, None where that has none.
    """

    load: Callable[[], GPT2]
    tokenizer: Callable[[], Tokenizer]
    folder: Path
    step: int | None = None
    window: int | None = None
    tokens: str | None = None

    @cached_property
    def model(self) -> GPT2:
        """In evaluation mode, on the CPU at first.

        Raises:
            UserError: a Hugging Face folder that is not a GPT-2 of ours.
        """
        return self.load()


def of_run(folder: Path, step: int | None) -> Trained:
    """The model of the newest checkpoint of a run, or of that of ``step``.

    Raises:
        UserError: no run, no such checkpoint, a partial one, or one of another model.
    """
    shape, name = settings.describe(folder)
    path = run.checkpoint(folder, step)
    run.check_weights(path, shape)
    step = int(path.name.removeprefix("step-"))
    return Trained(
        partial(run.load_model, folder, shape, step),
        partial(tokenizer, name),
        folder,
        step,
        settings.read(folder / settings.SETTINGS)["training.seq_len"],
        name,
    )


def of_folder(folder: Path) -> Trained:
    """The model in a Hugging Face folder.

    Raises:
        UserError: no such folder.
    """
    if not (folder / "config.json").is_file():
        raise UserError(
            f"got no {folder / 'config.json'}, expected a Hugging Face folder: python "
            "-m train.export makes one"
        )
    return Trained(
        partial(huggingface.load, folder),
        partial(tokenizer_files.FromFolder, folder),
        folder,
    )


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
        UserError: as ``of_run`` and ``of_folder``.
    """
    if args.run is not None:
        return of_run(args.run, args.step)
    if args.step is not None:
        raise UserError(
            f"got --step {args.step} with --model, expected it with --run: a Hugging "
            "Face folder holds one model; leave it out"
        )
    return of_folder(args.model)
