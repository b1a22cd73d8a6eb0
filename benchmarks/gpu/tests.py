"""tests/library/test_cuda.py, and what came out as JSON.

python -m benchmarks.gpu.tests [--device cuda] [--json FILE] [-- PYTEST'S OPTIONS]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from marsopt.profiling.machine import describe
from train.files import write_json

TESTS = "tests/library/test_cuda.py"


class Outcomes:
    """A plugin that keeps what became of every test, in a file from the first on."""

    def __init__(self, device: str, path: Path | None) -> None:
        self._machine, self._path = describe(device), path
        self._counts: Counter[str] = Counter()
        self._failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a call, or a setup or teardown that did not pass."""
        if report.when == "call" or not report.passed:
            self._counts[report.outcome] += 1
        if report.failed:
            self._failed[report.nodeid] = report.longreprtext[-2000:]
        if self._path is not None:
            found = dict(machine=self._machine, counts=self._counts)
            write_json(self._path, found | dict(failed=self._failed))


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
    # plugins and warnings of a machine that nobody has seen decide nothing
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    words = [TESTS, "-q", "-W", "default", "-p", "no:cacheprovider", *args.pytest]
    code = pytest.main(words, plugins=[Outcomes(args.device, args.json)])
    return 0 if code == pytest.ExitCode.TESTS_FAILED else int(code)


if __name__ == "__main__":
    sys.exit(main())
