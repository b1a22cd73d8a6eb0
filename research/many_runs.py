"""Gradients of many small models at once, by vmap, beside one after the other.

    OMP_NUM_THREADS=1 python -m research.many_runs [--runs 12]

The model and batch are those of the study "small", on random tokens.
Prints milliseconds a model, medians of turns: one model by autograd, as the plain loop
takes it; all by vmap of torch.func.grad; the same compiled.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from marsopt.profiling.machine import describe, one_line, seconds
from research.compare.plain import mean_loss
from research.studies import SMALL
from train.errors import check_least, command
from train.gpt2 import GPT2

TURNS = 9


Gradients = Callable[[], dict[str, Tensor]]


def ways(num_runs: int) -> dict[str, tuple[Gradients, int]]:
    """Return, by title, what takes gradients, and of how many models."""
    model = GPT2(SMALL.shape)
    model.init_weights(0)
    batch = (SMALL.batch, SMALL.seq_len)
    tokens = torch.randint(SMALL.vocab_size, (2, num_runs, *batch))
    params = {name: p.detach() for name, p in model.named_parameters()}
    stacked = {name: torch.stack([p] * num_runs) for name, p in params.items()}

    def loss(params: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(model, params, (inputs,))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def one() -> dict[str, Tensor]:
        model.zero_grad()
        mean_loss(model, tokens[0, 0], tokens[1, 0], False).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    every = vmap(grad(loss))
    compiled = torch.compile(every, fullgraph=True, dynamic=False)
    given = (stacked, *tokens)
    return {
        "one, autograd": (one, 1),
        f"{num_runs}, vmap": (partial(every, *given), num_runs),
        f"{num_runs}, vmap, compiled": (partial(compiled, *given), num_runs),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m research.many_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=12, help="(%(default)s)")
    args = parser.parse_args()
    check_least(1, runs=args.runs)
    # attention on CPUs has no rule for batches of models: it goes one by one
    warnings.filterwarnings("ignore", "There is a performance drop")
    made = ways(args.runs)
    found: dict[str, list[float]] = {title: [] for title in made}
    for turn in range(TURNS + 1):  # the first one compiles
        for title, (call, num) in made.items():
            took = seconds(call, "cpu") / num
            found[title] += [took] if turn else []
    print(one_line(describe("cpu")))
    for title, own in found.items():
        print(f"{title:22} {1e3 * statistics.median(own):6.1f} ms a model")


if __name__ == "__main__":
    command(main)
