"""SVRG with a coefficient beside MARS and AdamW, on a GPT-2 so small that the gradient
of its whole training set can be afforded; and how noisy their gradients are.

    OMP_NUM_THREADS=1 python -m research.svrg [--data data/python]

The folder holds train.bin and val.bin, as train.prepare makes them. Each method takes
the rate with the lowest held-out loss of seed 0, of rates that differ by factors of 2
and go on until the best has a neighbour on both sides.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from marsopt import MARS, SVRG, Approximate, Exact
from marsopt.profiling.machine import describe, one_line
from train.data.token_files import open_raw
from train.errors import UserError, command
from train.gpt2 import GPT2, Shape

BETAS, SEQ_LEN = (0.9, 0.99), 64
EVERYTHING = slice(None)
Parameters = dict[str, Tensor]
ALPHAS = (0.25, 0.5, 1.0)


class Size(NamedTuple):
    """An epoch is ``num_batches`` batches of ``batch`` sequences: the training set."""

    shape: Shape
    batch: int
    num_batches: int
    held_out: int
    epochs: int


class Method(NamedTuple):
    """A line of the table; ``decays``: gamma falls linearly to 0 over the run."""

    title: str
    rule: str = "mars-adamw"
    correction: str | None = "approximate"
    gamma: float = 0.0
    decays: bool = False


def sequences(path: Path, num: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, (num, SEQ_LEN), spread evenly over a token file."""
    tokens, length = open_raw(path), SEQ_LEN + 1
    if len(tokens) < num * length:
        raise UserError(
            f"got {len(tokens):,} tokens in {path}, expected {num * length:,} or more: "
            "prepare a longer text"
        )
    stride = len(tokens) // num
    rows = [tokens[i * stride :][:length].tolist() for i in range(num)]
    return torch.tensor(rows)[:, :-1], torch.tensor(rows)[:, 1:]


class Point(NamedTuple):
    """Losses after an epoch, and how many gradients of a batch they took."""

    num_gradients: int
    held_out: float
    train: float


class Run:
    """A model that one method trains at a constant rate, after an epoch of warm-up."""

    def __init__(
        self, folder: Path, size: Size, method: Method, lr: float, seed: int
    ) -> None:
        self.size, self.method, self.lr = size, method, lr
        self.data = sequences(folder / "train.bin", size.batch * size.num_batches)
        self._held_out = sequences(folder / "val.bin", size.held_out)
        self.model = GPT2(size.shape)
        self.model.init_weights(seed)
        self._optimizer = MARS(
            self.model.parameters(),
            lr=lr,
            betas=BETAS,
            weight_decay=0.0,
            gamma=method.gamma,
            mars_type=method.rule,
            correction=method.correction,
            optimize_1d=method.rule != "adamw",  # which moves all tensors alike
            compile=False,
        )
        self._generator = torch.Generator().manual_seed(seed)
        self._num_gradients, self.points = 0, []

    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the sequences of an epoch's batches, in a new order."""
        order = torch.randperm(len(self.data[0]), generator=generator)
        return order.split(self.size.batch)

    def loss(self, model: Callable, rows: Tensor | slice = EVERYTHING) -> Tensor:
        """Return the mean loss of training sequences, in nats a token."""
        return self._mean(model, *(half[rows] for half in self.data))

    @staticmethod
    def _mean(model: Callable, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())

    def steps(self) -> Iterator[tuple[int, int, Tensor]]:
        """Train; yield epoch, step of it and batch before every step, and append to
        ``points`` after every epoch.
        """
        size, (group,) = self.size, self._optimizer.param_groups
        uses_anchor = self.method.correction == "svrg"
        for epoch in range(size.epochs):
            if uses_anchor:
                self._gradient(EVERYTHING, size.num_batches)
                self._optimizer.update_anchor()
            for i, rows in enumerate(self.batches(self._generator)):
                t = epoch * size.num_batches + i
                group["lr"] = self.lr * min(1.0, (t + 1) / size.num_batches)
                if self.method.decays:
                    share = t / (size.epochs * size.num_batches)
                    group["gamma"] = self.method.gamma * (1 - share)
                yield epoch, i, rows
                if uses_anchor:
                    with self._optimizer.at_snapshot():
                        self._gradient(rows)
                        self._optimizer.update_previous_grad()
                self._gradient(rows)
                self._optimizer.step()
            self._optimizer.eval()
            with torch.no_grad():
                losses = self._mean(self.model, *self._held_out), self.loss(self.model)
            self.points.append(Point(self._num_gradients, *(x.item() for x in losses)))
            self._optimizer.train()

    def _gradient(self, rows: Tensor | slice, count: int = 1) -> None:
        self._optimizer.zero_grad()
        self.loss(self.model, rows).backward()
        self._num_gradients += count


# ---- how far corrected gradients are from the true one -------------------------------


def gradient(run: Run, x: Parameters, rows: Tensor | slice = EVERYTHING) -> Tensor:
    """Return the gradient of some training sequences at parameters x, flattened."""
    loss = run.loss(lambda ids: functional_call(run.model, x, ids), rows)
    found = torch.autograd.grad(loss, list(x.values()))
    return torch.cat([g.flatten() for g in found])


def errors(
    run: Run, beta1: float, gamma: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Train; at some steps of the second, middle and last epoch yield, for every
    correction, the mean of ||c - full||^2 over that of ||g - full||^2, both over the
    batches of an epoch. ``gamma`` is that of MARS; no c is clipped.

    The snapshot is taken when an epoch begins. The last entries are the alpha that
    would have made SVRG's error least, and that error.
    """
    size = run.size
    epochs = 1, size.epochs // 2, size.epochs - 1
    places = 1, size.num_batches // 4, size.num_batches // 2, size.num_batches - 1
    previous, last_rows, snapshot = {}, EVERYTHING, {}
    for epoch, i, rows in run.steps():
        named = run.model.named_parameters()
        x = {name: p.detach().clone().requires_grad_() for name, p in named}
        snapshot = snapshot if i else x
        if epoch in epochs and i in places:
            last = gradient(run, previous, last_rows)
            found = _ratios(run, x, previous, snapshot, last, beta1, gamma)
            yield f"epoch {epoch + 1}, step {i + 1}", found
        previous, last_rows = x, rows


def _ratios(
    run: Run,
    x: Parameters,
    previous: Parameters,
    snapshot: Parameters,
    last: Tensor,
    beta1: float,
    gamma: float,
) -> dict[str, float]:
    """``last`` is the gradient that the step before this one took."""
    full, mu = gradient(run, x), gradient(run, snapshot)
    plain = cross = own = 0.0
    sums: dict[str, float] = {}
    for rows in run.batches(torch.Generator().manual_seed(0)):
        g, h = gradient(run, x, rows), gradient(run, snapshot, rows)
        corrected = {
            "approximate": (Approximate(), gamma, (g, last)),
            "exact": (Exact(), gamma, (g, gradient(run, previous, rows))),
        } | {f"SVRG, alpha {a:g}": (SVRG(), a, (g, h, mu)) for a in ALPHAS}
        for title, (correction, scale, operands) in corrected.items():
            weights = correction.coefficients(beta1, scale)
            c = sum(w * v for w, v in zip(weights, operands, strict=True))
            sums[title] = sums.get(title, 0.0) + (c - full).square().sum().item()
        plain += (g - full).square().sum().item()
        cross += torch.dot(g - full, h - mu).item()
        own += (h - mu).square().sum().item()
    ratios = {title: total / plain for title, total in sums.items()}
    least = 1 - cross**2 / (own * plain)
    return ratios | {"best alpha": cross / own, "SVRG at it": least}


# ---- the command ---------------------------------------------------------------------


GAMMA, FIRST_LR, SEEDS = 0.025, 2e-3, 3
FULL = Size(Shape(2, 4, 48, SEQ_LEN, 257, False), 8, 32, 256, 9)
QUICK = Size(Shape(1, 1, 8, SEQ_LEN, 257, False), 2, 4, 4, 3)
PLAIN = Method("MARS-AdamW, gamma 0")
METHODS = [
    Method("AdamW", rule="adamw", correction=None),
    PLAIN,
    Method("MARS-AdamW, approximate", gamma=GAMMA),
    Method("MARS-AdamW, transport", correction="transport", gamma=0.1),
    Method("SVRG, alpha 0.25", correction="svrg", gamma=0.25),
    Method("SVRG, alpha 0.5", correction="svrg", gamma=0.5),
    Method("SVRG, alpha 1", correction="svrg", gamma=1.0),
    Method("SVRG, alpha 0.5 to 0", correction="svrg", gamma=0.5, decays=True),
]


def tuned(train: Callable[[float, int], list[Point]]) -> tuple[float, int, list]:
    """Return the best rate, how many were tried, and the points of every seed at it."""
    runs = {i: train(FIRST_LR * 2.0**i, 0) for i in (-1, 0, 1)}
    while True:
        best = min(runs, key=lambda i: runs[i][-1].held_out)
        if min(runs) < best < max(runs):
            break
        i = best + (1 if best == max(runs) else -1)
        runs[i] = train(FIRST_LR * 2.0**i, 0)
    lr = FIRST_LR * 2.0**best
    return lr, len(runs), [runs[best], *(train(lr, seed) for seed in range(1, SEEDS))]


def spread(points: list[Point]) -> list[str]:
    """Return mean and standard deviation of both losses over seeds."""
    each = [p.held_out for p in points], [p.train for p in points]
    return [f"{statistics.mean(x):.3f} ± {statistics.stdev(x):.3f}" for x in each]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/python"))
    parser.add_argument("--quick", action="store_true", help="sizes that show nothing")
    args = parser.parse_args()
    size = QUICK if args.quick else FULL
    budget, rates = size.epochs * size.num_batches, {}
    print(one_line(describe("cpu")))
    print(
        f"loss, mean ± standard deviation of {SEEDS} seeds, at the end: {budget} steps;"
    )
    print(f"and when {budget} gradients of a batch were taken")
    print("method | lr (tried) | gradients | held out | training | the same two then")
    for method in METHODS:

        def train(lr: float, seed: int, method=method) -> list[Point]:
            run = Run(args.data, size, method, lr, seed)
            for _ in run.steps():
                pass
            return run.points

        lr, num_tried, runs = tuned(train)
        ends = [points[-1] for points in runs]
        equal = [
            [p for p in points if p.num_gradients <= budget][-1] for points in runs
        ]
        cells = f"{lr:g} ({num_tried})", str(ends[0].num_gradients)
        print(
            method.title, *cells, *spread(ends), *spread(equal), sep=" | ", flush=True
        )
        rates[method] = lr

    print(f"squared error of c, over that of g, along {PLAIN.title}, seed 0")
    run = Run(args.data, size, PLAIN, rates[PLAIN], seed=0)
    for i, (where, ratios) in enumerate(errors(run, BETAS[0], GAMMA)):
        if i == 0:
            print("before", *ratios, sep=" | ")
        print(where, *(f"{ratio:.2f}" for ratio in ratios.values()), sep=" | ")


if __name__ == "__main__":
    command(main)
