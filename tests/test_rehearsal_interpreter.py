"""Steps by interpreted Triton kernels, beside eager ones."""

from __future__ import annotations

import pytest

from tests.rehearsal import needs_triton, rehearsed

pytestmark = needs_triton

ADAMW = "mars-adamw/approximate"
TRANSPORT = "mars-adamw/transport"
BFLOAT16 = "mars-m/transport/bfloat16"
ROWS = "mars-normuon/approximate"  # moments of rows, a matrix made to orthogonalize
# all of the state in bfloat16, rounded stochastically
STATE = "mars-adamw/approximate/float32/bfloat16/bfloat16"
CASES = (ADAMW, TRANSPORT, BFLOAT16, ROWS, STATE)
# each with what its checks have to say
MUTANTS = {
    f"{BFLOAT16}=read_always": ["step 1 (normal) moved 24."],
    "mars-lion/transport=written_always": [
        "changed parameter",
        "parameters differ by 6.0e-03",
    ],
    f"{ADAMW}=forgotten": ["state differs by 1.0e+00"],
    f"{ADAMW}=blind": ["0 steps counted as skipped, expected 1", "changed"],
    f"{BFLOAT16}=cut_off": ["parameters differ"],
}
WRONG = {
    "mars-adam": "expected one of ('adamw'",
    "mars-m/exact": "got 'exact' in 'mars-m/exact', expected one of ('approximate', 't",
    "lion/none/float16": "expected one of ('float32', 'bfloat16')",
    "lion/none/float32/float32/float32/7": "leave '7' out",
    "imported": "got Triton imported already, expected it not to be: import",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interpreted")
    return rehearsed("tests.interpreted", *CASES, *MUTANTS, folder=folder)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_eager_ones(found, name):
    case = found["cases"][name]
    assert case["faults"] == []
    assert case["steps"] == ["normal", "normal", "skipped", "missing"]
    # what is rounded to bfloat16 is the same bit for bit
    assert case["x_differs"] <= (0.0 if name == BFLOAT16 else 5e-7)
    bounds = {ROWS: 5e-6, STATE: 0.0}
    assert case["state_differs"] <= bounds.get(name, 5e-7)


@pytest.mark.parametrize("name", CASES)
def test_a_nan_is_skipped_and_counted(found, name):
    assert found["cases"][name]["num_skipped"] == 1
    assert found["cases"][name]["changed"] == []


@pytest.mark.parametrize("name", CASES)
def test_y_is_read_where_a_step_is_skipped(found, name):
    case = found["cases"][name]
    first, second, skipped, missing = case["num_bytes"]
    y = {ADAMW: 0, TRANSPORT: 0, BFLOAT16: 2, ROWS: 0, STATE: 0}[name]
    assert first == second == pytest.approx(case["floor"], abs=0.7)  # numbers
    assert skipped - second == pytest.approx(y, abs=0.02)
    # of one tensor of 1,920 elements among 9,120
    assert missing - second == pytest.approx(y * 1920 / 9120, abs=0.02)


@pytest.mark.parametrize("name", CASES)
def test_later_steps_compile_nothing(found, name):
    first, *later = found["cases"][name]["graphs"]
    assert first > 0
    assert later == [0, 0, 0]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_a_fault(found, name):
    faults = " ".join(found["cases"][name]["faults"])
    for said in MUTANTS[name]:
        assert said in faults


def test_a_fault_ends_in_status_1(found):
    assert found["status"] == 1


def test_the_table_names_every_case(found):
    assert f"triton {found['made_with']['triton']}" in found["printed"]
    for name in CASES:
        assert f"\n{name}" in found["printed"]
    assert f"{len(CASES)} cases, 0 faults" in found["printed"]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_told(found, name):
    assert WRONG[name] in found["messages"][name]
