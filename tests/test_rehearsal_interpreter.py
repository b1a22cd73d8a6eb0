"""Steps by interpreted Triton kernels, beside eager ones."""

from __future__ import annotations

import pytest

from tests.rehearsal import needs_triton, played

pytestmark = needs_triton

TRANSPORT = "mars-adamw/transport"
BFLOAT16 = "mars-m/transport/bfloat16"
# all of the state in bfloat16, rounded stochastically
STATE = "mars-adamw/approximate/float32/bfloat16/bfloat16=few"
# how far the state may be from eager steps; what is rounded to bfloat16 is the same
CASES = {BFLOAT16: 5e-7, STATE: 0.0}
# each with what its checks have to say
MUTANTS = {
    f"{BFLOAT16}=read_always": ["step 1 (normal) moved 24."],
    "mars-lion/transport=written_always": [
        "changed parameter",
        "parameters differ by 6.0e-03",
    ],
    f"{TRANSPORT}=forgotten": ["state differs by 1.0e+00"],
    f"{TRANSPORT}=blind": ["0 steps counted as skipped, expected 1", "changed"],
    f"{BFLOAT16}=cut_off": ["parameters differ"],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interpreted")
    return played(folder, interpreted=[*CASES, *MUTANTS])


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_eager_ones(rows, name):
    row = rows[name]
    assert row["faults"] == []
    assert row["steps"] == ["normal", "normal", "skipped", "missing"]
    assert row["x_differs"] <= (0.0 if name == BFLOAT16 else 5e-7)
    assert row["state_differs"] <= CASES[name]
    assert (row["num_skipped"], row["changed"]) == (1, [])
    first, *later = row["graphs"]
    assert first > 0 and later == [0, 0, 0]


@pytest.mark.parametrize("name", CASES)
def test_y_is_read_where_a_step_is_skipped(rows, name):
    row = rows[name]
    first, second, skipped, missing = row["num_bytes"]
    y = 2 if name == BFLOAT16 else 0
    assert first == second == pytest.approx(row["floor"], abs=0.6)  # numbers
    assert skipped - second == pytest.approx(y, abs=0.02)
    # of one tensor of 1,920 elements among 9,120
    assert missing - second == pytest.approx(y * 1920 / 9120, abs=0.02)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_a_fault(rows, name):
    faults = " ".join(rows[name]["faults"])
    for told in MUTANTS[name]:
        assert told in faults
