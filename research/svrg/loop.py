"""One run: a small GPT-2, its training set, and one method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from marsopt import MARS
from train.data.token_files import open_raw
from train.errors import UserError
from train.gpt2 import GPT2, Shape

BETAS, SEQ_LEN = (0.9, 0.99), 64
EVERYTHING = slice(None)


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
