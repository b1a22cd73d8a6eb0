"""A preconditioner with everything that a matrix preconditioner may have: factors and
moments of rows that live with the owners of matrices, a stage every so many steps. Its
own, made for tests: what the class and the mesh promise to components.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from marsopt.rules.component import (
    Average,
    Buffer,
    MatrixOutput,
    MatrixPreconditioner,
)
from marsopt.rules.numerics import working
from marsopt.rules.registry import REGISTRY, STATE_KEYS, NamedRule, register


def short_square(shape, matrices):
    """(k, k), of the short side."""
    return torch.Size([min(shape), min(shape)])


def one_per_row(shape, matrices):
    return shape[:1]


def one_number(shape, matrices):
    return torch.Size([])


@dataclass(frozen=True)
class Exact:
    """Matrices travel as float64, there and back."""

    is_float32: bool = True

    def on(self, device_type):
        return self

    def payload(self, dtype=torch.float32):
        return torch.float64

    returned = payload

    def num_flops(self, rows, cols):
        return 2 * rows * cols * min(rows, cols)


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors(Average, MatrixPreconditioner):
    """With S the Gram matrix of the short side, Q a basis that follows it, o the matrix
    in that basis, whose rows are divided by their root mean square over all steps:

        m <- mu m + (1 - mu) c
        S <- 0.9 S + 0.1 m m^T                     Q <- qr(S Q) every 2 steps
        o = Q^T m (or m Q)
        r <- r + mean over columns of o^2          n <- n + 1
        x <- (1 - lr weight_decay) x - lr o / sqrt(r / n)
    """

    every: ClassVar[int] = 2

    keeps = {
        **Average.keeps,
        "r": Buffer("row_squares", shape=one_per_row, home="owner"),
        "S": Buffer("gram", shape=short_square, home="owner", dtype="working"),
        "Q": Buffer(
            "basis", shape=short_square, start="identity", home="owner", dtype="working"
        ),
        "n": Buffer("num_seen", shape=one_number, home="owner", dtype=torch.float64),
    }

    @property
    def cost(self):
        return Exact()

    @property
    def makes_matrix(self):
        return False

    def update(self, x, c, buffers, s):
        _, _, mu, weight = s
        return None, {"m": mu * buffers["m"] + weight * c}

    def stage(self, count, number):
        return count % 2 == 0

    def at_owner(self, matrices, stage):
        found = []
        for one in matrices:
            m, (r, S, Q, n) = working(one.matrix), one.owned
            wide = m.shape[-2] <= m.shape[-1]
            S = 0.9 * S + 0.1 * (m @ m.mT if wide else m.mT @ m)
            if stage:
                Q, _ = torch.linalg.qr(S @ Q)
            o = Q.mT @ m if wide else m @ Q
            r, n = r + (o * o).mean(-1).to(r.dtype), n + 1
            mean = (r / n[..., None].to(r.dtype))[..., None]
            found.append(MatrixOutput(o / (mean + 1e-12).sqrt(), (r, S, Q, n)))
        return found

    def apply(self, x, o, s, scale):
        rate, decay, *_ = s
        return decay * x - rate * o


@contextmanager
def registered() -> Iterator[None]:
    """``mars_type="factors"`` exists within: other tests go through all that exist."""
    rules, keys = dict(REGISTRY), set(STATE_KEYS)
    register(NamedRule("factors", Factors, False, "adamw", source="tests/factors.py"))
    try:
        yield
    finally:
        for name in REGISTRY.keys() - rules.keys():
            del REGISTRY[name]
        STATE_KEYS.intersection_update(keys)
