"""The GPU path without a GPU: steps lowered to Triton, kernels compiled for an H100."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.rehearsal import __main__ as rehearsal
from benchmarks.gpu.rehearsal.lowering import Launch, memory_of
from benchmarks.gpu.rehearsal.steps import MOST_REGISTERS, faults
from benchmarks.gpu.rehearsal.traffic import Access, accesses
from train.errors import UserError

ROOT = Path(__file__).parents[2]
# where make installs Triton, apart from the environment
TRITON = ROOT / os.environ.get("MARSOPT_TRITON", ".venv-triton")
HAS_TRITON = bool(importlib.util.find_spec("triton")) or (TRITON / "triton").is_dir()
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason=f"needs Triton, in the environment or in {TRITON.name}"
)

COMPILED = "mars-adamw/approximate/llama-7b-layer/bfloat16"
NAMES = (COMPILED, "mars-m/approximate/llama-7b-layer/float32/lowered")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Of a process of its own: what it tells torch about a GPU, and Triton on the path,
    would change other tests.
    """
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
def test_a_step_moves_the_bytes_of_the_floor(rows, name):
    row = rows[name]
    assert row["faults"] == []
    assert row["loaded"] + row["stored"] == pytest.approx(row["floor"], rel=1e-3)
    assert 0 < row["stack_launches"] <= row["launches"]


@needs_triton
def test_kernels_neither_spill_nor_load_narrowly(rows):
    row = rows[COMPILED]
    binaries = [b for kernel in row["kernels"] for b in kernel["binaries"]]
    assert binaries
    assert all(b["spills"] == 0 for b in binaries)
    assert all(b["registers"] <= MOST_REGISTERS for b in binaries)
    assert all(b["narrow"] == 0 < b["full_size"] for b in binaries)


@needs_triton
def test_each_fault_is_named(rows):
    """In figures that are changed, one after the other."""
    row = rows[COMPILED]
    binary = next(b for kernel in row["kernels"] for b in kernel["binaries"])
    assert [*faults(row)] == []
    for part, key, value, told in [
        (row, "stored", 1.003 * row["stored"] + 0.003 * row["loaded"], "bytes a param"),
        (row, "recompiled", 2, "2 recompiles"),
        (binary, "spills", 8, "spills 8 bytes"),
        (binary, "registers", MOST_REGISTERS + 1, "has 169 registers"),
        (binary, "narrow", 3, "lacks 3 wide"),
    ]:
        before, part[key] = part[key], value
        (fault,) = faults(row)
        assert told in fault
        part[key] = before


# ---- parts ---------------------------------------------------------------------------

KERNEL = """
def triton_(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (0))
    tmp1 = tl.load(in_ptr1 + (x0), None)
    tl.store(out_ptr0 + (x0), tmp0 + tmp1, None)
"""


def test_bytes_are_those_of_loads_and_stores_in_the_source():
    number, x, out = (meta(n) for n in (1, 1024, 1024))
    inputs = frozenset(map(memory_of, (number, x)))
    launch = Launch("triton_", (number, x, out, 1024), inputs)
    assert [*accesses(KERNEL, launch)] == [
        Access("loaded", 1, 4, full=False),
        Access("loaded", 1024, 4, full=True),
        Access("stored", 1024, 4, full=False),  # of no input: a temporary
    ]


COMBO = """
def triton_(in_ptr0, in_ptr1, out_ptr0, XBLOCK_0: tl.constexpr, XBLOCK_1: tl.constexpr):
    pid = tl.program_id(0)
    if pid < 1:
        xnumel = 1024
        r0_numel = 1
        x0 = pid * XBLOCK_0 + tl.arange(0, XBLOCK_0)[:]
        tmp0 = tl.load(in_ptr0 + (x0), x0 < xnumel)
        tl.store(out_ptr0 + (x0), tmp0, x0 < xnumel)
    elif pid < 2:
        xnumel = 64
        x1 = (pid - 1) * XBLOCK_1 + tl.arange(0, XBLOCK_1)[:]
        tmp0 = tl.load(in_ptr1 + (x1), x1 < xnumel)
    else:
        pass
"""


def test_a_combo_kernel_has_several_loops_each_of_its_own_size():
    x, y, out = (meta(n) for n in (1024, 64, 1024))
    launch = Launch("triton_", (x, y, out), frozenset(map(memory_of, (x, y))))
    assert [*accesses(COMBO, launch)] == [
        Access("loaded", 1024, 4, full=True, loop=0),
        Access("stored", 1024, 4, full=False, loop=0),
        Access("loaded", 64, 4, full=True, loop=1),
    ]


def meta(num):
    return torch.empty(num, device="meta")


def test_an_unknown_case_is_named():
    with pytest.raises(UserError, match="got the case 'lione', expected a pattern"):
        rehearsal.main(["lione"])
