"""What other packages' SOAP computes: how far each goes from the authors' algorithm, on
a square matrix whose first gradient has full rank.

    python -m benchmarks.soaps

The authors' algorithm is ours in float64, which tests/library/test_soap.py holds
against an oracle. All take the authors' defaults, but a refresh every three steps, in
float32. Packages: the group peers of pyproject.toml.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.contenders import SOAP_HYPER
from benchmarks.peers import INSTALL, SOAP_OPTIONS, version
from marsopt import MARS
from train.errors import command

SIZE, STEPS, OFTEN = 64, 25, dict(precondition_frequency=3)
COLUMNS = {"first step": 0, "third": 2, "fourth, which refreshes": 3, "last": -1}


def drawn(seed: int) -> Tensor:
    """Return a matrix, the same for all."""
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def walk(build: Callable[[nn.Parameter], Optimizer], dtype: torch.dtype) -> list:
    """Return the parameter after every step, in float64."""
    p = nn.Parameter(drawn(0).to(dtype))
    optimizer, found = build(p), []
    for step in range(STEPS):
        p.grad = drawn(1 + step).to(dtype)
        optimizer.step()
        found.append(p.detach().to(torch.float64, copy=True))
    return found


def ours(p: nn.Parameter) -> Optimizer:
    """Build ours."""
    return MARS([p], mars_type="soap", compile=False, **SOAP_HYPER, **OFTEN)


def theirs(package: str) -> Callable[[nn.Parameter], Optimizer]:
    """Build a package's."""
    kind, options = importlib.import_module(package).SOAP, SOAP_OPTIONS[package]
    return lambda p: kind([p], **SOAP_HYPER, **OFTEN, **options)


def distance(found: Tensor, want: Tensor) -> float:
    """Return how far apart they are, relative to the way that ``want`` has come."""
    way = (want - drawn(0)).norm()
    apart = (found - want).norm()
    return float(apart / way if way else apart)


def main() -> None:
    """Run the command."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.soaps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    want = walk(ours, torch.float64)
    print(f"distance from the authors' algorithm, of the way so far; {STEPS} steps")
    print("|".join(["", " package ", *(f" {name} " for name in COLUMNS), ""]))
    print("|---" * (1 + len(COLUMNS)) + "|")
    for package in ("marsopt", *SOAP_OPTIONS):
        if package != "marsopt" and version(package) is None:
            print(f"| {package}: not installed: {INSTALL} |")
            continue
        build = ours if package == "marsopt" else theirs(package)
        found = walk(build, torch.float32)
        cells = [f"{distance(found[i], want[i]):.0e}" for i in COLUMNS.values()]
        print(f"| {' | '.join([package, *cells])} |")


if __name__ == "__main__":
    command(main)
