"""What a user keeps beside a run's checkpoints is neither read, counted nor deleted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.trainers import losses, train_all
from train import prepare
from train.errors import UserError
from train.runs.checkpoints import checkpoint, delete, steps
from train.runs.checksums import SUMS
from train.runs.trained import of_run

pytestmark = pytest.mark.application

# below, above and equal to the steps of the run, and names that are numbers no more
KEPT = [
    "best-step-2", "step-2.bak", "step-99.bak", "step-", "step-007", "step-1e3",
    "step-²", "step--4", "step-5 ",
]  # fmt: skip
OPTIONS = [
    "--config", "tiny_mars_adamw",
    "--training.seq-len", 16,
    "--training.global-batch-size", 2,
    "--training.local-batch-size", 2,
    "--lr-scheduler.warmup-steps", 2,
    "--lr-scheduler.total-steps", 12,
    "--checkpoint.interval", 2,
    "--metrics.log-freq", 1,
    "--validator.samples", 2,
]  # fmt: skip
SMALL = {"num_layers": 1, "num_heads": 1, "width": 8, "block_size": 16}


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of the user's below the checkpoints."""
    paths = [path for name in KEPT for path in (folder / "checkpoint" / name).glob("*")]
    return {path: path.read_bytes() for path in paths}


def numbered(folder: Path) -> set[str]:
    """The folders that are not the user's."""
    found = {path.name for path in (folder / "checkpoint").iterdir() if path.is_dir()}
    return found - set(KEPT)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 12 steps, continued after step 4 with copies beside its checkpoints;
    what it printed then, and what the user's folders held before.
    """
    root = tmp_path_factory.mktemp("run")
    files = [Path(json.__file__)]
    prepare.prepare("text", "bytes", root / "data", files=files, val_fraction=0.2)
    options = [*OPTIONS, "--dataloader.dataset-path", root / "data"]
    train_all({"run": [*options, "--training.steps", 4]}, root, **SMALL)
    for name in KEPT:
        folder = root / "run/checkpoint"
        shutil.copytree(folder / "step-2", folder / name)
    before = contents(root / "run")
    (root / "run/checkpoint/step-11").touch()  # a file is no checkpoint
    printed = train_all({"run": [*options, "--training.steps", 12]}, root, **SMALL)
    return root / "run", printed["run"], before


def test_a_run_reads_and_deletes_its_own_checkpoints_alone(run):
    folder, printed, before = run
    assert sorted(losses(printed)) == list(range(5, 13)), printed
    assert contents(folder) == before
    # the newest two, and the last step's
    assert numbered(folder) == {"step-8", "step-10", "step-12"}
    assert (folder / "checkpoint/step-11").is_file()
    assert steps(folder) == [8, 10, 12]
    assert checkpoint(folder).name == "step-12"
    assert of_run(folder, None).step == 12
    with pytest.raises(UserError, match=r"got --step 99, .* \[8, 10, 12\]"):
        of_run(folder, 99)


def test_a_deletion_is_of_the_link_and_leaves_no_damage(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint/step-4"
    path.mkdir(parents=True)
    for name in (SUMS, ".metadata", "__0_0.distcp"):
        (path / name).touch()
    path.with_name("step-5").symlink_to("step-4")
    delete(path.with_name("step-5"))
    assert len([*path.iterdir()]) == 3 and steps(tmp_path) == [4]
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)  # cut off here
    delete(path)
    assert [p.name for p in path.iterdir()] == ["__0_0.distcp"]
    assert steps(tmp_path) == []
