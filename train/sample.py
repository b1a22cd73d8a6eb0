"""python -m train.sample: continue a prompt with a trained model."""

import argparse

from train.errors import check_least, command, shown
from train.gpt2.inference import generate
from train.runs.trained import add_arguments, from_arguments


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m train.sample", description="Continue a prompt with a trained model."
    )
    add_arguments(parser)
    add = parser.add_argument
    add("--prompt", default="class ")
    add("--tokens", type=int, default=300, help="tokens to generate (default: 300)")
    add("--temperature", type=float, default=0.8)
    add(
        "--top-k",
        type=int,
        default=50,
        help="sample from the K likeliest tokens (default: 50)",
    )
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    check_least(1, tokens=args.tokens, top_k=args.top_k)
    check_least(0.001, temperature=args.temperature)
    check_least(0, 2**63 - 1, seed=args.seed)
    trained = from_arguments(args)
    coder = trained.tokenizer()
    how = dict(temperature=args.temperature, top_k=args.top_k, seed=args.seed)
    prompt = coder.encode(args.prompt)
    ids = generate(trained.model, prompt, num_tokens=args.tokens, **how)
    print(shown(args.prompt + coder.decode(ids)))


if __name__ == "__main__":
    command(main)
