"""What a user keeps beside a run's checkpoints is neither read, counted nor deleted."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest

from research.compare.recipes import go_back, keep_last_checkpoint
from tests.trainers import losses, train_all
from train import prepare, sample
from train.engine.launch import parse, take_folder
from train.engine.resolve import resolve
from train.errors import UserError
from train.runs.checkpoints import checkpoint, delete, last_step, steps
from train.runs.checksums import SUMS
from train.runs.summary import read_scalars
from train.runs.trained import of_run

pytestmark = pytest.mark.application

# below, above and equal to the steps of the run, and names that are numbers no more
KEPT = [
    "best-step-2", "step-2.bak", "step-2-copy", "my-step-3", "step-4.bak",
    "step-99.bak", "best-step-99", "step-", "step-007", "step-1e3", "step-²",
    "step--4", "step-5 ",
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


def copies(folder: Path, original: str) -> dict[str, bytes]:
    """Copies of a checkpoint under the user's names, and what they hold."""
    for name in KEPT:
        shutil.copytree(folder / "checkpoint" / original, folder / "checkpoint" / name)
    (folder / "checkpoint" / "step-11").touch()  # a file is no checkpoint
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of the user's below the checkpoints."""
    root = folder / "checkpoint"
    return {
        str(path.relative_to(root)): path.read_bytes()
        for name in KEPT
        for path in sorted((root / name).glob("*"))
    }


def numbered(folder: Path) -> set[str]:
    """The folders that are not the user's."""
    found = {path.name for path in (folder / "checkpoint").iterdir() if path.is_dir()}
    return found - set(KEPT)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 12 steps, continued after step 4 with copies beside its checkpoints;
    what it printed then, and what the user's folders hold before and after.
    """
    root = tmp_path_factory.mktemp("run")
    prepare.prepare(
        "text", "bytes", root / "data", files=[Path(json.__file__)], val_fraction=0.2
    )
    options = [*OPTIONS, "--dataloader.dataset-path", root / "data"]
    printed = train_all({"run": [*options, "--training.steps", 4]}, root, **SMALL)
    assert sorted(losses(printed["run"])) == [1, 2, 3, 4], printed["run"]
    before = copies(root / "run", "step-2")
    # files of the user's, to which a stranger's links lead where DCP will write
    (root / "thesis").write_text("years")
    (root / "run/checkpoint/step-6").mkdir()
    for name in ("__0_0.distcp", ".metadata.tmp", ".SHA256SUMS.tmp"):
        os.link(root / "thesis", root / "run/checkpoint/step-6" / name)
    printed = train_all({"run": [*options, "--training.steps", 12]}, root, **SMALL)
    return root / "run", printed["run"], before


def test_a_run_continues_from_its_own_last_step(run):
    _, printed, _ = run
    assert sorted(losses(printed)) == list(range(5, 13)), printed


def test_a_run_writes_through_no_hard_links(run):
    assert (run[0].parent / "thesis").read_text() == "years"


LINKED = [
    *("rank0.log", "metrics.jsonl", "settings.json", ".settings.json.tmp"),
    *("tb", "checkpoint"),
]


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", LINKED)
def test_a_stranger_s_links_are_not_followed(name, link, run, tmp_path, monkeypatch):
    thesis, folder = tmp_path / "thesis", tmp_path / "run"
    thesis.write_text("years")
    folder.mkdir()
    is_folder = "." not in name
    if is_folder:
        (tmp_path / "inner").mkdir()
        thesis.rename(tmp_path / "inner/thesis")
        thesis = tmp_path / "inner/thesis"
    if is_folder and link is os.link:
        pytest.skip("folders have no hard links")
    link(thesis.parent if is_folder else thesis, folder / name)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(variable, str(int("SIZE" in variable)))
    words = [*OPTIONS, "--dump-folder", folder]
    words += ["--dataloader.dataset-path", run[0].parent / "data"]
    config = parse([*map(str, words)])
    resolve(config, 1)
    root = logging.getLogger()
    kept = root.handlers[:]
    try:
        if link is os.symlink or name == "rank0.log":
            with pytest.raises(UserError, match=f"{name}, (a link|which is a link)"):
                take_folder(config)
        else:
            take_folder(config)
    finally:
        for handler in [h for h in root.handlers if h not in kept]:
            root.removeHandler(handler)
            handler.stream.close()
    assert thesis.read_text() == "years"


def test_of_a_checkpoint_that_is_a_link_the_link_is_deleted(run, tmp_path):
    (tmp_path / "step-1").mkdir()
    for name in (SUMS, ".metadata", "data"):
        (tmp_path / "step-1" / name).touch()
    (tmp_path / "step-2").symlink_to("step-1")
    delete(tmp_path / "step-2")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert len([*(tmp_path / "step-1").iterdir()]) == 3


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_record_of_a_run_that_is_no_file_is_refused(make, tmp_path):
    make(tmp_path / "events.out.tfevents.1")
    with pytest.raises(UserError, match="which is a folder, a FIFO, a device"):
        read_scalars(tmp_path)


def test_a_run_deletes_its_own_checkpoints_alone(run):
    folder, _, before = run
    assert contents(folder) == before
    # the newest two, and the last step's
    assert numbered(folder) == {"step-8", "step-10", "step-12"}
    assert (folder / "checkpoint" / "step-11").is_file()


def test_commands_read_the_run_s_own_checkpoints_alone(run, monkeypatch, capsys):
    folder, *_ = run
    assert steps(folder) == [8, 10, 12]
    assert last_step(folder) == 12
    assert checkpoint(folder).name == "step-12"
    assert of_run(folder, None).step == 12
    with pytest.raises(UserError, match=r"got --step 99, .* \[8, 10, 12\]"):
        of_run(folder, 99)
    args = ["sample", "--run", str(folder), "--tokens", "3", "--prompt", "import"]
    monkeypatch.setattr(sys, "argv", args)
    sample.main()
    assert capsys.readouterr().out.startswith("import")


def test_a_comparison_deletes_the_run_s_own_checkpoints_alone(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    keep_last_checkpoint(folder)
    assert numbered(folder) == {"step-12"}
    assert contents(folder) == run[2]
    # a run that was cut off before its last validation goes back a checkpoint
    shutil.rmtree(folder / "tb")
    go_back(folder, 12)
    assert numbered(folder) == set()
    assert contents(folder) == run[2]


INDEX = ".metadata"


def test_a_deletion_that_is_cut_off_leaves_no_damage(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint" / "step-4"
    path.mkdir(parents=True)
    for name in (SUMS, INDEX, "__0_0.distcp"):
        (path / name).touch()
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)
    delete(path)
    assert [p.name for p in path.iterdir()] == ["__0_0.distcp"]
    assert steps(tmp_path) == []
