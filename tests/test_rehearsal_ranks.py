"""One rank among 8 and 512, on fake CUDA tensors: the collectives of a warm step are
those that the forecast names, and nothing crosses between host and device.
"""

import pytest

from tests.rehearsal import rehearsed


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return rehearsed("tests.rehearsal_ranks", folder=tmp_path_factory.mktemp("ranks"))


def test_steps_are_as_forecast(found):
    assert [case["faults"] for case in found["cases"]] == [[]] * len(found["cases"])
    meshes = {tuple(case["case"]["sizes"]) for case in found["cases"]}
    assert {(8,), (512,), (8, 8), (8, 64), (2, 4)} <= meshes


def test_collectives_do_not_depend_on_the_number_of_ranks(found):
    for case in found["cases"]:
        rule, sizes = case["case"]["rule"], tuple(case["case"]["sizes"])
        expected = {"all-reduce": 1}
        if case["case"]["ddp"]:
            expected["all-gather"] = 1  # of a model that fits into a bucket
        elif rule != "mars-adamw":
            expected["all-to-all"] = 2
        if sizes == (2, 4):
            expected["all-gather"] = 1
        assert case["collectives"] == expected
        assert case["num_operations"] > 100


def test_numbers_that_moved_are_sent_to_be_compared_and_nothing_else(found):
    for case in found["cases"]:
        (crossing,) = case["moved"]
        assert crossing["kind"] == "copy" and crossing["way"] == "cpu to cuda"
        assert "parallel/agreement.py" in crossing["where"][-1]


@pytest.mark.parametrize(
    "name, fault",
    [
        ("adds_twice", "got {'all-reduce': 2}, expected {'all-reduce': 1}"),
        ("sends", "copy, cpu to cuda, in "),
    ],
)
def test_a_defect_is_reported(found, name, fault):
    assert any(said.startswith(fault) for said in found["mutants"][name]["faults"])
