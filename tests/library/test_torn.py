"""A step that an exception breaks off, wherever it strikes: it has changed nothing, or
the optimizer refuses to go on and to be saved.
"""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import marsopt
from marsopt import MARS
from tests.stacking import (
    as_on_a_gpu,
    copies,
    equal,
    fill,
    forced,
    in_one_buffer,
    traced,
)

OURS = str(Path(marsopt.__file__).parent)
SHAPES = ((4, 3), (4, 3), (3,))
REFUSED = "in the midst of a step"


class Broken(BaseException):
    """As KeyboardInterrupt."""


def broken_off(call: Callable[[], object], number: int) -> bool:
    """Run ``call``, and raise where our code is about to make its ``number``-th call of
    anything; return whether it came that far.
    """
    left = number

    def watch(frame, event, _) -> None:
        nonlocal left
        if event not in ("call", "c_call"):
            return
        caller = frame if event == "c_call" else frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(OURS):
            if frame.f_code.co_flags & inspect.CO_GENERATOR:
                return  # may be its end, where exceptions are lost
            left -= 1
            if left < 0:
                raise Broken

    gc.disable()  # exceptions are lost in its callbacks, too
    sys.setprofile(watch)
    try:
        call()
    except Broken:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    assert left >= 0, "somebody has caught what was raised"
    return False


def bits(optimizer: MARS) -> list[torch.Tensor]:
    """All that a step may change."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [v for p in every for v in optimizer.state[p].values()]
    return [v.detach().clone() for v in (*every, *kept)]


def same(a, b) -> bool:
    return all(map(torch.equal, a, b))


class Cycle:
    """The calls of one step on given gradients, from one snapshot."""

    def __init__(self, optimizer: MARS, params: list[torch.Tensor], kind: str) -> None:
        self.optimizer, self.params = optimizer, params
        self.calls = {
            "approximate": [optimizer.step],
            "exact": [
                optimizer.update_previous_grad,
                optimizer.step,
                optimizer.update_last_grad,
            ],
        }[kind]
        self.snap()

    def snap(self) -> None:
        self.start = copies(self.params), copy.deepcopy(self.optimizer.state_dict())

    def go(self, num_calls: int) -> None:
        """Go back to the snapshot, and on by so many calls."""
        values, state = self.start
        self.optimizer.load_state_dict(copy.deepcopy(state))
        with torch.no_grad():
            for p, value in zip(self.params, values, strict=True):
                p.copy_(value)
        for call in self.calls[:num_calls]:
            call()

    def breaks(self, number: int) -> tuple[int, int]:
        """Break the call of this number off everywhere; return how often it had changed
        nothing, and how often it was refused from then on.
        """
        call, untouched, refused = self.calls[number], 0, 0
        self.go(number + 1)
        after = bits(self.optimizer)
        self.go(number)
        before = bits(self.optimizer)
        for at in itertools.count():
            if not broken_off(call, at):
                assert same(bits(self.optimizer), after)
                return untouched, refused
            if self.optimizer.describe().is_torn:
                for later in (self.optimizer.state_dict, self.optimizer.step):
                    with pytest.raises(RuntimeError, match=REFUSED):
                        later()
                refused += 1
                self.go(number)
                continue
            assert same(bits(self.optimizer), before), f"at boundary {at}"
            untouched += 1
            if untouched % 10 == 0:  # all before have left nothing behind, too
                call()
                assert same(bits(self.optimizer), after), f"again, at boundary {at}"
                self.go(number)


def parameters() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def apart_in_one_buffer() -> list[torch.Tensor]:
    """They cannot move: a step copies them into stacks and back, as FSDP's shards. The
    last comes between the two of one shape, which would be a stack as they lie.
    """
    first, second, last = parameters()
    first, last, second = in_one_buffer([first, last, second])
    return [first, second, last]


# every mode, correction and kind of page; a case takes a step a call of ours
CASES = [
    ("mars-adamw", "approximate", "eager"),
    ("mars-adamw", "exact", "copied"),
    ("mars-normuon", "approximate", "stacks"),
]


@pytest.mark.parametrize(("mars_type", "kind", "mode"), CASES)
def test_broken_off_anywhere(mars_type, kind, mode, monkeypatch):
    if mode == "copied":
        as_on_a_gpu(monkeypatch)
    else:
        forced(monkeypatch, mode)
    params = apart_in_one_buffer() if mode == "copied" else parameters()
    optimizer = MARS(
        params, lr=0.01, mars_type=mars_type, correction=kind, max_norm=1.0,
        compile=mode == "stacks", ns_dtype=torch.float32,
    )  # fmt: skip
    cycle = Cycle(optimizer, params, kind)
    with traced():
        for seed in range(2):
            fill(params, seed)
            for call in cycle.calls:
                call()
        cycle.snap()
        for number, call in enumerate(cycle.calls):
            untouched, refused = cycle.breaks(number)
            assert untouched > 3, call
            assert (refused > 3) == (call != optimizer.update_previous_grad), call


def torn() -> tuple[MARS, list[torch.Tensor], dict]:
    """An optimizer whose first step is broken off, and its state dict from before."""
    params = parameters()
    optimizer = MARS(params, lr=0.01, compile=False)
    fill(params, 0)
    before, at = optimizer.state_dict(), 0
    while not optimizer.describe().is_torn:
        assert broken_off(optimizer.step, at)
        at += 1
    return optimizer, params, before


def test_what_was_broken_off_is_neither_saved_nor_copied():
    optimizer, *_ = torn()
    for copied in (optimizer.state_dict, partial(copy.deepcopy, optimizer)):
        with pytest.raises(RuntimeError, match=REFUSED):
            copied()
    with pytest.raises(RuntimeError, match=REFUSED):
        pickle.dumps(optimizer)


def test_a_checkpoint_is_the_way_back(caplog):
    params = parameters()
    whole = MARS(params, lr=0.01, compile=False)
    fill(params, 0)
    whole.step()
    optimizer, others, _ = torn()
    with pytest.raises(ValueError, match="state dict of 1 parameters"):
        optimizer.load_state_dict(
            MARS([nn.Parameter(torch.ones(3))], compile=False).state_dict()
        )
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.step()
    optimizer.load_state_dict(whole.state_dict())
    assert "load the model's parameters" in caplog.text
    with torch.no_grad():
        for p, value in zip(others, params, strict=True):
            p.copy_(value)
    for each, mine in ((whole, params), (optimizer, others)):
        fill(mine, 1)
        each.step()
    equal(params, others)


def test_its_own_tensors_are_no_checkpoint():
    optimizer, _, alias = torn()
    with pytest.raises(RuntimeError, match="own tensors"):
        optimizer.load_state_dict(alias)
    optimizer.load_state_dict(copy.deepcopy(alias))
    optimizer.step()


@pytest.mark.parametrize("part", ["assess_alone", "update_"])
def test_a_backend_that_cannot_compile_has_written_nothing(part, monkeypatch):
    """With compile=True that is an error, whichever graph comes first to fail. Where
    writing had begun, nobody asks how far it had come.
    """

    def failing(function, **options):
        def fail(*_):
            raise BackendCompilerFailed(fail, RuntimeError("no such machine"), None)

        return fail if function.__name__ == part else function

    monkeypatch.setattr(torch, "compile", failing)
    params = parameters()
    optimizer = MARS(params, lr=0.01, compile=True)
    fill(params, 0)
    before = bits(optimizer)
    with pytest.raises(BackendCompilerFailed):
        optimizer.step()
    assert same(bits(optimizer), before)
    if part == "update_":
        with pytest.raises(RuntimeError, match=REFUSED):
            optimizer.state_dict()
    else:
        optimizer.state_dict()
