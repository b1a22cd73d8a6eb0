"""The study of state in bfloat16: its command on sizes that show nothing."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import bf16_state as study
from marsopt import MARS
from train.errors import UserError

SIZES = "--layers 1 --width 8 --seq-len 16 --steps 6 --batch 2 --held-out 4 --seeds 2"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    numbers = np.random.default_rng(0).integers(0, 97, 400)
    for name in ("train.bin", "val.bin"):
        numbers.astype("<u2").tofile(tmp_path / name)

    def run(*more):
        options = ["--eager", "--data", tmp_path, "--json", tmp_path / "losses.json"]
        argv = ["study", *SIZES.split(), *map(str, options), *more]
        monkeypatch.setattr(sys, "argv", argv)
        study.main()
        return capsys.readouterr().out

    return run


def test_the_command_has_a_row_for_every_state_and_goes_on(call, tmp_path):
    printed = call()
    rows = [line.split(" | ") for line in printed.splitlines() if " | " in line][1:]
    states = [study.FLOAT32, study.STOCHASTIC, study.NEAREST]
    assert [row[1] for row in rows] == 2 * states
    path = tmp_path / "losses.json"
    found = json.loads(path.read_bytes())
    assert len(found["losses"]) == 12
    # six steps show no more than that the three are not one
    for rule in ("mars-adamw", "adamw"):
        apart = [found["losses"][f"{rule}, {state}, seed 1"] for state in states]
        assert len({tuple(losses) for losses in apart}) == 3
        assert all(one == pytest.approx(apart[0], rel=1e-3) for one in apart)
    found["losses"]["adamw, float32, seed 0"] = [9.0, 9.0]
    path.write_text(json.dumps(found))
    assert "adamw | float32 | 7." in call()  # the mean with it: nothing ran again
    with pytest.raises(UserError, match="the same options, or another --json"):
        call("--steps", "7")
    with pytest.raises(UserError, match="a multiple of 4"):
        call("--width", "6")


def test_rounding_to_nearest_is_that_of_bfloat16():
    p = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = MARS([p], lr=0.01, compile=False)
    p.grad = torch.randn(5, 3)
    optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[p].items()}
    study.round_to_nearest(optimizer)
    for key, value in optimizer.state[p].items():
        same = before[key] if key == "step" else before[key].to(torch.bfloat16).float()
        assert torch.equal(value, same)
