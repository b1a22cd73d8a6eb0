"""Malformed input of every command: exit code 2 and one line, or done as told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from train.campaign.children import Case, Steps
from train.campaign.files import Malformed, malformed
from train.campaign.ground import Ground
from train.campaign.law import judge
from train.campaign.options import Input, of_others, of_training

# of each ten: command lines of the training, of the other commands, files
SHARES = (4, 3, 3)


def cases(ground: Ground, seed: int, num: int, brief: bool) -> Iterator[Case]:
    """Yield ``num`` different inputs; ``brief``: those that are refused soonest."""
    draw = random.Random(f"{seed} inputs")
    training = list(dict.fromkeys(of_training(ground, draw)))
    others = list(dict.fromkeys(of_others(ground, draw)))
    draw.shuffle(training)
    draw.shuffle(others)
    files = malformed(ground, draw)
    if brief:
        training = [given for given in training if given.must][: num // 5]
        others = [given for given in others if given.must]
    seen = set()
    number = 0
    while number < num and (training or others or files):
        turn = number % sum(SHARES)
        pools = (training, others, files)
        wanted = 0 if turn < SHARES[0] else 1 if turn < SHARES[0] + SHARES[1] else 2
        pool = next(p for p in (pools[wanted], *pools) if p)
        given = pool.pop(0)
        key = str(given.command) if isinstance(given, Input) else given.name
        if key in seen:
            continue
        seen.add(key)
        number += 1
        if isinstance(given, Input):
            yield Case("inputs", number, key, lambda folder, g=given: _line(g))
        else:
            yield Case("inputs", number, key, lambda folder, g=given: _file(folder, g))


def _line(given: Input) -> Steps:
    return judge((yield given.command), given.must)


def _file(folder: Path, given: Malformed) -> Steps:
    return judge((yield given.make(folder)), given.must)
