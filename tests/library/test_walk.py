"""How much of the library a reader of one step meets: the files and functions of
marsopt that a warm step enters, and the classes whose methods it enters. Ceilings only
fall.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import marsopt
from tests.messages import pretended

ROOT = str(Path(marsopt.__file__).parent)


def entered(step):
    """Return the files, the functions and the classes that a call enters."""
    files, functions, classes = set(), set(), set()

    def note(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT):
            return
        files.add(code.co_filename.removeprefix(ROOT))
        functions.add((code.co_filename, code.co_firstlineno, code.co_name))
        kind = type(frame.f_locals.get("self"))
        if kind.__module__.startswith("marsopt"):
            classes.add(kind)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return files, functions, classes


def third_step(model, rule):
    """Return what the third step enters, under a schedule."""
    optimizer = marsopt.for_model(model, rule, lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for number in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        if number == 2:
            return entered(optimizer.step)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    raise AssertionError


def small_model():
    torch.manual_seed(0)
    linear, norm = nn.Linear, nn.LayerNorm(96)
    return nn.Sequential(linear(64, 96), norm, linear(96, 96), linear(96, 64))


def check(found, most):
    nums = tuple(map(len, found))
    listed = "\n".join(sorted(map(str, (*found[0], *found[1], *found[2]))))
    assert all(a <= b for a, b in zip(nums, most, strict=True)), f"{nums}\n{listed}"


def test_a_warm_step_of_mars_adamw_by_graphs():
    check(third_step(small_model(), "mars-adamw"), (11, 83, 13))


@pytest.mark.processes
def test_a_warm_step_of_moonlight_under_fsdp2():
    with pretended(0, (1,)) as mesh:
        model = small_model()
        fully_shard(model, mesh=mesh)
        check(third_step(model, "moonlight"), (15, 157, 18))
