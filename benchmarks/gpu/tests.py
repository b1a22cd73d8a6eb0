"""tests/test_cuda.py, and what came out as JSON.

python -m benchmarks.gpu.tests [--device cuda] [--json FILE] [-- PYTEST'S OPTIONS]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from marsopt.profile.machine import describe

TESTS = "tests/test_cuda.py"


class Outcomes:
    """A plugin that keeps what became of every test."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a call, or a setup or teardown that did not pass."""
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-2000:]


def main() -> int:
    """Run the command; return pytest's exit code, 0 where tests only failed: the file
    says which.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tests")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("pytest", nargs="*")
    args = parser.parse_args()
    os.environ["MARSOPT_TEST_DEVICE"] = args.device
    outcomes = Outcomes()
    code = pytest.main([TESTS, "-q", *args.pytest], plugins=[outcomes])
    found = dict(
        machine=describe(args.device),
        counts=dict(outcomes.counts),
        failed=outcomes.failed,
    )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if code == pytest.ExitCode.TESTS_FAILED else int(code)


if __name__ == "__main__":
    sys.exit(main())
