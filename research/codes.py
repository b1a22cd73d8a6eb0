"""The errors that 8-bit averages make in AdamW's updates, by format.

    python -m research.codes [--steps 200]

GPT-2 of two layers learns this package's sources, byte by byte, in float32. Each format
keeps averages of the gradients of this run. The error is that of an update
m / (sqrt(v) + eps) beside the run's, as a share of its norm: at the last step, the mean
over matrices.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import marsopt
from marsopt.rules.formats import SPAN, decode, encode
from marsopt.rules.numerics import stochastic
from train.errors import check_least, command
from train.gpt2 import GPT2, Shape

SHAPE = Shape(num_layers=2, num_heads=4, width=128, block_size=64, vocab_size=257)
BATCH, LR, BETA1, EPS = 8, 4e-3, 0.9, 1e-8
Format = Callable[[Tensor, bool], Tensor]  # of values, and whether they are squares


def codes(x: Tensor, are_squares: bool) -> Tensor:
    """Return values as the library stores and reads them."""
    flat = x.reshape(1, -1)
    noise = torch.randint(2**16, flat.shape, dtype=torch.int32)
    return decode(*encode(flat, noise, are_squares), are_squares).view(x.shape)


def powers(power: int, x: Tensor, are_squares: bool) -> Tensor:
    """Return numbers rounded stochastically to the largest of 64 times (k / 127)^power;
    squares as the library has them.
    """
    if are_squares:
        return codes(x, are_squares)
    rows = x.reshape(-1, SPAN)
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-30)
    share = rows.abs() / scale
    low = (share ** (1 / power) * 127).floor().clamp(max=126)
    values = (low / 127) ** power, ((low + 1) / 127) ** power
    part = (share - values[0]) / (values[1] - values[0])
    is_up = torch.rand_like(share) < part
    return (torch.where(is_up, values[1], values[0]) * scale * rows.sign()).view_as(x)


def linear(x: Tensor, are_squares: bool) -> Tensor:
    """Return numbers as multiples of one step."""
    return powers(1, x, are_squares)


def roots(x: Tensor, are_squares: bool) -> Tensor:
    """Return numbers as codes of their roots."""
    return powers(2, x, are_squares)


def narrow(x: Tensor, are_squares: bool) -> Tensor:
    """Return values in bfloat16."""
    noise = torch.randint(2**16, x.shape, dtype=torch.int32)
    return stochastic(x, noise).float()


def unchanged(x: Tensor, are_squares: bool) -> Tensor:
    """Return values in float32."""
    return x


FORMATS: dict[str, Format] = {
    "float32": unchanged,
    "codes": codes,
    "linear": linear,
    "roots": roots,
    "bfloat16": narrow,
}


class Averages:
    """m and v of a matrix, in a format."""

    def __init__(self, p: Tensor, rounded: Format) -> None:
        self.m, self.v = torch.zeros_like(p), torch.zeros_like(p)
        self.rounded = rounded

    def update(self, g: Tensor, t: int, beta2: float) -> Tensor:
        """Return the update of a gradient, and keep the averages."""
        m, v = torch.lerp(self.m, g, 1 - BETA1), torch.lerp(self.v, g * g, 1 - beta2)
        self.m, self.v = self.rounded(m, False), self.rounded(v, True)
        root = (v / (1 - beta2**t)).sqrt()
        return m / (1 - BETA1**t) / (root + EPS)


def errors(num_steps: int, beta2: float) -> dict[str, float]:
    """Return the error of each format."""
    torch.manual_seed(0)
    files = sorted(Path(marsopt.__file__).parent.rglob("*.py"))
    text = torch.tensor([*b"".join(file.read_bytes() for file in files)])
    model = GPT2(SHAPE)
    model.init_weights(0)
    own = dict(mars_type="adamw", lr=LR, betas=(BETA1, beta2), compile=False)
    optimizer = marsopt.MARS(model.parameters(), **own)
    params = [p for p in model.parameters() if p.ndim == 2]
    kept = [{k: Averages(p, f) for k, f in FORMATS.items()} for p in params]
    found = dict.fromkeys(FORMATS, 0.0)
    for t in range(1, num_steps + 1):
        starts = torch.randint(len(text) - SHAPE.block_size - 1, (BATCH,)).tolist()
        tokens = torch.stack([text[i : i + SHAPE.block_size + 1] for i in starts])
        logits = model(tokens[:, :-1]).flatten(0, 1)
        optimizer.zero_grad()
        F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        found = dict.fromkeys(FORMATS, 0.0)
        for p, of_p in zip(params, kept, strict=True):
            assert p.grad is not None
            updates = {k: a.update(p.grad, t, beta2) for k, a in of_p.items()}
            exact = updates["float32"]
            for k, u in updates.items():
                found[k] += float((u - exact).norm() / exact.norm()) / len(params)
        optimizer.step()
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m research.codes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    check_least(1, steps=args.steps)
    for beta2 in (0.95, 0.999):
        found = errors(args.steps, beta2)
        listed = (f"{k} {100 * x:.1f}%" for k, x in found.items() if k != "float32")
        print(f"beta2 {beta2}:", *listed, flush=True)


if __name__ == "__main__":
    command(main)
