"""On fake CUDA tensors: nothing crosses between host and device in a warm step but what
the documentation names; the collectives of a rank are those that the forecast names;
and what is put in beside them is found.
"""

import pytest

from benchmarks.gpu.rehearsal import host, ranks
from marsopt import REGISTRY
from tests.rehearsal import played

# ---- host ----------------------------------------------------------------------------

CROSSING = {
    "asks": ("wait", "aten._local_scalar_dense"),
    "synchronizes": ("wait", "torch.cuda.synchronize"),
    "selects": ("wait", "aten.nonzero"),
    "sends": ("copy", "aten._to_copy"),
    "scales": ("copy", "aten.mul_"),
}
PLAIN = "no clip, no max_norm"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Of both parts, in one process."""
    of_ranks = [name for name in ranks.NAMES if name not in ranks.DEFAULT]
    return played(
        tmp_path_factory.mktemp("rows"),
        host=[*host.NAMES, *(f"{PLAIN}={mutant}" for mutant in CROSSING)],
        ranks=[*of_ranks, *(f"{FIRST}={defect}" for defect in DEFECTS)],
    )


@pytest.fixture
def watched(rows):
    return {name: row for name, row in rows.items() if "collectives" not in row}


def test_what_crosses_is_documented(watched):
    rows = [watched[name] for name in host.NAMES]
    assert [row["faults"] for row in rows] == [[]] * len(rows)
    steps = [row for row in rows if "every number moves" in row["name"]]
    assert len(steps) >= 2 * len(REGISTRY)
    assert all(row["num_operations"] > 100 for row in steps)


@pytest.mark.parametrize(
    "title, kind, room",
    [
        ("lr is a tensor on the CPU", "copy", "groups.py"),
        ("a gradient is missing for the first time", "copy", "layout.py"),
        ("nonfinite is raise", "wait", "mars.py"),
        ("num_skipped", "wait", "mars.py"),
    ],
)
def test_what_is_documented_is_found_where_it_is(watched, title, kind, room):
    crossings = watched[title]["crossings"]
    assert {(c["kind"], room in c["where"][-1]) for c in crossings} == {(kind, True)}


@pytest.mark.parametrize("mutant", CROSSING)
def test_a_crossing_is_reported(watched, mutant):
    row, (kind, operation) = watched[f"{PLAIN}={mutant}"], CROSSING[mutant]
    assert row["faults"]
    assert any(
        c["kind"] == kind and c["operation"].startswith(operation)
        for c in row["crossings"]
    )


# ---- ranks ---------------------------------------------------------------------------

FIRST = "mars-adamw/approximate/8/3/2-layers"
DEFECTS = {
    "adds_twice": "got {'all-reduce': 2}, expected {'all-reduce': 1}",
    "sends": "copy, cpu to cuda, in ",
}


@pytest.fixture
def ranked(rows):
    return {name: row for name, row in rows.items() if "collectives" in row}


def test_collectives_are_as_forecast_whatever_the_number_of_ranks(ranked):
    rows = [row for name, row in ranked.items() if "=" not in name]
    assert [row["faults"] for row in rows] == [[]] * len(rows)
    meshes = {tuple(row["sizes"]) for row in rows}
    assert {(8,), (512,), (8, 8), (8, 64), (2, 4)} <= meshes
    for row in rows:
        expected = {"all-reduce": 1}
        if row["ddp"]:
            expected["all-gather"] = 1  # of a model that fits into a bucket
        elif row["rule"] != "mars-adamw":
            expected["all-to-all"] = 2
        if row["sizes"] == [2, 4]:
            expected["all-gather"] = 1
        assert row["collectives"] == expected
        assert row["num_operations"] > 100
        # numbers that moved are sent to be compared, and nothing else
        (crossing,) = row["moved"]
        assert crossing["kind"] == "copy" and crossing["way"] == "cpu to cuda"
        assert "parallel/agreement.py" in crossing["where"][-1]


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_ranks_is_reported(ranked, defect):
    faults = ranked[f"{FIRST}={defect}"]["faults"]
    assert any(fault.startswith(DEFECTS[defect]) for fault in faults)
