"""The benchmarks of a step: what they print, write and refuse, on one small layer."""

from __future__ import annotations

import io
import json
import statistics
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec

import pytest
import torch

from benchmarks import memory, muons, peers, sharded, step
from benchmarks.contenders import OURS, REFERENCE, TORCH
from benchmarks.measure import plan, walk
from benchmarks.timing import spread, take_turns
from benchmarks.workload import EMBEDDING, Gradients, parameters
from marsopt import REGISTRY
from marsopt.profiling.gpt2 import shapes
from marsopt.step import compiling
from tests.processes import spawn
from train.errors import UserError

CPU = torch.device("cpu")
SMALL = ["--layers", "1", "--vocab", "64", "--rounds", "2"]
# Stands in for the authors' file: the constructor, the exact mode's protocol and the
# alias of p.grad that theirs has. Its rule is gradient descent with a sibling's rate.
AUTHORS = """
import torch

from .rates import rate


class MARS(torch.optim.Optimizer):
    def __init__(self, params, lr=3e-3, betas=(0.95, 0.99), eps=1e-8, weight_decay=0.0,
                 amsgrad=False, gamma=0.025, is_approx=True, mars_type="mars-adamw",
                 optimize_1d=False, lr_1d=3e-3, betas_1d=(0.9, 0.95),
                 weight_decay_1d=0.1):
        super().__init__(params, dict(lr=lr))

    def every(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self):
        for p in self.every():
            p.add_(p.grad, alpha=-rate)
            self.state[p]["last_grad"] = p.grad

    def update_previous_grad(self):
        self.kept = [p.grad.clone() for p in self.every()]

    def update_last_grad(self):
        del self.kept
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("authors")
    file = folder / peers.AUTHORS_FILE
    file.parent.mkdir(parents=True)
    file.write_text(AUTHORS)
    file.with_name("rates.py").write_text("rate = 0.1\n")
    return folder


def narrow(monkeypatch) -> None:
    """From now on the model has a layer of width 64."""
    monkeypatch.setitem(step.MODELS, "gpt2-small", (1, 64))


def call(monkeypatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["step", *map(str, args)])
    step.main()


CHOSEN = [
    "mars-adamw",
    "mars-adamw-exact",
    "mars-shampoo",
    "adamw",
    "adamw-fused",
    "clip-adamw-foreach",
    "peers",
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory, checkout):
    """The command's JSON, its output, and the folder of its files."""
    folder = tmp_path_factory.mktemp("step")
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(told):
        narrow(patch)
        call(patch, *SMALL, "--eager", "--only", *CHOSEN, "--authors", checkout,
             "--json", folder / "a.json")  # fmt: skip
    return json.loads((folder / "a.json").read_text()), told.getvalue(), folder


def contenders(checkout=None):
    return [REFERENCE, *OURS, *TORCH, *peers.table(checkout)]


def test_every_rule_is_a_contender():
    assert set(REGISTRY) <= {c.key for c in OURS}


def test_every_contender_is_measured_or_named_as_missing(ran, checkout):
    report, told, _ = ran
    asked = step.choose(contenders(checkout), CHOSEN, [])
    measured = [row["key"] for row in report["rows"]]
    assert sorted(measured) == sorted(c.key for c in asked if not c.lacks)
    assert set(report["missing"]) == {c.title for c in asked if c.lacks}
    for c in asked:
        line = next(line for line in told.splitlines() if line.startswith(c.title))
        installed = c.package is None or find_spec(c.package) is not None
        assert ("not installed: pip install" in line) == (not installed)


def test_the_figures_agree_with_each_other(ran):
    report, _, _ = ran
    rows = {row["key"]: row for row in report["rows"]}
    table = {c.key: c for c in contenders()}
    assert rows[REFERENCE.key]["ratio"] == dict(median=1.0, low=1.0, high=1.0)
    for key, row in rows.items():
        ratio, num_groups = row["ratio"], report["num_groups"]
        assert len(row["times"]) == 2 * (num_groups if key == REFERENCE.key else 1)
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert row["seconds"]["median"] == statistics.median(row["times"])
        assert row["peak_bytes"] >= 0
        # flat copies of small tensors, which stay on a CPU, weigh in so small a model
        copies = 2 if table[key].family == "ours" else 0.1
        bytes_each = row["state_bytes_per_parameter"]
        assert 3.9 < bytes_each < 4 * table[key].num_buffers + copies, key
    assert 12 <= rows["mars-adamw"]["state_bytes_per_parameter"] < 14
    # a fourth buffer, which is not in optimizer.state
    assert 16 <= rows["mars-adamw-exact"]["state_bytes_per_parameter"] < 18


def test_all_saw_the_same_gradients(ran):
    """Who means the same ends at the same parameters, whatever the others clipped."""
    rows = {row["key"]: row for row in ran[0]["rows"]}
    assert rows[REFERENCE.key]["distance"] < 1e-5
    assert rows["clip-adamw-foreach"]["distance"] < 1e-5
    assert rows["mars-adamw"]["distance"] is None
    assert rows["authors-mars-adamw"]["distance"] > 0.1  # gradient descent


def test_a_missing_compiler_is_said_in_one_line(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiling.missing_for.cache_clear()
    with pytest.raises(UserError, match="no C.. compiler .* --eager"):
        call(monkeypatch, *SMALL, "--only", "lion")
    compiling.missing_for.cache_clear()


def test_a_kept_gradient_stays_what_it_was():
    """Of a step that aliases p.grad, when another contender clips the next ones."""
    tensors = shapes(0, 768, 64)
    gradients = Gradients(tensors, CPU)
    gradients.draw()
    mine, other = parameters(tensors, CPU), parameters(tensors, CPU)
    entry = TORCH[0].build(mine, False)

    def taken(params):
        """The gradient's tensor, as a step that keeps it would have it."""
        found = []

        def measured(phase):
            found.append(params[EMBEDDING].grad)
            phase()
            return 0.0

        walked = entry if params is mine else REFERENCE.build(other, False)
        walk(walked, params, gradients, measured)
        assert params[EMBEDDING].grad is None  # zero_grad is part of the step
        return found[0]

    kept = taken(mine)
    before = kept.clone()
    assert not torch.equal(taken(other), before)  # clipped in place
    assert torch.equal(kept, before)
    gradients.draw()
    assert not torch.equal(taken(mine), before)
    assert torch.equal(kept, before)


def test_gradients_keep_both_clips_at_work():
    tensors = shapes(1, 768, 64)
    gradients, params = Gradients(tensors, CPU), parameters(tensors, CPU)
    gradients.draw()
    gradients.hand_to(params, 1.0)
    norms = {name: p.grad.norm() for name, p in params.items()}
    assert torch.stack(list(norms.values())).norm() == pytest.approx(3.0, rel=0.01)
    # clipped to 1 and corrected with a gradient that it has nothing in common with
    corrected = {n: v / 3.0 * (1.475**2 + 0.475**2) ** 0.5 for n, v in norms.items()}
    assert [name for name, norm in corrected.items() if norm > 1] == [EMBEDDING]


def test_peak_memory_counts_what_is_held_at_once():
    def step():
        a = torch.ones(1000, 1000)
        b = a + 1
        del a
        return (b * 2).sum().item()

    assert memory.peak_bytes(step, CPU) == pytest.approx(8e6, rel=1e-3)


def test_groups_fit_and_each_holds_the_reference():
    rows = contenders()
    num_params, budget = 124_373_760, 12 * 2**30
    groups = plan(rows, num_params, budget)
    assert len(groups) > 1
    assert all(group[0] is REFERENCE for group in groups)
    assert {c.key for group in groups for c in group} == {c.key for c in rows}
    assert sum(len(group) - 1 for group in groups) == len(rows) - 1
    assert all(len({c.matrix for c in group[1:]}) == 1 for group in groups)
    for group in groups:
        assert 4 * num_params * sum(1 + c.num_buffers for c in group) < budget
    with pytest.raises(UserError, match=r"got 1\.0 GiB .* expected \d+\.\d for"):
        plan(rows, num_params, 2**30)


def test_turns_rotate():
    order = []
    steps = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    times = take_turns(steps, 4, lambda: order.append("|"))
    assert "".join(order) == "|abc|bca|cab|abc"
    assert times == {name: [1.0] * 4 for name in "abc"}
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == (3.0, 2.0, 4.0)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--only", "adamw-fast"], "got contender 'adamw-fast', expected one that"),
        (["--json", "nowhere/a.json"], "got nowhere/a.json to write to"),
        (["--rounds", "1"], "got --rounds 1, expected at least 2"),
        (["--authors", "nowhere"], "expected a checkout of AGI-Arena/MARS"),
        (["--memory", "0.02"], "got 0.0 GiB to plan with"),
    ],
)
def test_bad_input(monkeypatch, args, message):
    with pytest.raises(UserError, match=message):
        call(monkeypatch, *SMALL, *args)


def sharded_rows(rank, world):
    with torch.compiler.set_stance("force_eager"):
        return sharded.measure(layers=1, width=16, num_rounds=2)


@pytest.mark.processes
def test_sharded_steps_send_what_is_promised():
    """One all-reduce, two all-to-all for each of two buckets, 2mn/p bf16 numbers."""
    world, numel = 2, 12 * 16 * 16
    found, _ = spawn(sharded_rows, world)
    rows = {row.title: row for row in found}
    ours = rows[muons.OURS.title]
    assert ours.collectives == dict(all_reduce=1, all_to_all=4)
    model = 2 * numel * 2 / world * (world - 1) / world
    assert model < ours.bytes_sent < model + 2000  # gloo's headers, and the norms
    assert rows[muons.WHOLE.title].collectives == {}
    ddp, whole = rows["marsopt Muon, DataParallel"], rows[muons.WHOLE.title]
    assert ddp.collectives == dict(all_gather=2)
    # the larger part of four matrices is 7 / 12; results travel in bfloat16
    assert ddp.bytes_sent < 7 / 12 * numel * 2 + 2000
    assert ddp.bytes_held == whole.bytes_held
    assert rows["ZeroRedundancyOptimizer(MARS)"].bytes_held < whole.bytes_held
    for row in found:
        assert row.off_by is None or row.off_by[0] < 0.05, row.title
    told = sharded.table(found)
    assert "1 all_reduce, 4 all_to_all" in told
    assert all(c.title in told for c in muons.CONTENDERS)
