"""benchmarks.gpu: commands that run once, and are cut in time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.jobs import PARTS, Job, jobs_of
from marsopt.profiling.machine import describe

# writes what benchmarks.rates would
QUICK = f"""
import json, sys
found = dict(machine={describe("cpu")!r}, copy_bandwidth=3e12, matmul_rate={{}})
with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
    json.dump(found, file)
"""


def test_commands_are_cut_in_time_and_continued(tmp_path, monkeypatch, capfd):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "quick.py").write_text(QUICK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, limit in (("slow", "4"), ("quick", "30")):
        jobs = [Job("rates", "quick", (), 1), Job("other", name, (), 1)]
        monkeypatch.setattr(command, "jobs_of", lambda *_, jobs=jobs: jobs)
        words = ["speed", "--device", "cpu", "--miniature", "--limit", limit]
        words = ["gpu", *words, "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", words)
        command.main()
        found = json.loads((tmp_path / "out" / "speed.json").read_text())
        assert found["other"]["code"] == (None if name == "slow" else 0)
        began = found["rates"]["seconds"]
    assert found["rates"]["seconds"] == began  # not run again
    assert "copy 3,000 GB/s" in capfd.readouterr().out  # the tables


@pytest.mark.parametrize("part", PARTS)
def test_commands_of_every_part(part):
    jobs = jobs_of(part, "cuda", False, Path("data/packages"))
    assert len({job.name for job in jobs}) == len(jobs)
    assert all("cuda" in " ".join(job.args) for job in jobs)
