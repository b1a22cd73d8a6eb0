"""The benchmarks that pages cite: what they measure, on one small layer."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout

import pytest
import torch

from benchmarks import muons, newton_schulz_shapes, peers, sharded, step
from benchmarks.contenders import OURS, REFERENCE, TORCH
from marsopt import REGISTRY
from tests.processes import spawn

SMALL = ["--layers", "1", "--width", "64", "--vocab", "64", "--rounds", "2", "--eager"]
CHOSEN = ["mars-adamw", "mars-adamw-exact", "adamw", "adamw-fused", "peers"]


def call(monkeypatch, *args: object) -> str:
    """What the command prints."""
    monkeypatch.setattr(sys, "argv", ["step", *SMALL, *map(str, args)])
    told = io.StringIO()
    with redirect_stdout(told):
        step.main()
    return told.getvalue()


def test_contenders_see_equal_gradients_and_all_are_named(tmp_path, monkeypatch):
    told = call(monkeypatch, "--only", *CHOSEN, "--json", tmp_path / "a.json")
    report = json.loads((tmp_path / "a.json").read_text())
    every = [REFERENCE, *OURS, *TORCH, *peers.table()]
    assert set(REGISTRY) <= {c.key for c in every}
    asked = step.choose(every, CHOSEN, [])
    rows = {row["key"]: row for row in report["rows"]}
    assert set(rows) == {c.key for c in asked if not c.lacks}
    assert set(report["missing"]) == {c.title for c in asked if c.lacks}
    assert all(f"\n{c.title}" in told for c in asked)
    assert rows[REFERENCE.key]["ratio"] == dict(median=1.0, low=1.0, high=1.0)
    # torch's AdamW and ours end at equal parameters, whatever the others clipped
    assert rows[REFERENCE.key]["distance"] < 1e-5
    # a fourth buffer, which is not in optimizer.state
    num_bytes = {key: row["state_bytes_per_parameter"] for key, row in rows.items()}
    assert 12 <= num_bytes["mars-adamw"] < 14 < 16 <= num_bytes["mars-adamw-exact"]


def test_newton_schulz_takes_the_matrices_of_blocks():
    found = newton_schulz_shapes.matrices("llama3-8b", 2, 64)
    assert found == {(64, 64): 4, (16, 64): 4, (224, 64): 4, (64, 224): 2}


def sharded_rows(rank, world):
    with torch.compiler.set_stance("force_eager"):
        return sharded.measure(layers=1, width=16, num_rounds=2)


@pytest.mark.processes
def test_sharded_steps_send_what_is_promised():
    """One all-reduce, two all-to-all for each of two buckets, 2mn/p bf16 numbers."""
    found, _ = spawn(sharded_rows, 2)
    rows, numel = {row.title: row for row in found}, 12 * 16 * 16
    ours = rows[muons.OURS.title]
    assert ours.collectives == dict(all_reduce=1, all_to_all=4)
    assert numel < ours.bytes_sent < numel + 2000  # gloo's headers, and the norms
    assert rows[muons.WHOLE.title].collectives == {}
    assert all(row.off_by is None or row.off_by[0] < 0.05 for row in found)
    assert "1 all_reduce, 4 all_to_all" in sharded.table(found)
