"""On fake CUDA tensors: nothing crosses between host and device in a warm step but what
the documentation names; and each kind of crossing is found where it is put in.
"""

import pytest

from marsopt import REGISTRY
from tests.rehearsal import rehearsed


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return rehearsed("tests.rehearsal_host", folder=tmp_path_factory.mktemp("host"))


def test_what_crosses_is_documented(found):
    faults = [case for case in found["cases"] if not case["as_documented"]]
    assert not faults
    steps = [case for case in found["cases"] if "every number moves" in case["title"]]
    assert len(steps) >= 2 * len(REGISTRY)
    assert all(case["num_operations"] > 100 for case in steps)


@pytest.mark.parametrize(
    "title, kind, room",
    [
        ("lr is a tensor on the CPU", "copy", "groups.py"),
        ("a gradient is missing for the first time", "copy", "layout.py"),
        ('nonfinite="raise"', "wait", "mars.py"),
        ("num_skipped", "wait", "mars.py"),
    ],
)
def test_what_is_documented_is_found_where_it_is(found, title, kind, room):
    (case,) = [case for case in found["cases"] if case["title"] == title]
    assert {(c["kind"], room in c["where"][-1]) for c in case["crossings"]} == {
        (kind, True)
    }


@pytest.mark.parametrize(
    "name, kind, operation",
    [
        ("asks", "wait", "aten._local_scalar_dense"),
        ("synchronizes", "wait", "torch.cuda.synchronize"),
        ("selects", "wait", "aten.nonzero"),
        ("sends", "copy", "aten._to_copy"),
        ("scales", "copy", "aten.mul_"),
    ],
)
def test_a_crossing_is_reported(found, name, kind, operation):
    (mutant,) = [m for m in found["mutants"] if m["title"] == name]
    assert not mutant["as_documented"]
    assert any(
        c["kind"] == kind and c["operation"].startswith(operation)
        for c in mutant["crossings"]
    )
