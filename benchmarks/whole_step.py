"""A whole training step as one graph on a flat group, beside the two-part version.

    python -m benchmarks.whole_step [--layers 4] [--width 256] [--device cuda]

One graph: forward, backward and MARS-AdamW on ``marsopt.FlatGroup``, gradients by
torch.func through the views of the stacks. Two parts: the compiled model under
autograd, then the class ``MARS``. Same model, batch, and learning rate; medians of
interleaved steps; peak memory of one step beyond what lived before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value

from benchmarks.memory import peak_bytes
from benchmarks.timing import spread, take_turns
from marsopt import MARS, FlatGroup, mars
from marsopt.profiling.machine import describe, one_line, seconds
from train.gpt2 import GPT2, Shape

LR = 1e-3


def model_and_batch(args: argparse.Namespace) -> tuple[GPT2, torch.Tensor]:
    """Return the same for every call."""
    torch.manual_seed(0)
    shape = Shape(
        num_layers=args.layers,
        num_heads=4,
        width=args.width,
        block_size=128,
        vocab_size=1024,
    )
    model = GPT2(shape).to(args.device)
    model.init_weights()
    return model, torch.randint(1024, (args.batch, 129), device=args.device)


def one_graph(args: argparse.Namespace) -> Callable[[], float]:
    """Return a step that returns the loss."""
    model, tokens = model_and_batch(args)
    rule = mars(base_lr=LR, max_norm=1.0)
    named = {n: p.detach() for n, p in model.named_parameters()}
    flat = FlatGroup.pack(named)
    state = rule.init(flat)
    lr = torch.tensor(LR, device=args.device)

    def loss(flat: FlatGroup) -> torch.Tensor:
        logits = functional_call(model, flat.unpack(), (tokens[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.compile(fullgraph=True)
    def step(flat, state, lr):
        grads, value = grad_and_value(loss)(flat)
        return *rule.step(flat, grads, state, lr=lr), value

    def run() -> float:
        nonlocal flat, state
        flat, state, value = step(flat, state, lr)
        return float(value)

    return run


def two_parts(args: argparse.Namespace) -> Callable[[], float]:
    """Return a step that returns the loss."""
    model, tokens = model_and_batch(args)
    compiled = torch.compile(model, fullgraph=True)
    optimizer = MARS(model.parameters(), lr=LR, max_norm=1.0)

    def run() -> float:
        logits = compiled(tokens[:, :-1])
        value = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    steps = {"one graph": one_graph(args), "two parts": two_parts(args)}
    turns = {name: partial(seconds, step, args.device) for name, step in steps.items()}
    first = take_turns(turns, 1)
    losses = {name: [step() for _ in range(5)] for name, step in steps.items()}
    times = take_turns(turns, args.rounds)
    print(one_line(describe(args.device)))
    for name, step in steps.items():
        median = spread(times[name]).median
        print(
            f"{name:10}{1e3 * median:9.1f} ms   first step {first[name][0]:6.1f} s   "
            f"peak {peak_bytes(step, device) / 2**20:7.1f} MiB   "
            f"losses {losses[name][0]:.6f} ... {losses[name][-1]:.6f}"
        )
    ratios = [
        a / b for a, b in zip(times["one graph"], times["two parts"], strict=True)
    ]
    print(f"one graph / two parts: {spread(ratios).median:.2f}")


if __name__ == "__main__":
    main()
