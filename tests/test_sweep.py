"""Which runs a comparison needs next: on made-up losses, without training."""

from __future__ import annotations

import math

import pytest

from train.compare.sweep import (
    WIDEST,
    Run,
    default_grid,
    is_inside,
    next_rates,
    next_runs,
    num_to_come,
)


def play(grids, num_seeds, loss, failing=()):
    """Train everything a comparison asks for, in its order; (losses, order)."""
    losses, order, failed = {}, [], set()
    while runs := next_runs(grids, num_seeds, losses, failed):
        order.append(runs[0])
        if runs[0] in failing:
            failed.add(runs[0])
        else:
            losses[runs[0]] = loss(runs[0])
    return losses, order


def valley(optimum):
    return lambda run: abs(math.log(run.lr / optimum)) + 0.01 * run.seed


def test_default_grid_is_half_once_and_twice_the_recipe():
    assert default_grid(6e-3) == (3e-3, 6e-3, 1.2e-2)


def test_an_optimum_inside_needs_no_more_rates():
    assert next_rates([1, 2, 4], {1: 2.0, 2: 1.0, 4: 2.0}) == []


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ({1: 1.0, 2: 2.0, 4: 3.0}, [0.5]),
        ({1: 3.0, 2: 2.0, 4: 1.0}, [8]),
        ({1: math.inf, 2: math.inf, 4: math.inf}, [0.5]),
        ({1: 3.0, 2: 2.0, 4: 1.0, 8: 1.5}, []),
        ({1: 3.0, 2: 2.0, 4: 1.0, 8: math.inf}, []),
        ({1: 3.0, 4: 1.0}, [2]),
    ],
    ids=["lower", "upper", "all diverged", "widened", "diverged above", "unfinished"],
)
def test_an_edge_widens_the_grid(losses, wanted):
    assert next_rates([1, 2, 4], losses) == wanted


def test_one_rate_is_a_choice():
    assert next_rates([1], {}) == [1]
    assert next_rates([1], {1: 5.0}) == []


@pytest.mark.parametrize("optimum", [1e-5, 2e-3, 1.0])
def test_widening_finds_the_optimum_or_gives_up(optimum):
    losses, _ = play({"a": [1e-3, 2e-3, 4e-3]}, 1, valley(optimum))
    rates = {run.lr: loss for run, loss in losses.items()}
    found = is_inside(rates) and 0.5 < min(rates, key=rates.get) / optimum < 2
    assert found or len(rates) == 3 + WIDEST


def test_a_recipe_that_always_diverges_ends():
    losses, order = play({"a": [1.0, 2.0, 4.0]}, 3, lambda run: math.inf)
    assert len(order) == 3 + WIDEST
    assert {run.seed for run in order} == {0}


def test_seeds_follow_at_the_best_rate_alone():
    losses, order = play({"a": [1, 2, 4], "b": [1, 2, 4]}, 3, valley(2))
    for config in "ab":
        mine = [(run.lr, run.seed) for run in order if run.config == config]
        assert mine == [(1, 0), (2, 0), (4, 0), (2, 1), (2, 2)]


def test_a_failed_run_stops_its_recipe_alone():
    bad = Run("a", 2, 0)
    losses, order = play({"a": [1, 2, 4], "b": [1, 2, 4]}, 2, valley(2), {bad})
    assert [run for run in losses if run.config == "a"] == [
        Run("a", 1, 0),
        Run("a", 4, 0),
    ]
    assert Run("b", 2, 1) in losses
    assert order.count(bad) == 1


def test_a_failed_seed_does_not_stop_the_others():
    bad = Run("a", 2, 1)
    losses, _ = play({"a": [1, 2, 4]}, 3, valley(2), {bad})
    assert Run("a", 2, 2) in losses


def test_rates_tried_before_count_whatever_the_grid_says_now():
    """A wider grid of an earlier call, and what widening added, are not tried again."""
    losses = {Run("a", lr, 0): abs(lr - 8) for lr in (2, 4, 8, 16)}
    assert next_runs({"a": [2, 4]}, 2, losses) == [Run("a", 8, 1)]


@pytest.mark.parametrize("optimum", [2, 4])
def test_what_is_to_come_is_never_less_than_announced(optimum):
    grids, losses = {"a": [1, 2, 4]}, {}
    announced = []
    while runs := next_runs(grids, 3, losses):
        announced.append(len(losses) + num_to_come(grids, 3, losses)["a"])
        losses[runs[0]] = valley(optimum)(runs[0])
    assert announced[0] == 5
    assert announced == sorted(announced)
    assert announced[-1] == len(losses)


def test_a_stuck_recipe_promises_nothing():
    bad = Run("a", 1, 0)
    assert num_to_come({"a": [1]}, 3, {}, {bad}) == {"a": 0}
