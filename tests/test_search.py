"""The search of a study: draws, a compass search, the same number for all."""

from __future__ import annotations

import math
import random

import pytest

from train.compare.search import Axis, Found, draws, neighbours, search

RATE, BETA = Axis("lr", 1e-3, 1.6e-2), Axis("beta1", 0.6, 0.98, decay=True)
GAMMA = Axis("gamma", 0.0125, 0.4)
AXES = (RATE, BETA, GAMMA)
BOWL = (4e-3, 0.93, 0.1)


def bowl(point, at=BOWL):
    pairs = zip(AXES, point, at, strict=False)
    return sum((axis.place(a) - axis.place(b)) ** 2 for axis, a, b in pairs)


def ended(axes, loss, trials, num_draws=8, order=None):
    """What a search has found, and the points in the order of running."""
    known = {}
    while True:
        found = search(axes, known.get, trials=trials, num_draws=num_draws)
        if not found.wanted:
            return found, list(known)
        wanted = list(found.wanted)
        if order is not None:  # one run at a time, in any order
            wanted = [order.choice(wanted)]
        known |= {point: loss(point) for point in wanted}


@pytest.mark.parametrize("trials", [1, 8, 9, 20, 31])
@pytest.mark.parametrize("axes", [AXES, AXES[:2]])
def test_every_search_has_as_many_trials(axes, trials):
    found, ran = ended(axes, bowl, trials, min(8, trials))
    assert len(found.losses) == len(ran) == len({*ran}) == trials
    assert found.losses[found.best] == min(found.losses.values())


def test_it_comes_near_the_optimum_in_and_beyond_the_space():
    for at in (BOWL, (6.4e-2, 0.97, 0.8), (2.5e-4, 0.5, 0.003)):
        found, _ = ended(AXES, lambda point, at=at: bowl(point, at), 60)
        assert bowl(found.best, at) < 0.1
        assert found.inside(AXES) <= 1.0


def test_inside_means_that_all_neighbours_are_worse():
    losses = {(4e-3, 0.9): 1.0, (8e-3, 0.9): 2.0, (2e-3, 0.9): 3.0, (4e-3, 0.95): 4.0}
    edge = Found(losses, [])
    assert edge.inside(AXES[:2]) == math.inf
    far = Found(losses | {(1.6e-2, 0.8): 5.0}, [])
    assert far.inside(AXES[:2]) == math.inf
    inside = Found(losses | {(4e-3, 0.8): 5.0, (1e-3, 0.9): 9.0}, [])
    assert inside.inside(AXES[:2]) == pytest.approx(1.0)


def test_the_path_does_not_depend_on_the_order_in_which_runs_end():
    want, _ = ended(AXES, bowl, 25)
    for seed in range(5):
        got, _ = ended(AXES, bowl, 25, order=random.Random(seed))
        assert got == want


def test_what_diverges_is_avoided_and_never_the_end():
    def loss(point):
        return bowl(point) if point[0] < 5e-3 else math.inf

    found, _ = ended(AXES, loss, 40)
    assert found.losses[found.best] < 0.3
    nowhere, ran = ended(AXES, lambda point: math.inf, 12)
    assert len(ran) == 12 and math.isinf(nowhere.losses[nowhere.best])


def test_draws_are_shared_by_methods_and_fill_the_space():
    three, two = draws(AXES, 8), draws(AXES[:2], 8)
    assert [point[:2] for point in three] == two
    for axis, values in zip(AXES, zip(*draws(AXES, 400), strict=True), strict=True):
        assert axis.low <= min(values) and max(values) <= axis.high
        places = sorted(map(axis.place, values))
        ends = axis.place(axis.low), axis.place(axis.high)
        middle = sum(ends) / 2
        assert places[200] == pytest.approx(middle, abs=0.1 * (ends[1] - ends[0]))


def test_values_are_round_and_decays_stay_below_one():
    assert RATE.moved(4e-3, 1) == 8e-3 and RATE.moved(4e-3, -1) == 2e-3
    assert BETA.moved(0.9, 1) == pytest.approx(0.95)
    assert BETA.moved(0.9, -1) == pytest.approx(0.8)
    assert BETA.moved(0.5, -2) is None  # 1 - beta cannot be 2
    there = RATE.moved(0.0123, 0.5)
    assert there == float(f"{there:.4g}")
    low = neighbours((BETA,), (0.3,), 1.0)
    assert low == [(pytest.approx(0.65),)]


def test_a_point_that_is_another_but_for_its_rounding_is_not_tried_again():
    found, ran = ended(AXES[:1], bowl, 200, 1)
    assert len(ran) < 30  # steps become too small
    places = sorted(RATE.place(*point) for point in ran)
    assert min(b - a for a, b in zip(places, places[1:], strict=False)) > 0.01
    assert found.inside(AXES[:1]) < 0.1


@pytest.mark.parametrize(
    "given",
    [
        dict(low=0.0, high=1.0),
        dict(low=2.0, high=1.0),
        dict(low=0.5, high=1.0, decay=1),
    ],
)
def test_an_axis_that_is_none(given):
    with pytest.raises(ValueError, match="expected two positive numbers that ascend"):
        Axis("x", **given)
    with pytest.raises(ValueError, match="expected more than 1"):
        Axis("x", 1.0, 2.0, factor=1.0)
