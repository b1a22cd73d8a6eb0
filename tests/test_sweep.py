"""Which runs a comparison needs next: on made-up losses, without training."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from train.compare.sweep import (
    WIDEST,
    Run,
    Sweep,
    default_grid,
    next_runs,
    num_to_come,
    option_axes,
    search,
)


def rates(config, grid, **options):
    """A sweep that starts at the middle rate, and at its options' first values."""
    own = {name: values[0] for name, values in options.items()}
    return Sweep.of(config, grid, grid[len(grid) // 2], options, own)


def play(sweeps, num_seeds, loss, failing=(), choose=lambda runs: runs[0]):
    """Train everything a comparison asks for, in its order; (losses, order)."""
    losses, order, failed = {}, [], set()
    while runs := next_runs(sweeps, num_seeds, losses, failed):
        order.append(run := choose(runs))
        if run in failing:
            failed.add(run)
        else:
            losses[run] = loss(run)
    return losses, order


def valley(optimum):
    return lambda run: abs(math.log(run.lr / optimum)) + 0.01 * run.seed


def known(grid, losses):
    """How far a sweep of rates alone is, given {rate: loss}."""
    sweep = rates("a", grid)
    return search(sweep, {Run("a", lr, 0): loss for lr, loss in losses.items()})


# ---- rates alone ---------------------------------------------------------------------


def test_default_grid_is_half_once_and_twice_the_recipe():
    assert default_grid(6e-3) == (3e-3, 6e-3, 1.2e-2)


def test_an_optimum_inside_needs_no_more_rates():
    found = known([1, 2, 4], {1: 2.0, 2: 1.0, 4: 2.0})
    assert found.wanted == []
    assert found.best == ("2",)
    assert found.inside == {"lr": True}


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ({1: 1.0, 2: 2.0, 4: 3.0}, ["0.5"]),
        ({1: 3.0, 2: 2.0, 4: 1.0}, ["8"]),
        ({1: math.inf, 2: math.inf, 4: math.inf}, ["0.5"]),
        ({1: 3.0, 2: 2.0, 4: 1.0, 8: 1.5}, []),
        ({1: 3.0, 2: 2.0, 4: 1.0, 8: math.inf}, []),
        ({1: 3.0, 4: 1.0}, ["2"]),
    ],
    ids=["lower", "upper", "all diverged", "widened", "diverged above", "unfinished"],
)
def test_an_edge_widens_the_grid(losses, wanted):
    assert [rate for (rate,) in known([1, 2, 4], losses).wanted] == wanted


def test_one_rate_is_a_choice():
    assert known([1], {}).wanted == [("1",)]
    assert known([1], {1: 5.0}).wanted == []


@pytest.mark.parametrize("optimum", [1e-5, 2e-3, 1.0])
def test_widening_finds_the_optimum_or_gives_up(optimum):
    sweep = rates("a", [1e-3, 2e-3, 4e-3])
    losses, _ = play([sweep], 1, valley(optimum))
    found = search(sweep, losses)
    if optimum == 2e-3:
        assert found.inside == {"lr": True}
        assert found.best == ("0.002",)
    else:
        assert found.inside == {"lr": False}
        assert len(losses) == 3 + WIDEST


def test_a_recipe_that_always_diverges_ends():
    losses, order = play([rates("a", [1.0, 2.0, 4.0])], 3, lambda run: math.inf)
    assert len(order) == 3 + WIDEST
    assert {run.seed for run in order} == {0}


def test_seeds_follow_at_the_best_rate_alone():
    sweeps = [rates("a", [1, 2, 4]), rates("b", [1, 2, 4])]
    _, order = play(sweeps, 3, valley(2))
    for config in "ab":
        mine = [(run.lr, run.seed) for run in order if run.config == config]
        assert mine == [(1, 0), (2, 0), (4, 0), (2, 1), (2, 2)]


def test_a_failed_run_stops_its_recipe_alone():
    bad = Run("a", 2, 0)
    sweeps = [rates("a", [1, 2, 4]), rates("b", [1, 2, 4])]
    losses, order = play(sweeps, 2, valley(2), {bad})
    assert [run for run in losses if run.config == "a"] == [
        Run("a", 1, 0),
        Run("a", 4, 0),
    ]
    assert Run("b", 2, 1) in losses
    assert order.count(bad) == 1


def test_a_failed_seed_does_not_stop_the_others():
    bad = Run("a", 2, 1)
    losses, _ = play([rates("a", [1, 2, 4])], 3, valley(2), {bad})
    assert Run("a", 2, 2) in losses


def test_rates_tried_before_count_whatever_the_grid_says_now():
    """A wider grid of an earlier call, and what widening added, are not tried again."""
    losses = {Run("a", lr, 0): abs(lr - 8) for lr in (2, 4, 8, 16)}
    assert next_runs([rates("a", [2, 4])], 2, losses) == [Run("a", 8, 1)]


@pytest.mark.parametrize("optimum", [2, 4])
def test_what_is_to_come_is_never_less_than_announced(optimum):
    sweep, losses = rates("a", [1, 2, 4]), {}
    announced = []
    while runs := next_runs([sweep], 3, losses):
        announced.append(len(losses) + num_to_come(sweep, 3, losses))
        losses[runs[0]] = valley(optimum)(runs[0])
    assert announced[0] == 5
    assert announced == sorted(announced)
    assert announced[-1] == len(losses)


def test_a_stuck_recipe_promises_nothing():
    assert num_to_come(rates("a", [1]), 3, {}, {Run("a", 1, 0)}) == 0


# ---- options too ---------------------------------------------------------------------

GAMMA = ["0.05", "0.1", "0.2"]
BETAS = ["0.8,0.95", "0.9,0.95", "0.95,0.95"]


def bowl(**optimum):
    """Losses with one lowest point: steep in the rate, flatter in gamma and beta1."""

    def loss(run):
        total = 0.01 * run.seed + 3 * math.log(run.lr / optimum["lr"]) ** 2
        options = dict(text.split("=") for text in run.config.split(":")[1:])
        if "gamma" in options:
            total += math.log(float(options["gamma"]) / optimum["gamma"]) ** 2
        if "betas" in options:
            beta1, beta2 = map(float, options["betas"].split(","))
            total += math.log((1 - beta1) / (1 - optimum["beta1"])) ** 2
            total += 0.5 * (beta2 != optimum.get("beta2", beta2))
        return total + 0.5 * (options.get("nesterov") == "False")

    return loss


def folders(order):
    return {run.path.removesuffix("/seed-0") for run in order if run.seed == 0}


@pytest.mark.parametrize("optimum", [0.025, 0.05, 0.2, 0.8])
def test_two_axes_end_inside(optimum):
    sweep = rates("a", [1, 2, 4], gamma=GAMMA)
    losses, order = play([sweep], 2, bowl(lr=16, gamma=optimum))
    found = search(sweep, losses)
    assert found.best == ("16", f"{optimum:g}")
    assert found.inside == {"lr": True, "gamma": True}
    assert order[-1] == Run(f"a:gamma={optimum:g}", 16, 1)
    assert len(order) < 25


def test_three_axes_end_inside():
    sweep = rates("a", [1, 2, 4], gamma=GAMMA, betas=BETAS)
    losses, order = play([sweep], 1, bowl(lr=4, gamma=0.2, beta1=0.975))
    found = search(sweep, losses)
    assert found.best == ("4", "0.2", "0.975", "0.95")
    assert found.inside == {"lr": True, "gamma": True, "betas": True}
    assert Run("a:gamma=0.2:betas=0.9875,0.95", 4, 0) in losses
    assert len(order) < 5 * 5 * 5 / 4


def test_the_first_round_is_the_grid_and_the_neighbours():
    """All of it can be started at once; folders are those of recipes with options."""
    own = {"betas": "0.9,0.95", "gamma": "0.1"}
    options = {"betas": BETAS, "gamma": GAMMA}
    sweep = Sweep.of("a", [1, 2, 4], 2, options, own)
    assert folders(next_runs([sweep], 3, {})) == {
        "a:betas=0.9,0.95:gamma=0.1/lr-1",
        "a:betas=0.9,0.95:gamma=0.1/lr-2",
        "a:betas=0.9,0.95:gamma=0.1/lr-4",
        "a:betas=0.8,0.95:gamma=0.1/lr-2",
        "a:betas=0.95,0.95:gamma=0.1/lr-2",
        "a:betas=0.9,0.95:gamma=0.05/lr-2",
        "a:betas=0.9,0.95:gamma=0.2/lr-2",
    }


@pytest.mark.parametrize(
    ("values", "own", "starts"),
    [
        (["0.2", "0.05", "0.1"], "0.1", ["0.1"]),
        (GAMMA, "0.4", ["0.2"]),
        (GAMMA, "0.025", ["0.05"]),
        (GAMMA, "None", ["0.05"]),
        (["0", "0.1"], "0.0", ["0"]),
        (["0.8,0.99", "0.9,0.95"], "0.95,0.95", ["0.9", "0.95"]),
        (["True", "False"], "False", ["False"]),
        (["exact", "transport"], "approximate", ["exact"]),
    ],
)
def test_a_sweep_starts_at_the_recipe_or_near_it(values, own, starts):
    assert [axis.start for axis in option_axes("x", values, own)] == starts


@pytest.mark.parametrize(
    ("values", "down", "up"),
    [
        (["0.05", "0.1", "0.3"], "0.025", "0.9"),
        (["0", "0.1"], None, "0.2"),
        (["0.9,0.99", "0.95,0.99"], "0.8", "0.975"),
        (["0.4,0.99", "0.7,0.99"], None, "0.85"),
    ],
)
def test_numbers_widen_by_their_ratio_and_betas_in_what_they_forget(values, down, up):
    axis = option_axes("x", values, "None")[0]
    assert axis.beyond(axis.values[0], up=False) == down
    assert axis.beyond(axis.values[-1], up=True) == up


def test_words_and_second_betas_are_all_tried_at_the_best_point():
    betas = ["0.8,0.95", "0.9,0.95", "0.9,0.99"]
    sweep = rates("a", [1, 2, 4], betas=betas, nesterov=["False", "True"])
    losses, _ = play([sweep], 1, bowl(lr=2, beta1=0.8, beta2=0.99))
    found = search(sweep, losses)
    assert found.best == ("2", "0.8", "0.99", "True")
    assert found.inside == {"lr": True, "betas": True}
    assert sweep.options(found.best) == {"betas": "0.8,0.99", "nesterov": "True"}
    assert Run("a:betas=0.8,0.99:nesterov=False", 2, 0) in losses
    assert Run("a:betas=0.6,0.99:nesterov=True", 2, 0) in losses


def test_an_edge_that_does_not_end_is_told():
    sweep = rates("a", [1, 2, 4], gamma=GAMMA)
    losses, order = play([sweep], 1, bowl(lr=2, gamma=1e9))
    found = search(sweep, losses)
    assert found.best == ("2", f"{0.2 * 2**WIDEST:g}")
    assert found.inside == {"lr": True, "gamma": False}
    # and so is one of a beta that would be 0
    sweep = rates("a", [2], betas=["0.2,0.9", "0.4,0.9"])
    losses, _ = play([sweep], 1, bowl(lr=2, beta1=0.0))
    assert search(sweep, losses).inside == {"betas": False}


def test_single_values_stay():
    sweep = rates("a", [2], gamma=["0.1"], betas=["0.9,0.95"])
    losses, order = play([sweep], 1, bowl(lr=9, gamma=0.8, beta1=0.8))
    assert folders(order) == {"a:gamma=0.1:betas=0.9,0.95/lr-2"}
    assert search(sweep, losses).inside == {}


def test_an_option_without_effect_stays():
    sweep = Sweep.of("a", [1, 2, 4], 2, {"gamma": GAMMA}, {"gamma": "0.1"})
    losses, order = play([sweep], 1, valley(2))
    found = search(sweep, losses)
    assert found.best == ("2", "0.1")
    assert found.inside == {"lr": True, "gamma": True}
    assert len(order) == 5


def test_where_all_diverges_rates_alone_go_on():
    sweep = rates("a", [1, 2, 4], gamma=GAMMA, betas=BETAS)
    losses, order = play([sweep], 3, lambda run: math.inf)
    lower = [run for run in order if run.lr < 1]
    assert min(run.lr for run in lower) == 2.0**-WIDEST
    assert len([run for run in lower if run.lr > 2.0**-WIDEST]) == WIDEST - 1
    assert {run.seed for run in order} == {0}


def test_a_failed_option_stops_its_recipe_alone():
    bad = Run("a:gamma=0.1", 2, 0)
    sweeps = [rates("a", [1, 2, 4], gamma=GAMMA), rates("b", [1, 2, 4])]
    losses, order = play(sweeps, 2, bowl(lr=2, gamma=0.1), {bad})
    assert folders(order) >= {f"a:gamma=0.05/lr-{lr}" for lr in (1, 2, 4)}
    assert [run for run in order if run.seed] == [Run("b", 2, 1)]
    again, _ = play(sweeps, 2, bowl(lr=2, gamma=0.1))
    assert losses.items() <= again.items()


def test_the_path_does_not_depend_on_the_order_in_which_runs_end():
    def shuffled(seed):
        draw = random.Random(seed)
        sweep = rates("a", [1, 2, 4], gamma=GAMMA, betas=BETAS)
        loss = bowl(lr=8, gamma=0.4, beta1=0.9)
        return play([sweep], 2, loss, choose=draw.choice)[0]

    runs = [shuffled(seed) for seed in range(5)]
    assert all(one == other for one, other in pairwise(runs))


def test_a_stopped_sweep_goes_on():
    """What has finished counts, and nothing is trained twice."""
    sweep, loss = rates("a", [1, 2, 4], gamma=GAMMA), bowl(lr=8, gamma=0.4)
    whole, order = play([sweep], 2, loss)
    for stopped in range(len(order)):
        losses = {run: whole[run] for run in order[:stopped]}
        while runs := next_runs([sweep], 2, losses):
            losses |= {run: loss(run) for run in runs}
        assert losses == whole


def test_points_of_earlier_calls_count():
    """Also values that are not listed, which lead where the search would not."""
    sweep = rates("a", [1, 2, 4], gamma=["0.05", "0.1"])
    earlier = {Run("a:gamma=3.2", 2, 0): -5.0}
    losses = dict(earlier)
    while runs := next_runs([sweep], 1, losses):
        losses |= {run: bowl(lr=2, gamma=0.1)(run) for run in runs}
    found = search(sweep, losses)
    assert found.best == ("2", "3.2")
    assert Run("a:gamma=6.4", 2, 0) in losses


@pytest.mark.parametrize(
    ("config", "point"),
    [
        ("a:b=1:betas=0.8,0.95:c=x", ("2", "0.8", "0.95", "x")),
        ("a:b=1", None),
        ("a:b=1:c=x:betas=0.8,0.95", None),
        ("a:b=1:betas=0.8:c=x", None),
        ("a:b=1:betas=0.8,high:c=x", ("2", "0.8", "high", "x")),
        ("a:b=1:betas=high,0.95:c=x", None),
        ("a:b=10:betas=0.8,0.95:c=x", None),
        ("other", None),
    ],
)
def test_runs_are_told_by_the_folder(config, point):
    sweep = rates("a:b=1", [2], betas=BETAS, c=["x", "y"])
    run = Run(config, 2, 0)
    assert sweep.point(run) == point
    assert point is None or sweep.run(point, 0) == run
