"""python -m train.export: a run's model as a Hugging Face folder."""

import argparse
import shutil
from pathlib import Path
from shlex import quote

from train.data import tokenizer_files
from train.data.tokenizers import TOKENIZERS
from train.errors import UserError, command
from train.files import made_whole
from train.gpt2 import huggingface
from train.runs import checkpoints
from train.runs.settings import SETTINGS
from train.runs.trained import STEP_HELP, Trained, of_run

STATE = "training_state"


def export(
    trained: Trained, out: Path, *, tokenizer: bool = True, training_state: bool = False
) -> None:
    """Make ``out``: config.json, generation_config.json, model.safetensors, and where
    asked for the tokenizer's files and a copy of the whole checkpoint.
    """
    try:
        coder = trained.tokenizer() if tokenizer else None
    except UserError as error:
        hint = "to export the weights alone give --no-tokenizer"
        raise UserError(f"{error}; {hint}") from error
    path = checkpoints.checkpoint(trained.folder, trained.step)
    if training_state:
        checkpoints.check(path, trained.model.shape, whole=True)
    with made_whole(out) as draft:
        huggingface.save(trained.model, draft, TOKENIZERS[trained.tokens].end_of_text)
        if coder is not None:
            tokenizer_files.save(coder, draft, trained.model.shape.block_size)
        if training_state:
            (draft / STATE).mkdir()
            for file in (*path.iterdir(), trained.folder / SETTINGS):
                shutil.copy(file, draft / STATE)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m train.export",
        description="Turn a run's checkpoint into a Hugging Face GPT2LMHeadModel.",
    )
    add, switch = parser.add_argument, {"action": "store_true"}
    add("--run", type=Path, required=True, help="a run's folder, e.g. runs/NAME")
    add("--out", type=Path, required=True, help="a new folder")
    add("--step", type=int, help=STEP_HELP)
    add("--no-tokenizer", **switch, help="leave the tokenizer's files out")
    add("--training-state", **switch, help="add the checkpoint, to resume elsewhere")
    args = parser.parse_args()
    trained = of_run(args.run, args.step)
    state, tokenizer = args.training_state, not args.no_tokenizer
    export(trained, args.out, tokenizer=tokenizer, training_state=state)
    count = sum(p.numel() for p in trained.model.parameters())
    print(
        f"{count:,} parameters after step {trained.step} of {args.run} in {args.out}: "
        f"GPT2LMHeadModel.from_pretrained({str(args.out)!r})"
    )
    if state:
        path = quote(str((args.out / STATE).resolve()))
        print(
            "to resume in a new run, with the recipe's options: "
            f"--checkpoint.initial-load-path {path} "
            "--checkpoint.no-initial-load-model-only"
        )


if __name__ == "__main__":
    command(main)
