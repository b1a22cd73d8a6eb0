"""The GPU path without a GPU: steps lowered to Triton, kernels compiled for an H100."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu.rehearsal import rehearse
from benchmarks.gpu.rehearsal.cases import Case
from benchmarks.gpu.rehearsal.faults import MOST_REGISTERS, faults
from benchmarks.gpu.rehearsal.tables import steps
from tests.rehearsal import needs_triton, rehearsed

pytestmark = needs_triton

# graphs, launches, and of them over stacks: with what is fused today; some are compiled
FROZEN = {
    "mars-adamw/approximate/gpt2-small/float32": (2, 28, 14),
    "mars-adamw/transport/gpt2-small/float32": (2, 30, 14),
    # one more than by sums alone: whether every c^2 fits bfloat16, of two algorithms
    "mars-m/transport/gpt2-small/bfloat16/binaries": (3, 34, 18),
    "normuon/none/llama-7b-layer/float32": (3, 25, 13),
    "mars-soap-muon/approximate/gpt2-small/float32": (3, 34, 18),
    "nadamw/none/gpt2-xl/bfloat16": (2, 24, 14),
    "mars-adamw/approximate/gpt2-small/float32/state-bfloat16/binaries": (2, 28, 14),
}
BINARIES = [name for name in FROZEN if name.endswith("/binaries")]
# each with what its check has to say
MUTANTS = {
    "mars-lion/transport/gpt2-small/float32=read_always": "32.01 bytes a parameter",
    "mars-adamw/approximate/gpt2-medium/float32=sum_at_once": "divides for every",
    "mars-lion/approximate/gpt2-small/float32=none_if_all": "1 recompiles",
    "adamw/none/llama-7b-layer/float32/binaries=few_registers": "spills",
    "lion/none/llama-7b-layer/float32/binaries=at_odd_places": "wide loads or stores",
}


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lowered")
    return rehearsed("tests.lowered", *FROZEN, *MUTANTS, folder=folder)


@pytest.mark.parametrize("name", FROZEN)
def test_graphs_and_launches(lowered, name):
    found = lowered["cases"][name]
    counts = len(found["graphs"]), found["launches"], found["stack_launches"]
    assert counts == FROZEN[name]


@pytest.mark.parametrize("name", FROZEN)
def test_bytes_are_the_floor_and_nothing_recompiles(lowered, name):
    found = lowered["cases"][name]
    assert found["faults"] == []
    assert found["loaded"] + found["stored"] == pytest.approx(found["floor"], rel=1e-3)
    assert found["num_recompiled"] == 0


def test_y_is_behind_a_flag(lowered):
    """Where the state keeps x: not with AdamW, which reads y to compute it."""
    for name in FROZEN:
        expected = 2 if name.startswith("mars-m/transport") else 0
        assert lowered["cases"][name]["flagged"] == expected, name


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_a_fault(lowered, name):
    assert MUTANTS[name] in " ".join(lowered["cases"][name]["faults"])


@pytest.mark.parametrize("name", BINARIES)
def test_kernels_neither_spill_nor_load_narrowly(lowered, name):
    found = lowered["cases"][name]
    binaries = [b for kernel in found["kernels"] for b in kernel.get("binaries", ())]
    assert len(binaries) >= found["stack_launches"]
    assert found["faults"] == []
    assert all(b["spills"] == 0 for b in binaries)
    assert all(b["registers"] <= MOST_REGISTERS for b in binaries)
    assert all(b["narrow"] == 0 < b["full_size"] for b in binaries)


def test_each_fault_is_found(lowered):
    """In figures that are changed, one after the other."""
    row = lowered["cases"][BINARIES[0]]
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


def test_an_unaligned_gradient_is_told(lowered):
    said = lowered["messages"]
    assert said["aligned"] == ""
    assert "the gradient of 2 begins inside a larger buffer" in said["unaligned"]


def test_a_capture_refuses_what_a_replay_could_not_read(lowered):
    said = lowered["messages"]
    assert said["warm"] == said["known pattern"] == "captured"
    assert "lacks 1 gradients" in said["new pattern"]
    assert "a hyperparameter as a tensor on cpu" in said["rate on the host"]


def test_the_command(tmp_path):
    """A case lowered and kept; a table, and everything as JSON."""
    own = ("--rules", "adamw", "--corrections", "none", "--models", "gpt2-small")
    own += ("--dtypes", "float32", "--no-binaries", "--workers", "1")
    own += ("--out", str(tmp_path / "out"))
    found = rehearsed("benchmarks.gpu.rehearsal", *own, folder=tmp_path)
    (row,) = found["cases"]
    assert (row["rule"], row["num_recompiled"]) == ("adamw", 0)
    (kept,) = (tmp_path / "out").iterdir()
    assert json.loads(kept.read_text())["result"] == row
    assert "| adamw | gpt2-small | float32 | 2 | 24 |" in steps([row])


def test_what_is_kept_is_not_done_again(tmp_path, monkeypatch):
    """As long as no source has changed."""

    def lower(case):
        raise RuntimeError("lowered")

    monkeypatch.setattr(rehearse, "lower", lower)
    case = Case("adamw")
    monkeypatch.setattr(rehearse, "fingerprint", lambda: "today")
    with pytest.raises(RuntimeError, match="lowered"):
        rehearse.rehearse(case, False, tmp_path)
    kept = tmp_path / "adamw_none_gpt2-small_float32_float32_lowered.json"
    kept.write_text(json.dumps(dict(fingerprint="today", result=dict(launches=22))))
    assert rehearse.rehearse(case, False, tmp_path) == dict(launches=22)
    monkeypatch.setattr(rehearse, "fingerprint", lambda: "tomorrow")
    with pytest.raises(RuntimeError, match="lowered"):
        rehearse.rehearse(case, False, tmp_path)
