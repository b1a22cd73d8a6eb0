"""SVRG in the class: its protocol is the rule's, and goes on from a checkpoint, a copy
and a pickle as if uninterrupted.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import marsopt
from marsopt import MARS, REGISTRY
from tests.stacking import equal, forced, traced
from tests.table import steady

SHAPES = {"a": (6, 4), "b": (6, 4), "tall": (5, 3), "bias": (4,)}
TYPES = [name for name, rule in REGISTRY.items() if rule.is_mars]
LR, PERIOD = 0.02, 3
OWN = dict(
    lr=LR, correction="svrg", gamma=0.5, ns_dtype=torch.float64, optimize_1d=True
)


def values(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in SHAPES.items()
    }


def gradient(batch: int, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of another loss, which is no quadratic, for every batch."""
    return {n: torch.tanh(x[n] - c) + 0.1 * c for n, c in values(100 + batch).items()}


def full(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mean over all batches."""
    every = [gradient(batch, x) for batch in range(8)]
    return {n: sum(g[n] for g in every) / len(every) for n in x}


class Run:
    """The protocol over a class."""

    def __init__(self, mode: str, **kwargs) -> None:
        self.params = {n: nn.Parameter(v) for n, v in values(0).items()}
        own = OWN | dict(compile=mode != "eager") | kwargs
        self.optimizer = MARS(self.params.items(), **own)

    def put(self, gradient) -> None:
        """Let ``p.grad`` be that at what parameters hold."""
        found = gradient({n: p.detach() for n, p in self.params.items()})
        for n, p in self.params.items():
            p.grad = found[n]

    def go(self, steps) -> None:
        with traced():
            for t in steps:
                if t % PERIOD == 0:
                    self.put(full)
                    self.optimizer.update_anchor()
                with self.optimizer.at_snapshot():
                    self.put(lambda x, t=t: gradient(t, x))
                    self.optimizer.update_previous_grad()
                self.put(lambda x, t=t: gradient(t, x))
                self.optimizer.step()


def by_rule(mars_type: str, steps: int, **kwargs) -> dict[str, torch.Tensor]:
    """The same steps by the rule, at a snapshot that is kept here."""
    own = {name: value for name, value in OWN.items() if name != "lr"} | kwargs
    rule = marsopt.mars(mars_type=mars_type, base_lr=LR, **own)
    x = snapshot = values(0)
    state = rule.init(x)
    for t in range(steps):
        if t % PERIOD == 0:
            state, snapshot = rule.anchor(x, full(x), state), x
        given = dict(lr=LR, reference=gradient(t, snapshot))
        x, state = rule.step(x, gradient(t, x), state, **given)
    return x


@pytest.mark.parametrize("mode", ["eager", "stacks"])
@pytest.mark.parametrize("clip", [None, 0.3], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("mars_type", TYPES)
def test_the_protocol_is_the_rule(mars_type, clip, mode, monkeypatch):
    forced(monkeypatch, mode)
    own = dict(clip=clip, **steady(mars_type))
    run = Run(mode, mars_type=mars_type, **own)
    run.go(range(7))
    want = by_rule(mars_type, 7, **own)
    equal(run.params.values(), want.values(), 1e-12)


@pytest.mark.parametrize("how", ["checkpoint", "copy", "pickle"])
@pytest.mark.parametrize("mars_type", TYPES)
def test_it_goes_on_as_if_uninterrupted(mars_type, how):
    whole, run = (Run("eager", mars_type=mars_type) for _ in range(2))
    whole.go(range(8))
    run.go(range(4))  # the anchor is some steps old
    if how == "checkpoint":
        file = io.BytesIO()
        weights = {n: p.detach() for n, p in run.params.items()}
        torch.save((weights, run.optimizer.state_dict()), file)
        file.seek(0)
        run = Run("eager", mars_type=mars_type)
        weights, state = torch.load(file)
        with torch.no_grad():
            for n, p in run.params.items():
                p.copy_(weights[n])
        run.optimizer.load_state_dict(state)
    else:
        again = {
            "copy": copy.deepcopy,
            "pickle": lambda o: pickle.loads(pickle.dumps(o)),
        }
        run.optimizer = again[how](run.optimizer)
        run.params = dict(
            zip(SHAPES, run.optimizer.param_groups[0]["params"], strict=True)
        )
    run.go(range(4, 8))
    equal(run.params.values(), whole.params.values())
    for p, q in zip(run.params.values(), whole.params.values(), strict=True):
        mine, want = run.optimizer.state[p], whole.optimizer.state[q]
        assert mine.keys() == want.keys() >= {"snapshot", "anchor_grad"}
        assert all(torch.equal(mine[key], want[key]) for key in want)


def test_gamma_zero_is_the_plain_rule():
    run = Run("eager", mars_type="mars-adamw", gamma=0.0, clip=None)
    run.go(range(4))
    plain = {n: nn.Parameter(v) for n, v in values(0).items()}
    adamw = MARS(plain.values(), lr=LR, mars_type="adamw", betas=(0.95, 0.99),
                 weight_decay=0.0, compile=False)  # fmt: skip
    for t in range(4):
        found = gradient(t, {n: p.detach() for n, p in plain.items()})
        for n, p in plain.items():
            p.grad = found[n]
        adamw.step()
    equal(run.params.values(), plain.values(), 1e-12)


def test_parameters_are_the_snapshot_inside_and_come_back_after_an_error():
    run = Run("eager")
    run.go(range(2))
    before = [p.detach().clone() for p in run.params.values()]
    first = values(0)
    with pytest.raises(KeyError), run.optimizer.at_snapshot():
        equal(run.params.values(), first.values())
        raise KeyError
    equal(run.params.values(), before)


def test_lines_that_are_left_out_are_named():
    run = Run("eager")
    run.put(full)
    with pytest.raises(RuntimeError, match="without an anchor"):
        run.optimizer.update_previous_grad()
    run.optimizer.update_anchor()
    with pytest.raises(RuntimeError, match="at the current parameters"):
        run.optimizer.update_previous_grad()
    with pytest.raises(RuntimeError, match="without the batch's gradient"):
        run.optimizer.step()
    with run.optimizer.at_snapshot():
        run.optimizer.update_previous_grad()
        with pytest.raises(RuntimeError, match="without the batch's gradient"):
            run.optimizer.step()
    run.optimizer.step()
    with pytest.raises(RuntimeError, match="without the batch's gradient"):
        run.optimizer.step()  # h is of the batch before


@pytest.mark.parametrize("correction", ["approximate", "exact", "transport"])
def test_anchors_are_nothing_to_other_corrections(correction):
    run = Run("eager", correction=correction)
    run.put(full)
    before = copy.deepcopy(run.optimizer.state_dict()["state"])
    with run.optimizer.at_snapshot():
        run.optimizer.update_anchor()
        equal(run.params.values(), values(0).values())
    torch.testing.assert_close(run.optimizer.state_dict()["state"], before)


@pytest.mark.parametrize("name", ["mars_adamw", "adamw"])
def test_a_rule_without_an_anchor_refuses_one(name):
    rule, x = marsopt.rule(name), values(0)
    with pytest.raises(ValueError, match=r'choose correction="svrg"'):
        rule.anchor(x, x, rule.init(x))
