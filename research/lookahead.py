"""What it costs to compute transport's x in place of keeping it: rounding, and loss.

    OMP_NUM_THREADS=1 python -m research.lookahead [--data data/python] [--steps 3000]

Noisy quadratics, and a small GPT-2 on the folder's train.bin and val.bin (as
train.prepare makes them). Each is trained in float64, with x kept, and in float32 with
x kept and with x computed, on the same batches. Distances are those of x from the x of
float64, relative, root mean square over all parameters.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marsopt import MARS
from marsopt.profiling.machine import describe, one_line
from research.svrg import SEQ_LEN, sequences
from train.errors import check_least, command
from train.gpt2 import GPT2, Shape

SEEDS, BATCH, TRAINING, HELD_OUT = 3, 8, 4096, 256
SHAPE = Shape(2, 4, 48, SEQ_LEN, 257, False)
NUM_QUADRATICS = 4096
OPTIONS = dict(correction="transport", gamma=0.1, betas=(0.95, 0.99), compile=False)


class Form(NamedTuple):
    """How a run computes."""

    title: str
    dtype: torch.dtype
    store_iterate: bool


EXACT = Form("float64, x kept", torch.float64, True)
KEPT = Form("float32, x kept", torch.float32, True)
COMPUTED = Form("float32, x computed", torch.float32, False)


class Result(NamedTuple):
    """x at some steps, in float64, and the loss at the end."""

    iterates: list[Tensor]
    loss: float


def train(
    params: Sequence[Tensor],
    form: Form,
    lr: float,
    losses: Iterator[Callable[[], Tensor]],
    steps: int,
    marks: Sequence[int],
) -> list[Tensor]:
    """Take ``steps`` steps, a cosine to a tenth after a warm-up of a fifteenth; return
    x after each number of them in ``marks``.
    """
    optimizer = MARS(
        params,
        lr=lr,
        weight_decay=0.1,
        optimize_1d=True,
        store_iterate=form.store_iterate,
        **OPTIONS,
    )
    found, warmup = [], max(1, steps // 15)
    for t, loss in zip(range(1, steps + 1), losses, strict=False):
        cosine = 0.55 + 0.45 * math.cos(math.pi * t / steps)
        optimizer.param_groups[0]["lr"] = lr * min(1.0, t / warmup) * cosine
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if t in marks:
            every = [x.detach().double().flatten() for _, x in optimizer.iterates()]
            found.append(torch.cat(every))
    optimizer.eval()
    return found


def quadratics(form: Form, seed: int, steps: int, marks: Sequence[int]) -> Result:
    """sum of h y^2 / 2 with h over five decades, and noise on every gradient."""
    g = torch.Generator().manual_seed(seed)
    drawn = dict(generator=g, dtype=torch.float64)
    h = (torch.rand(NUM_QUADRATICS, **drawn) ** 4 * 50 + 1e-3).to(form.dtype)
    y = nn.Parameter(torch.randn(NUM_QUADRATICS, **drawn).to(form.dtype))

    def losses() -> Iterator[Callable[[], Tensor]]:
        while True:
            noise = 0.3 * torch.randn(NUM_QUADRATICS, **drawn).to(form.dtype)
            yield lambda noise=noise: (h * y.square() / 2 + noise * y).sum()

    iterates = train([y], form, 3e-3, losses(), steps, marks)
    return Result(iterates, float((h * y.detach().square() / 2).mean()))


def gpt2(data: Path, form: Form, seed: int, steps: int, marks: Sequence[int]) -> Result:
    """A GPT-2 of two layers, on batches that are drawn anew."""
    inputs, labels = sequences(data / "train.bin", TRAINING)
    held_out = sequences(data / "val.bin", HELD_OUT)
    model = GPT2(SHAPE)
    model.init_weights(seed)
    model.to(form.dtype)
    g = torch.Generator().manual_seed(seed)

    def mean(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())

    def losses() -> Iterator[Callable[[], Tensor]]:
        while True:
            rows = torch.randint(TRAINING, (BATCH,), generator=g)
            yield lambda rows=rows: mean(inputs[rows], labels[rows])

    iterates = train(list(model.parameters()), form, 6e-3, losses(), steps, marks)
    with torch.no_grad():
        return Result(iterates, mean(*held_out).item())


def distances(result: Result, exact: Result) -> list[float]:
    """Return those of x from the one of float64, relative."""
    pairs = zip(result.iterates, exact.iterates, strict=True)
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m research.lookahead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=Path("data/python"))
    parser.add_argument("--steps", type=int, default=3000, help="(%(default)s)")
    args = parser.parse_args()
    check_least(4, steps=args.steps)
    marks = sorted({max(1, args.steps // part) for part in (300, 30, 3, 1)})
    print(one_line(describe("cpu")))
    every = {
        "quadratics": quadratics,
        "GPT-2": lambda *how: gpt2(args.data, *how),
    }
    for title, run in every.items():
        found: dict[Form, list[Result]] = {EXACT: [], KEPT: [], COMPUTED: []}
        for seed in range(SEEDS):
            for form, results in found.items():
                results.append(run(form, seed, args.steps, marks))
        print(f"\n{title}, {SEEDS} seeds | x after steps", *marks, "loss", sep=" | ")
        medians = {}
        for form, results in found.items():
            apart = [
                distances(one, exact)
                for one, exact in zip(results, found[EXACT], strict=True)
            ]
            medians[form] = [statistics.median(own) for own in zip(*apart, strict=True)]
            losses = [one.loss for one in results]
            spread = f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"
            print(
                form.title, "", *(f"{x:.1e}" for x in medians[form]), spread, sep=" | "
            )
        pairs = zip(medians[COMPUTED], medians[KEPT], strict=True)
        print("computed / kept", "", *(f"{a / b:.2f}" for a, b in pairs), "", sep=" | ")


if __name__ == "__main__":
    command(main)
