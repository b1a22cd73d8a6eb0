"""The campaign in miniature: it takes a quarter of an hour, and must not rot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.application


def test_the_campaign_in_miniature():
    numbers = ["--inputs", "25", "--damaged", "6", "--kills", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "train.campaign", "--brief", *numbers],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(inputs|damage|kills) +(\d+)", done.stdout, re.MULTILINE)
    assert rows == [("inputs", "25"), ("damage", "6"), ("kills", "1")]
