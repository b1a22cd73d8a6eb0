"""python -m train.import_hf: a Hugging Face folder as weights to start a run from."""

import argparse
from pathlib import Path
from shlex import quote

from train.errors import command
from train.export import STATE
from train.files import made_whole
from train.gpt2 import huggingface
from train.runs import checkpoints, initial


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m train.import_hf",
        description="Turn a Hugging Face GPT-2 without biases into a checkpoint that "
        "python -m train starts from. It holds weights alone: the optimizer's moments "
        "and previous gradient, the schedule and the place in the data start anew.",
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the Hugging Face folder")
    add("--out", type=Path, required=True, help="a new folder")
    args = parser.parse_args()
    model = huggingface.load(args.model)
    with made_whole(args.out) as draft:
        checkpoints.save_model(model, draft)
        initial.note_shape(draft, model.shape)
    print(f"the weights of {args.model} ({model.shape}) are in {args.out}")
    print(
        "to train from them, with a recipe of this shape: python -m train --config "
        f"NAME --checkpoint.initial-load-path {quote(str(args.out.resolve()))}"
    )
    if (args.model / STATE).is_dir():
        print(
            f"{args.model / STATE} holds the optimizer's state as well: give that path "
            "and --checkpoint.no-initial-load-model-only to resume its training"
        )


if __name__ == "__main__":
    command(main)
