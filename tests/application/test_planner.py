"""The planner of owners, and the command that prints forecasts."""

from __future__ import annotations

import pytest
import torch

from marsopt import NewtonSchulz
from marsopt.parallel.layout import Matrix, shard_sizes
from marsopt.parallel.planner import assign
from tests.application.made import called, refused
from train.forecast.step import planned as planned_by
from train.plan import job_of, main

NS = NewtonSchulz().on("cuda")
BLOCK = [(3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120)]
LARGE = [Matrix(r, c, 0) for r, c in BLOCK * 36]


def test_plans_are_deterministic_and_complete():
    first = planned_by(LARGE, 7, NS)
    assert first == planned_by(LARGE, 7, NS)
    owned = [part for bucket in first for part in bucket]
    assert sorted(i for part in owned for i in part) == list(range(len(LARGE)))
    assert all(len(bucket) == 7 and all(bucket) for bucket in first)
    assert planned_by([], 7, NS) == []


def test_longest_processing_time_first():
    assert assign([3, 3, 2, 2, 2], 2) == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("size", [0, 1, 3, 5, 8, 257])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_shard_sizes_are_those_of_torch(size, ranks):
    pieces = [len(c) for c in torch.arange(size).chunk(ranks)] if size else []
    want = pieces + [0] * (ranks - len(pieces))
    assert shard_sizes(size, ranks) == want


def test_the_jobs_of_recipes():
    job = job_of("large_mars_shampoo")
    assert job.num_params == 773_582_080
    assert len(job.matrices()) == 36 * 4 + 2
    assert job_of("small_mars_adamw").matrices() == {}
    # MARS-M and Moonlight give embeddings to AdamW
    for name in ("large_mars_m", "large_moonlight"):
        matrices = job_of(name).matrices()
        assert len(matrices) == 36 * 4
        assert not {"wte.weight", "wpe.weight"} & matrices.keys()


def planned(*words):
    """The rows of the table that the command prints, called in this process."""
    code, out, err = called(main, *words)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    return out, [row for row in rows if len(row) == 9 and row[1].isdigit()]


def test_rules_are_compared_on_a_model():
    """Bytes of a parameter, parameters, state, MB sent and the most, TFLOP of an owner
    and the most.
    """
    rules = "moonlight", "mars-adamw-exact"
    words = "--model", "llama3-8b", "--rules", *rules, "--ranks", 64
    out, rows = planned(*words)
    assert out.startswith("llama3-8b: 8,030,261,248 parameters\n")
    moonlight = ["64", "8.52", "0.47", "0.53", "429.4", "445.6", "10.405", "10.995"]
    assert rows[0] == ["moonlight", *moonlight]
    assert [rows[1][0], *rows[1][5:]] == [rules[1], "0.0", "0.0", "0.000", "0.000"]
    out, rows = planned(*words, "--replicas", 8)
    assert "8 replicas of HSDP" in out
    assert rows[0][:5] == ["moonlight", "64", "8.52", "3.74", "4.23"]
    bits = "--master-weight-bits", 24, "--state-dtype", "int8"
    words = "--model", "gpt2-large", "--rules", "adamw", "mars-adamw", "moonlight"
    _, rows = planned(*words, "--ranks", 1, *bits)
    assert [row[2] for row in rows] == ["5.06", "6.09", "4.12"]
    _, rows = planned("--config", "large_moonlight_4_bytes", "--ranks", 1)
    assert rows[0][2] == "4.12"


def test_a_recipe_is_planned_for_several_numbers_of_gpus():
    _, rows = planned("--config", "tiny_muon")
    assert [row[:2] for row in rows] == [["muon", n] for n in ("1", "8", "64", "512")]
    assert planned("--model", "gpt2-small", "--ranks", 8)[1][0][0] == "moonlight"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--model", "llama"), "got model llama, expected one of gpt2-small"),
        (("--model", "gpt2-xl", "--rules", "sgd"), "got rule sgd, expected one of"),
        (("--config", "none"), "got --config none, expected one"),
        (("--config", "tiny_muon", "--rules", "muon"), "got --rules with --config"),
        (("--config", "tiny_muon", "--state-dtype", "int8"), "got --state-dtype with"),
        (("--config", "tiny_muon", "--ranks", 8, "--replicas", "3"), "got 8 ranks and"),
    ],
)
def test_what_cannot_be_planned(args, told):
    assert refused(main, *args).startswith(f"error: {told}")
