"""How like a gradient is to those before it, in a run of a study of research.compare.

    OMP_NUM_THREADS=1 python -m research.correlations STUDY TITLE [--store FILE]

Trains a method at the best point of its search and prints, by quarters of the run, the
mean of <g_t, g_(t-j)> over that of <g_t, g_t>, where gradients are taken: with
transport at the points ahead.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from marsopt.profiling.machine import describe, one_line
from research.compare.plain import Setting, Training
from research.compare.store import Store
from research.compare.study import MODULE, changed, named
from research.studies import stored
from train.errors import UserError, check_least, command

LAGS = (1, 2, 3, 5, 8, 12, 20)
QUARTERS = 4


def correlations(training: Training, steps: int) -> torch.Tensor:
    """Train, and return the correlations, (QUARTERS, LAGS)."""
    params = [*training.task.model.parameters()]
    ring = torch.zeros(max(LAGS) + 1, sum(p.numel() for p in params))
    products = torch.zeros(QUARTERS, len(LAGS) + 1, dtype=torch.float64)
    for step in range(steps):
        training.gradient()
        g = ring[step % len(ring)]
        torch.cat([p.grad.flatten() for p in params], out=g)
        training.update()
        if step >= max(LAGS):
            before = [ring[(step - lag) % len(ring)] for lag in (0, *LAGS)]
            found = torch.tensor([float(g @ other) for other in before])
            products[QUARTERS * step // steps] += found
    return products[:, 1:] / products[:, :1]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m research.correlations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("study", metavar="STUDY", help="of research.studies, in a plain loop")
    add("title", metavar="TITLE", help="of a method whose search has begun")
    add("--module", default=MODULE, help="(%(default)s)")
    add("--store", type=Path, help="of the study (the one that git keeps)")
    add("--seed", type=int, default=5, help="(%(default)s)")
    add("--steps", type=int, help="(the study's)")
    args = parser.parse_args()
    check_least(QUARTERS * (max(LAGS) + 1), steps=args.steps)
    study = changed(
        named(args.study, args.module), {"steps": args.steps} if args.steps else {}
    )
    setting = study.setting
    store = Store(args.store, args.study) if args.store else stored(args.study)
    if not isinstance(setting, Setting) or args.title not in study.methods:
        raise UserError(
            f"got {args.study} and {args.title!r}, expected a study in a plain loop "
            f"and one of its methods ({'; '.join(study.methods)}): choose one"
        )
    found = study.search(args.title, store.losses)
    if not found.losses:
        raise UserError(
            f"got no run of {args.title} in the store, expected some: run the study, "
            "or name its --store"
        )
    recipe = study.methods[args.title].at(found.best)
    print(one_line(describe("cpu")))
    print(f"{args.title}, seed {args.seed}: {recipe}")
    training = Training(setting, recipe, args.seed, setting.texts())
    table = correlations(training, setting.steps)
    print("quarter | " + " | ".join(f"j = {lag}" for lag in LAGS))
    for quarter, row in enumerate(table.tolist(), 1):
        print(f"{quarter} | " + " | ".join(f"{value:+.2f}" for value in row))
    print(f"held-out loss {training.validate():.4f}")


if __name__ == "__main__":
    command(main)
