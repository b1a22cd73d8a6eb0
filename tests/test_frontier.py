"""The study of SOAP beside Muon: its command on sizes that show nothing; its search."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest

from benchmarks import frontier as study
from benchmarks.frontier import Point, neighbours, optimum
from train.errors import UserError

SIZES = "--layers 1 --width 8 --seq-len 16 --steps 4 --batch 2 --held-out 4 --seeds 2"
CHOSEN = ["Moonlight", "SOAP-Muon, short, N = 1, transport"]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    numbers = np.random.default_rng(0).integers(0, 97, 400)
    for name in ("train.bin", "val.bin"):
        numbers.astype("<u2").tofile(tmp_path / name)
    monkeypatch.setattr(study, "METHODS", {n: study.METHODS[n] for n in CHOSEN})
    monkeypatch.setattr(study, "BETAS", (0.9, 0.95, 0.98))
    monkeypatch.setattr(study, "TURNS", 1)
    monkeypatch.setattr(study, "TURN", 1)

    def run(*more, files=("losses.json",)):
        paths = [str(tmp_path / name) for name in files]
        argv = ["study", *SIZES.split(), "--data", str(tmp_path), *more, "--json"]
        monkeypatch.setattr(sys, "argv", [*argv, *paths])
        study.main()
        return capsys.readouterr().out

    return run


def test_a_search_ends_where_no_neighbour_is_better():
    asked = []

    def loss(point):
        asked.append(point)
        return abs(math.log2(point.lr / 0.04)) + abs(point.beta1 - 0.9)

    best = optimum(loss, Point(0.01, 0.95))
    assert best == (0.04, 0.9)
    assert {*neighbours(best), best} <= {*asked}


def test_the_command_goes_on_and_reads_what_others_ran(call, tmp_path, monkeypatch):
    call("--methods", CHOSEN[0])
    path = tmp_path / "losses.json"
    found = json.loads(path.read_bytes())
    assert list(found["best"]) == CHOSEN[:1] and set(found["seconds"]) == {*CHOSEN}
    other = ("other.json", "losses.json")
    ended = call("--methods", CHOSEN[1], "--minutes", "0", files=other)
    assert "the same command goes on" in ended
    printed = call("--methods", CHOSEN[1], files=other)
    rows = [line for line in printed.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == CHOSEN
    assert "not run" not in printed
    monkeypatch.setattr(study, "Training", None)  # nothing runs again
    assert call(files=other).splitlines()[-2:] == printed.splitlines()[-2:]
    again = json.loads((tmp_path / "other.json").read_bytes())
    again["losses"] |= dict.fromkeys(found["losses"], 9.0)
    (tmp_path / "third.json").write_text(json.dumps(again))
    with pytest.raises(UserError, match="expected each in one"):
        call(files=("losses.json", "third.json"))
    with pytest.raises(UserError, match="the same options, or another --json"):
        call("--steps", "5")
    with pytest.raises(UserError, match="a multiple of 4"):
        call("--width", "6")
