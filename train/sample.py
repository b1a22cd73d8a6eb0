"""python -m train.sample: continue a prompt with a trained model."""

from __future__ import annotations

import argparse

from train.errors import UserError, command
from train.run import generate
from train.trained import add_arguments, from_arguments


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m train.sample",
        description="Continue a prompt with a trained model.",
    )
    add_arguments(parser)
    parser.add_argument("--prompt", default="class ")
    parser.add_argument(
        "--tokens", type=int, default=300, help="how many to generate (default 300)"
    )
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument(
        "--top-k", type=int, default=50, help="sample from this many likeliest tokens"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, value in (
        ("tokens", args.tokens),
        ("temperature", args.temperature),
        ("top-k", args.top_k),
    ):
        if not 1e-3 <= value < 1e9:
            raise UserError(
                f"got --{name} {value}, expected a number from 0.001: give a larger one"
            )
    if not args.prompt:
        raise UserError(
            "got an empty --prompt, expected some text to continue: give at least one "
            "character"
        )

    trained = from_arguments(args)
    coder = trained.tokenizer()
    ids = generate(
        trained.model,
        coder.encode(args.prompt),
        num_tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    print(args.prompt + coder.decode(ids))


if __name__ == "__main__":
    command(main)
