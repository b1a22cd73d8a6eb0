"""Damage and kills in miniature, so that ``python -m tests.faults`` does not rot."""

from __future__ import annotations

import re

import pytest

from tests.forks import forked

pytestmark = pytest.mark.application


def test_damage_and_kills_in_miniature():
    numbers = ["--damaged", 4, "--kills", 1]
    code, out, err = forked("tests.faults", "--brief", *numbers)
    assert code == 0, out + err
    rows = re.findall(r"^\| (damage|kills) \| (\d+) ", out, re.MULTILINE)
    assert rows == [("damage", "4"), ("kills", "1")]
