"""python -m train.export: a run's model as a Hugging Face folder."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from train import huggingface, run, tokenizer_files
from train.errors import UserError, command
from train.folders import made_whole
from train.settings import SETTINGS, describe
from train.tokenizers import TOKENIZERS, Tokenizer
from train.trained import Trained, of_run

STATE = "training_state"


def _coder(trained: Trained) -> Tokenizer:
    try:
        return trained.tokenizer()
    except UserError as error:
        raise UserError(
            f"{error}; to export the weights alone give --no-tokenizer"
        ) from error


def export(
    trained: Trained,
    out: Path,
    *,
    tokenizer: bool = True,
    training_state: bool = False,
) -> None:
    """Make ``out``: config.json, generation_config.json, model.safetensors, and where
    asked for the tokenizer's files and a copy of the whole checkpoint.

    Raises:
        UserError: an ``out`` in use; GPT-2's vocabulary cannot be had.
    """
    coder = _coder(trained) if tokenizer else None
    path = run.checkpoint(trained.folder, trained.step)
    if training_state:
        run.check_weights(path, trained.model.shape, whole=True)
    _, name = describe(trained.folder)
    with made_whole(out) as draft:
        huggingface.save(trained.model, draft, TOKENIZERS[name].end_of_text)
        if coder is not None:
            tokenizer_files.save(coder, draft, trained.model.shape.block_size)
        if training_state:
            shutil.copytree(path, draft / STATE)
            shutil.copy(trained.folder / SETTINGS, draft / STATE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.export",
        description="Turn a run's checkpoint into a Hugging Face GPT2LMHeadModel.",
    )
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        help="a run's folder, e.g. runs/tiny_mars_adamw",
    )
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--step", type=int, help="of the checkpoint (default: the newest)"
    )
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="leave the tokenizer's files out"
    )
    parser.add_argument(
        "--training-state",
        action="store_true",
        help="add the whole checkpoint, to continue training elsewhere",
    )
    return parser


def main() -> None:
    """The command."""
    args = _parser().parse_args()
    trained = of_run(args.run, args.step)
    export(
        trained,
        args.out,
        tokenizer=not args.no_tokenizer,
        training_state=args.training_state,
    )
    count = sum(p.numel() for p in trained.model.parameters())
    print(
        f"{count:,} parameters after step {trained.step} of {args.run} in {args.out}: "
        f"GPT2LMHeadModel.from_pretrained('{args.out}')"
    )
    if args.training_state:
        print(
            "to continue the training in a new run, with the recipe's options: "
            f"--checkpoint.initial-load-path {(args.out / STATE).resolve()} "
            "--checkpoint.no-initial-load-model-only"
        )


if __name__ == "__main__":
    command(main)
