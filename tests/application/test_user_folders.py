"""What a user keeps beside a run's checkpoints is neither read, counted nor deleted."""

from __future__ import annotations

import shutil

import pytest

from train.runs.checkpoints import checkpoint, delete, last_step, steps
from train.runs.checksums import SUMS

FILES = (SUMS, ".metadata", "__0_0.distcp")
# below, above and equal to the steps of the run, and names that are numbers no more
KEPT = [
    "best-step-2", "step-2.bak", "step-99.bak", "step-", "step-007", "step-1e3",
    "step-²", "step--4", "step-5 ",
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Two checkpoints, folders of the user's beside them, and a file, which is none."""
    for name in ("step-4", "step-8", *KEPT):
        folder = tmp_path / "checkpoint" / name
        folder.mkdir(parents=True)
        for file in FILES:
            (folder / file).touch()
    (tmp_path / "checkpoint/step-11").touch()
    return tmp_path


def test_a_run_reads_its_own_checkpoints_alone(run):
    assert steps(run) == [4, 8] and last_step(run) == 8
    assert checkpoint(run).name == "step-8"


def test_a_deletion_is_of_the_link_and_leaves_no_damage(run, monkeypatch):
    path = run / "checkpoint/step-4"
    path.with_name("step-5").symlink_to("step-4")
    delete(path.with_name("step-5"))
    assert len([*path.iterdir()]) == 3 and steps(run) == [4, 8]
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)  # cut off here
    delete(path)
    assert [p.name for p in path.iterdir()] == ["__0_0.distcp"]
    assert steps(run) == [8]
