"""The study of SVRG: its command on sizes that show nothing, and what it counts."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from benchmarks.svrg import __main__ as study
from benchmarks.svrg.errors import ALPHAS, errors
from benchmarks.svrg.loop import Point, Run
from train.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens")
    chain = np.cumsum(np.random.default_rng(0).integers(1, 4, 4000)) % 97
    for name in ("train.bin", "val.bin"):
        chain.astype("<u2").tofile(path / name)
    return path


def test_the_command_counts_what_every_method_takes(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["svrg", "--quick", "--data", str(folder)])
    monkeypatch.setattr(study, "FIRST_LR", 0.032)
    chosen = [m for m in study.METHODS if m == study.PLAIN or m.decays]
    monkeypatch.setattr(study, "METHODS", chosen)
    study.main()
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines if len(cells) > 1}
    num_steps = study.QUICK.epochs * study.QUICK.num_batches
    for method in chosen:
        _, num_gradients, *losses = rows[method.title]
        # of a batch, at the snapshot, and of the training set once an epoch
        times = 3 if method.correction == "svrg" else 1
        assert int(num_gradients) == times * num_steps
        at_the_end, at_equal_gradients = losses[:2], losses[2:]
        assert (at_the_end == at_equal_gradients) == (times == 1)
        assert all(0 < float(cell.split(" ± ")[0]) < math.log(257) for cell in losses)


def test_the_error_of_svrg_is_least_at_the_best_alpha(folder):
    """Its mean square is a parabola in alpha, which is 1 at 0."""
    run = Run(folder, study.QUICK, study.PLAIN, lr=0.02, seed=0)
    found = dict(errors(run, 0.9, 0.025))
    assert len(found) == 2 * 3  # of 3 epochs the second is the middle; step 1 twice
    for ratios in found.values():
        small, half, whole = (ratios[f"SVRG, alpha {a:g}"] for a in ALPHAS)
        curvature = 2 * (whole - 1) - 4 * (half - 1)
        slope = whole - 1 - curvature
        assert small == pytest.approx(1 + slope / 4 + curvature / 16, rel=1e-3)
        best = ratios["best alpha"]
        assert best == pytest.approx(-slope / (2 * curvature), rel=1e-3)
        least = 1 + slope * best + curvature * best**2
        assert ratios["SVRG at it"] == pytest.approx(least, abs=1e-3)
        assert ratios["approximate"] > ratios["exact"] > 1


@pytest.mark.parametrize("best", [-4, 0, 3])
def test_rates_are_tried_until_the_best_has_neighbours(best):
    tried = []

    def train(lr, seed):
        i = round(math.log2(lr / study.FIRST_LR))
        tried.append((i, seed))
        return [Point(1, abs(i - best), 0.0)]

    lr, num_tried, runs = study.tuned(train)
    assert lr == study.FIRST_LR * 2.0**best
    assert {(best - 1, 0), (best, 0), (best + 1, 0)} <= set(tried)
    assert num_tried == sum(seed == 0 for _, seed in tried) == len(set(tried)) - 2
    assert [points[-1].held_out for points in runs] == [0] * study.SEEDS


def test_a_text_that_is_too_short_is_refused(folder):
    with pytest.raises(
        UserError, match="got 4,000 tokens in .*train.bin, expected 16,"
    ):
        Run(folder, study.FULL, study.PLAIN, lr=0.02, seed=0)
