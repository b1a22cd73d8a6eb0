"""Model code on a GPU that is not there: the plain loop, the FSDP2
example, and memory beside the forecast; each check reports a mutant.
"""

from __future__ import annotations

import pytest

from tests.rehearsal import needs_triton, rehearsed

pytestmark = needs_triton
BLOCK = 512


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All cases, in one process."""
    return rehearsed("tests.model_mutants", folder=tmp_path_factory.mktemp("models"))


def test_the_loop_lowers_without_breaks_recompiles_or_waiting(found):
    assert found["loops"]["as it is"] == []


@pytest.mark.parametrize(
    ("mutant", "told"),
    [
        ("reads the loss", "got a number that the host reads from the device"),
        ("pageable", "expected the copies of inputs and labels from pinned memory"),
        ("graph break", "got a graph break, expected none"),
        ("recompiles", "got [2, 4, 6] graphs after steps 1 to 3"),
    ],
)
def test_what_the_loop_must_not_do_is_reported(found, mutant, told):
    assert told in " ".join(found["loops"][mutant])


def test_the_fsdp2_example_calls_what_is_forecast(found):
    assert found["sharded"]["as it is"] == []


@pytest.mark.parametrize(
    ("mutant", "told"),
    [
        ("clips_by_itself", "step: got {'all-reduce': 2, 'all-to-all': 2}, expected"),
        ("reads_after_the_step", "got a number that the host reads from the device"),
    ],
)
def test_what_the_example_must_not_do_is_reported(found, mutant, told):
    assert told in " ".join(found["sharded"][mutant])


def test_memory_of_gpt2_xl_is_what_is_forecast(found):
    """Parameters, gradients, state, and the most that lives while MARS-M steps."""
    row = found["memory"]["row"]
    assert row["problems"] == []
    for name, told in row["forecast"].items():
        assert row[name] == pytest.approx(told, rel=1e-4), name
    assert row["lives"] < row["step_peak"] < 80 * 2**30


def test_a_wrong_forecast_is_reported(found):
    told = " ".join(found["memory"]["forgot"])
    assert "mars-m, gradients: got 0.00 GiB forecast, expected 5.80 GiB" in told
    assert "something is kept" in " ".join(found["memory"]["leaked"])


def test_blocks_are_counted_as_the_allocator_does(found):
    assert found["memory"]["counts"] == [
        [5 * BLOCK, 5 * BLOCK],
        [4 * BLOCK, 7 * BLOCK],
        [0, 4 * BLOCK],
    ]
