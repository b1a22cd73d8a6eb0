"""The GPU path without a GPU: steps lowered to Triton, kernels compiled for an H100."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu.rehearsal import __main__ as rehearsal
from benchmarks.gpu.rehearsal import rehearse
from benchmarks.gpu.rehearsal.lowered import MOST_REGISTERS, faults
from tests.rehearsal import needs_triton, played
from train.errors import UserError

# graphs, launches, and of them over stacks: with what is fused today; some are compiled
FROZEN = {
    # one more than by sums alone: whether every c^2 fits bfloat16, of two algorithms
    "mars-m/transport/gpt2-small/bfloat16/binaries": (3, 34, 18),
    "normuon/none/llama-7b-layer/float32": (3, 25, 13),
    "nadamw/none/gpt2-xl/bfloat16": (2, 24, 14),
}
COMPILED = "mars-m/transport/gpt2-small/bfloat16/binaries"
# three in one case, and one where a width is no power of two; each with what its check
# has to say
TOGETHER = "mars-lion/transport/llama-7b-layer/float32/binaries"
TOGETHER += "=read_always,none_if_all,unfit"
DIVIDES = "nadamw/none/gpt2-xl/bfloat16=sum_at_once"
MUTANTS = {
    "read_always": (TOGETHER, "32.00 bytes a parameter, floor 28.00"),
    "none_if_all": (TOGETHER, "1 recompiles"),
    "unfit: registers": (TOGETHER, "spills"),
    "unfit: gradients at odd places": (TOGETHER, "wide loads or stores"),
    "sum_at_once": (DIVIDES, "divides for every"),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    cases = [*FROZEN, TOGETHER, DIVIDES]
    return played(tmp_path_factory.mktemp("rows"), lowered=cases)


@needs_triton
@pytest.mark.parametrize("name", FROZEN)
def test_graphs_launches_and_bytes(rows, name):
    row = rows[name]
    counts = len(row["graphs"]), row["launches"], row["stack_launches"]
    assert counts == FROZEN[name]
    assert row["faults"] == []
    assert row["loaded"] + row["stored"] == pytest.approx(row["floor"], rel=1e-3)
    # y, where the state keeps x: not with AdamW, which reads y to compute it
    assert row["flagged"] == (2 if name.startswith("mars-m/transport") else 0)


@needs_triton
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_a_fault(rows, name):
    case, told = MUTANTS[name]
    assert told in " ".join(rows[case]["faults"])


@needs_triton
def test_kernels_neither_spill_nor_load_narrowly(rows):
    row = rows[COMPILED]
    binaries = [b for kernel in row["kernels"] for b in kernel.get("binaries", ())]
    assert len(binaries) >= row["stack_launches"]
    assert all(b["spills"] == 0 for b in binaries)
    assert all(b["registers"] <= MOST_REGISTERS for b in binaries)
    assert all(b["narrow"] == 0 < b["full_size"] for b in binaries)


@needs_triton
def test_each_fault_is_named(rows):
    """In figures that are changed, one after the other."""
    row = rows[COMPILED]
    kernel = next(k for k in row["kernels"] if "binaries" in k)
    binary = kernel["binaries"][0]
    assert [*faults(row)] == []
    for part, key, value, told in [
        (row, "stored", 1.003 * row["stored"] + 0.003 * row["loaded"], "bytes a param"),
        (row, "num_recompiled", 2, "2 recompiles"),
        (kernel, "divides", True, "divides for every element"),
        (binary, "spills", 8, "spills 8 bytes"),
        (binary, "registers", MOST_REGISTERS + 1, "has 169 registers"),
        (binary, "narrow", 3, "lacks 3 wide"),
    ]:
        before, part[key] = part[key], value
        (fault,) = faults(row)
        assert told in fault
        part[key] = before


# ---- the command ---------------------------------------------------------------------


def test_the_command(tmp_path, monkeypatch):
    """A case played and kept; everything as JSON. What "host" finds is the subject of
    tests/test_rehearsal_host.py.
    """
    monkeypatch.setattr(rehearse.part_of("host"), "play", without_fault)
    path, out = tmp_path / "all.json", tmp_path / "out"
    rehearsal.main(["host", "amsgrad", "--out", str(out), "--json", str(path)])
    (row,) = json.loads(path.read_text())
    assert row == without_fault("amsgrad")
    assert json.loads((out / "host/amsgrad.json").read_text())["row"] == row


@needs_triton
def test_a_table_shows_figures_of_a_parameter(rows):
    name = "normuon/none/llama-7b-layer/float32"
    (line,) = [
        line
        for line in rehearsal.table("lowered", [rows[name]]).splitlines()
        if line.startswith(f"| {name} | 3 |")
    ]
    assert " 26.01 | 26.00 | 0.00 | 0 |" in line


def without_fault(name):
    return dict(name=name, source="", num_operations=1, crossings=[], faults=[])


def fails(name):
    raise RuntimeError("played")


def test_what_is_kept_is_not_done_again(tmp_path, monkeypatch):
    """As long as no source has changed."""
    monkeypatch.setattr(rehearse.part_of("host"), "play", fails)
    monkeypatch.setattr(rehearse, "fingerprint", lambda: "today")
    with pytest.raises(RuntimeError, match="played"):
        rehearse.rehearse("amsgrad", "host", tmp_path)
    kept = tmp_path / "host/amsgrad.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps(dict(fingerprint="today", row=dict(faults=[]))))
    assert rehearse.rehearse("amsgrad", "host", tmp_path) == dict(faults=[])
    monkeypatch.setattr(rehearse, "fingerprint", lambda: "tomorrow")
    with pytest.raises(RuntimeError, match="played"):
        rehearse.rehearse("amsgrad", "host", tmp_path)


def test_a_fault_ends_in_status_1_and_an_unknown_case_is_named(monkeypatch, capsys):
    row = without_fault("amsgrad") | dict(faults=["x"])
    monkeypatch.setattr(rehearse.part_of("host"), "play", lambda name: row)
    with pytest.raises(SystemExit) as ended:
        rehearsal.main(["host", "amsgrad"])
    assert ended.value.code == 1
    assert "1 cases, 1 faults" in capsys.readouterr().out
    with pytest.raises(UserError, match="got the case 'lione', expected a pattern"):
        rehearsal.main(["host", "lione"])
