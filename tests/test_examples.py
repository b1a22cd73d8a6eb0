"""The examples run, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def printed(*command):
    """The six losses that an example prints."""
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
def test_fsdp2_goes_on_with_another_number_of_processes(tmp_path):
    launch = ("-m", "torch.distributed.run", "--nproc-per-node")
    what = ("-m", "examples.fsdp2", tmp_path / "checkpoint")
    first = printed(*launch, "2", *what)
    assert first[-1] < 0.05 * first[0]
    rest = printed(*launch, "1", *what)
    assert rest[0] < 1.1 * first[-1]
    assert rest[-1] < 0.5 * first[-1]
