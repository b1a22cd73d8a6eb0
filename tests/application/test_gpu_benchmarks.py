"""benchmarks.gpu: commands that run once, are cut in time, and fill the tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import tables
from benchmarks.gpu.jobs import PARTS, Job, jobs_of
from marsopt.profiling.machine import describe
from marsopt.step.compiling import missing_for
from train.errors import UserError

# writes what benchmarks.rates would
QUICK = f"""
import json, sys
found = dict(machine={describe("cpu")!r}, copy_bandwidth=3e12, matmul_rate={{}})
with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
    json.dump(found, file)
"""


def play(monkeypatch, folder, jobs, *args):
    monkeypatch.setattr(command, "jobs_of", lambda *_: jobs)
    words = ["gpu", "speed", "--device", "cpu", "--miniature", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", [*words, *args])
    command.main()
    return json.loads((folder / "speed.json").read_text())


def test_commands_are_cut_in_time_and_continued(tmp_path, monkeypatch, capfd):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "broken.py").write_text("raise SystemExit('no such thing here')\n")
    (tmp_path / "quick.py").write_text(QUICK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    quick = Job("rates", "quick", (), 1)
    jobs = [Job("broken", "broken", (), 1), quick, Job("slow", "slow", (), 1)]
    found = play(monkeypatch, tmp_path / "out", jobs, "--limit", "4")
    assert found["broken"]["code"] == 1
    assert "no such thing here" in found["broken"]["output"]
    assert found["slow"]["code"] is None
    assert found["rates"]["result"]["copy_bandwidth"] == 3e12
    told = capfd.readouterr().out
    assert "copy 3,000 GB/s" in told  # the tables
    assert '{"speed": {"broken": {"command": "python -m broken"' in told
    began = found["rates"]["seconds"]
    jobs[0] = Job("broken", "quick", (), 1)
    found = play(monkeypatch, tmp_path / "out", jobs[:2], "--limit", "30")
    assert found["broken"]["code"] == 0
    assert found["rates"]["seconds"] == began  # not run again


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("miniature", [False, True])
def test_commands_of_every_part(part, miniature):
    jobs = jobs_of(part, "cuda", miniature, Path("data/packages"))
    assert len({job.name for job in jobs}) == len(jobs)
    assert all("cuda" in " ".join(job.args) for job in jobs)
    if not miniature:
        assert sum(job.seconds for job in jobs) > 0


def test_a_part_that_nobody_measured_says_so(tmp_path):
    said = tables.tables(tmp_path)
    assert said.count("not measured") == 6  # four tables, two budgets


def test_tables_take_what_commands_wrote(tmp_path):
    spread = dict(median=2.0, low=1.0, high=3.0)
    step = dict(
        model="gpt2-large", dtype="float32",
        rows=[dict(key="mars-adamw", title="MARS-AdamW",
                   num_launches=5, kernel_seconds=6e-3,
                   seconds=spread, host_seconds=spread, ratio=spread | {"median": 0.9},
                   peak_bytes=10**6, state_bytes_per_parameter=12.0)],
    )  # fmt: skip
    shape = dict(count=36, rows=1280, cols=1280, seconds=spread, rate=6e14,
                 products_rate=7e14, model="gpt2-large", form="bfloat16")  # fmt: skip
    ns = dict(matmul_rate=8e14, rows=[shape])
    profile = dict(floor=dict(norms=1e12, update=24e12, copied=2e12), seconds=10.0,
                   copy_bandwidth=3e12, num_flops=0, matmul_rate=8e14, peak_bytes=0,
                   printed=[dict(num_launches=14)], num_launches=20, recompiles=[],
                   bytes_per_param=36.0, host_seconds=1.0)  # fmt: skip
    machine = describe("cpu")
    results = {
        "step gpt2-large elementwise float32": step,
        "newton-schulz gpt2-large": ns,
        "profile gpt2-large mars-adamw": profile,
        "rates": dict(machine=machine, copy_bandwidth=3e12, matmul_rate={"bf16": 8e14}),
    }
    entries = {name: dict(code=0, result=result) for name, result in results.items()}
    entries["profile gpt2-xl muon"] = dict(code=1, result=None)
    (tmp_path / "speed.json").write_text(json.dumps(entries))
    said = tables.tables(tmp_path)
    assert "the copy rate | at least 0.85 | 0.90 (gpt2-large mars-adamw) |" in said
    assert "matmul rate | at least 0.6 | 0.75 (gpt2-large (1280, 1280)) |" in said
    assert "copy 3,000 GB/s" in said
    assert "| 2000.00 | 2000.00 | 6.00 | 5 | 0.90 |" in said
    assert "xl" not in said


def test_the_profiler_asks_for_triton_before_anything_is_compiled():
    assert missing_for("cuda") in (None, "no Triton for cuda")


def test_bad_input(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu", "sped"])
    with pytest.raises(UserError, match="got part 'sped', expected some of"):
        command.main()
    monkeypatch.setattr(sys, "argv", ["tables", "--out", str(tmp_path / "none")])
    with pytest.raises(UserError, match="expected that of benchmarks.gpu"):
        tables.main()
