"""The examples run, and learn."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.hf_trainer import chains

ROOT = Path(__file__).parent.parent


def printed(*command, held_out=False):
    """The six losses that an example prints, and its ``held_out`` loss."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(v) for v in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    if held_out:
        return losses, float(re.search(r"held-out (\d+\.\d+)", done.stdout)[1])
    assert len(losses) == 6
    return losses


@pytest.mark.parametrize(
    "args",
    [
        ["custom_loop", "--flat"],
        ["custom_loop", "--eager"],
        ["drop_in"],
        ["drop_in", "--exact"],
    ],
)
def test_example(args):
    losses = printed("-m", f"examples.{args[0]}", *args[1:])
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.processes
def test_hugging_faces_trainer_saves_and_resumes_what_is_trained(tmp_path):
    """The last checkpoint holds the model that was evaluated, and a run that goes on
    from the one before repeats the rest.
    """
    transformers = pytest.importorskip("transformers")
    what = ("-m", "examples.hf_trainer", tmp_path)
    losses, held_out = printed(*what, held_out=True)
    assert len(losses) == 6 and losses[-1] < 0.05 * losses[0]
    last = tmp_path / "checkpoint-120"
    model = transformers.GPT2LMHeadModel.from_pretrained(last)
    rows = torch.stack([row["input_ids"] for row in chains(64)])
    with torch.no_grad():
        found = float(model(rows, labels=rows).loss)
    # the Trainer divides by all labels, though nothing predicts the first of a row
    found *= (rows.shape[1] - 1) / rows.shape[1]
    assert found == pytest.approx(held_out, abs=1e-6)
    shutil.rmtree(last)
    rest, again = printed(*what, held_out=True)
    assert (rest, again) == (losses[4:], held_out)


@pytest.mark.processes
def test_fsdp2_goes_on_with_another_number_of_processes(tmp_path):
    launch = ("-m", "torch.distributed.run", "--nproc-per-node")
    what = ("-m", "examples.fsdp2", tmp_path / "checkpoint")
    first = printed(*launch, "2", *what)
    assert first[-1] < 0.05 * first[0]
    rest = printed(*launch, "1", *what)
    assert rest[0] < 1.1 * first[-1]
    assert rest[-1] < 0.5 * first[-1]
