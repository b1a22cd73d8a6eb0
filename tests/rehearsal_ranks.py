"""The command benchmarks.gpu.rehearsal.ranks with few layers, and two defects: a second
all-reduce in every step, and a number sent to the device in every step.

    python -m tests.rehearsal_ranks --json FILE
"""

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.gpu.rehearsal import ranks
from benchmarks.gpu.rehearsal.ranks import CASES, Case, play_all, to_dict
from marsopt.parallel import MeshCollectives
from train.files import write_json

LAYERS = 2
# so few ranks share the owners' work between replicas, with so few layers
MORE = (Case("mars-m", "transport", (2, 4), 3),)
add = MeshCollectives.sum


def adds_twice(collectives, sums, leaves, alike=None):
    sums = add(collectives, sums, leaves, alike)
    dist.all_reduce(sums.clone(), group=collectives.mesh.get_group(0))
    return sums


def sends(collectives, sums, leaves, alike=None):
    return add(collectives, sums, leaves, alike) * torch.tensor(1.0).to(sums.device)


def mutants():
    found = {}
    # the forecast runs the same code, so that it is made without the defect
    expected = ranks.forecast_of(CASES[0], LAYERS)
    for defect in (adds_twice, sends):
        with (
            mock.patch.object(ranks, "forecast_of", lambda *_: expected),
            mock.patch.object(MeshCollectives, "sum", defect),
        ):
            found[defect.__name__] = to_dict(play_all(CASES[:1], LAYERS))[0]
    return found


if __name__ == "__main__":
    cases = to_dict(play_all(CASES + MORE, LAYERS))
    write_json(Path(sys.argv[2]), dict(cases=cases, mutants=mutants()))
