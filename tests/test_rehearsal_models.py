"""Training steps on a GPU that is not there: graphs, what crosses between host and
device, and memory beside the forecast; each check reports a mutant.
"""

from __future__ import annotations

import pytest

from benchmarks.gpu.rehearsal.allocations import BLOCK
from benchmarks.gpu.rehearsal.models import FORECAST
from tests.mutants import BLOCKS
from tests.rehearsal import needs_triton, played

pytestmark = needs_triton

SMALL = "mars-m/gpt2-small/2/eager"
TINY = "mars-adamw/tiny/2/compiled"
MUTANTS = {
    "mars-adamw/tiny/2/eager=careless": [
        "got a number that the host reads from the device",
        "expected the copies of inputs and labels from pinned memory",
        "gradients: got 0.00 GiB forecast",
        "something is kept",
    ],
    f"{TINY}=graph_break": ["got a graph break, expected none"],
    f"{TINY}=recompiles": ["got [2, 4, 6] graphs after steps 1 to 3"],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return played("models", SMALL, TINY, BLOCKS, *MUTANTS, folder=folder)


@pytest.mark.parametrize("name", [SMALL, TINY])
def test_the_loop_compiles_once_waits_for_nothing_and_holds_what_is_forecast(
    rows, name
):
    assert rows[name]["faults"] == []


def test_memory_is_what_is_forecast(rows):
    """Parameters, gradients, state, and the most that lives while MARS-M steps."""
    row = rows[SMALL]
    for key in FORECAST:
        assert row[key] == pytest.approx(row["forecast"][key], rel=1e-4), key
    assert row["parameters"] + row["state"] < row["step_peak"]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_a_fault(rows, name):
    faults = " ".join(rows[name]["faults"])
    for told in MUTANTS[name]:
        assert told in faults


def test_blocks_are_counted_as_the_allocator_does(rows):
    assert rows[BLOCKS] == [
        [5 * BLOCK, 5 * BLOCK],
        [4 * BLOCK, 7 * BLOCK],
        [0, 4 * BLOCK],
    ]
