"""Printed kernels without a GPU: compiled for three, their bytes counted."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import rehearsal
from train.errors import UserError

ROOT = Path(__file__).parents[2]
# where make installs Triton, apart from the environment
TRITON = ROOT / os.environ.get("MARSOPT_TRITON", ".venv-triton")
HAS_TRITON = bool(importlib.util.find_spec("triton")) or (TRITON / "triton").is_dir()
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason=f"needs Triton, in the environment or in {TRITON.name}"
)

# bytes a parameter, where vectors, which have no h, weigh next to nothing; not said of
# the matrix rule, with embeddings by AdamW
NAMES = {
    "adamw/rounded": 24,
    "adamw/coded": 20.1264,
    "mars-adamw/coded": 23.2198,
    "adamw/master32": 28,
    "mars-adamw/master24": 24,
    "mars-adamw/least": 17.2198,
    "mars-adamw/float32": 44,
    "mars-adamw-exact/amsgrad": 8 * 12,
    "soap/float32": None,
    "moonlight/bfloat16": None,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Of a process of its own: Triton on its path would change other tests."""
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    command = ["-m", "benchmarks.gpu.rehearsal", *NAMES, "--json", str(path)]
    places = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TRITON)])}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["name"]: row for row in json.loads(path.read_text())}
    assert all(f"{name}: " in done.stdout for name in found)
    return found


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_kernels_move_the_floor_in_wide_accesses_and_do_not_spill(rows, name):
    row = rows[name]
    assert row["faults"] == []
    assert row["moved"] == pytest.approx(row["floor"], rel=2e-3)
    assert row["floor"] == pytest.approx(NAMES[name] or row["floor"], rel=1e-4)
    names = [found["name"] for found in row["binaries"]]
    assert sum(name.endswith("sm_80") for name in names) == len(names) / 3
    assert any(name.startswith("updated_of") for name in names)
    assert all(found["spills"] == found["narrow"] == 0 for found in row["binaries"])
    by_blocks = [
        found
        for found in row["binaries"]
        if not re.search("_totals |decision ", found["name"])
    ]
    assert all(found["wide"] > 0 for found in by_blocks)


@needs_triton
def test_one_formula_takes_four_launches(rows):
    """Two for the norms, one for the decision, one for the update, however many
    tensors. The counts of steps and of skipped steps take two of torch's.
    """
    assert rows["adamw/rounded"]["launches"] == 4


@needs_triton
def test_each_fault_is_named(rows):
    """In figures that are changed, one after the other."""
    row = rows["adamw/rounded"]
    binary = row["binaries"][0]
    assert [*rehearsal.faults(row)] == []
    for part, key, value, told in [
        (row, "moved", 1.003 * row["moved"], "bytes a param"),
        (row, "told", ["graphs move the tensors of adamw"], "graphs move"),
        (binary, "spills", 8, "spills 8 bytes"),
        (binary, "narrow", 3, "lacks 3 wide"),
    ]:
        before, part[key] = part[key], value
        (fault,) = rehearsal.faults(row)
        assert told in fault
        part[key] = before


def test_an_unknown_case_is_named():
    with pytest.raises(UserError, match="got the case 'lione', expected a pattern"):
        rehearsal.main(["lione"])
