"""Studies that try to break transport's lead (python -m research.compare NAME --module
sceptic).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace

import sceptic_run  # plain.build knows qhadamw with it

from research.compare.plain import FOUND, Setting
from research.compare.study import Method, Study
from research.studies import ELEMENTWISE, MATRICES, SMALL, TRANSPORT

__all__ = ["as_it_is", "moonlight", "slow_root", "to_zero"]
NUM = int(os.environ.get("SEEDS", "2"))


@dataclass(frozen=True, kw_only=True)
class Sceptic(Setting):
    """With a schedule by name of train.engine.schedule."""

    schedule: str = "cosine"

    def command(self, run, folder):
        given = [asdict(self), dict(run.recipe), run.seed]
        return sceptic_run.__name__, [*map(json.dumps, given), str(folder / FOUND)]


HERE = Sceptic(**asdict(SMALL))
AHEAD = dict(lr=0.01307, beta1=0.96079, gamma=0.2049)
NADAMW = ELEMENTWISE | dict(rule="nadamw", lr=0.01459, beta1=0.91359)
MOVED = ELEMENTWISE | TRANSPORT | dict(rule="mars-adamw") | AHEAD
QH = (
    {k: v for k, v in ELEMENTWISE.items() if k != "one_rate"}
    | dict(rule="qhadamw")
    | AHEAD
)


def as_it_is() -> Study:
    return Study(
        title="E1, E2: QHAdamW at transport's numbers; averages of weights",
        setting=HERE,
        methods={
            "NAdamW": Method(NADAMW, num_seeds=4),
            "transport": Method(MOVED, num_seeds=4),
            "QHAdamW": Method(QH, num_seeds=4),
        },
    )


def to_zero() -> Study:
    return Study(
        title="E3: linear to zero",
        setting=replace(HERE, schedule="linear", floor=0.0),
        methods={
            "NAdamW": Method(NADAMW, num_seeds=NUM),
            "NAdamW, 1.41 times the rate": Method(
                NADAMW | dict(lr=0.02063), num_seeds=NUM
            ),
            "transport": Method(MOVED, num_seeds=NUM),
        },
    )


def slow_root() -> Study:
    return Study(
        title="E5: QHAdamW, beta2 0.997",
        setting=HERE,
        methods={"QHAdamW, beta2 0.997": Method(QH | dict(beta2=0.997), num_seeds=NUM)},
    )


def moonlight() -> Study:
    near = MATRICES | dict(lr=0.01748, beta1=0.97181)
    return Study(
        title="E4: quasi-hyperbolic Moonlight",
        setting=HERE,
        methods={
            "Moonlight": Method(
                MATRICES | dict(rule="moonlight", lr=0.01748, beta1=0.96013),
                num_seeds=4,
            ),
            "quasi-hyperbolic Moonlight": Method(
                near | dict(rule="mars-m", clip=None, gamma=0.08044, beside="nadamw"),
                num_seeds=4,
            ),
            "Moonlight, transport": Method(
                near | TRANSPORT | dict(rule="moonlight", gamma=0.08044), num_seeds=4
            ),
        },
    )
