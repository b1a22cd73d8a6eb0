"""The examples run, and learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{args[0]}", *args[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(v) for v in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < 0.05 * losses[0]
