"""The command benchmarks.gpu.rehearsal.host, and the same watch over defects that are
put into the step: what it finds there, by name.

    python -m tests.rehearsal_host --json FILE
"""

import sys
from pathlib import Path
from unittest import mock

import torch

from benchmarks.gpu.rehearsal.device import h100
from benchmarks.gpu.rehearsal.host import Case, play, play_all, to_dict
from marsopt.optim.layout import Layout
from train.files import write_json

count, gather = Layout.count, Layout.gather


def asks(layout, decision, skipped):
    decision.finite.item()
    count(layout, decision, skipped)


def synchronizes(layout, decision, skipped):
    torch.cuda.synchronize()
    count(layout, decision, skipped)


def selects(layout, decision, skipped):
    decision.finite[None].nonzero()
    count(layout, decision, skipped)


def sends(layout):
    groups, live = gather(layout)
    return groups, torch.tensor([True] * len(live)).to(live.device, non_blocking=True)


def scales(layout, decision, skipped):
    skipped.mul_(torch.ones((), dtype=torch.int64))  # a number of the host
    count(layout, decision, skipped)


MUTANTS = {
    "asks": (Layout, "count", asks),
    "synchronizes": (Layout, "count", synchronizes),
    "selects": (Layout, "count", selects),
    "sends": (Layout, "gather", sends),
    "scales": (Layout, "count", scales),
}


def mutants():
    found = []
    with h100(triton=False):
        for name, (where, method, defect) in MUTANTS.items():
            with mock.patch.object(where, method, defect):
                found.append(play(Case(name)))
    return to_dict(found)


if __name__ == "__main__":
    write_json(Path(sys.argv[2]), dict(cases=to_dict(play_all()), mutants=mutants()))
